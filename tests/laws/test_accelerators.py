"""The laws hold where parts compute on an accelerator.

These are the tests of the laws themselves, with all parts there and the unsplit model, where they
compare with it, on the CPU. On the pretended accelerator every operation that takes tensors of
both places fails.
"""

from __future__ import annotations

import pytest

from tests.accelerators import accelerator, everything_is_there  # noqa: F401
from tests.laws.test_cluster_equals_whole import (  # noqa: F401
    _one_thread,
    splitter,
    test_a_step_without_labels_is_none,
    test_a_test_set_without_labels_has_no_loss,
    test_dropout_is_the_same_for_every_cut_and_another_for_another_seed,
    test_many_adamw_steps_stay_on_the_unsplit_path,
)

pytestmark = pytest.mark.usefixtures("small_matrices_are_fused", "everything_is_there")

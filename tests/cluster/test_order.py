"""What a round is asked for."""

from __future__ import annotations

import math

import pytest

from collapipe_flwr.cluster.order import LearningSettings
from collapipe_flwr.core.errors import ConfigError


@pytest.mark.parametrize("deadline_s", [0, -1.0, math.nan, math.inf])
def test_a_deadline_is_a_time_that_ends(deadline_s: float) -> None:
    with pytest.raises(ConfigError, match=f"deadline_s must be > 0 .* got {deadline_s}"):
        LearningSettings(deadline_s=deadline_s)


def test_a_snapshot_is_checked_where_it_is_given() -> None:
    with pytest.raises(ConfigError, match="snapshot_every must be >= 0, got -1"):
        LearningSettings(snapshot_every=-1)

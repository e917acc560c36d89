"""What a person reads of an error that nobody foresaw."""

from __future__ import annotations

import pytest

from collapipe_flwr.core.errors import ConfigError, RunError, wrap_unexpected
from collapipe_flwr.data.batches import cut_batches


def test_an_error_of_an_unknown_kind_says_what_and_where() -> None:
    where = r"in collapipe_flwr/data/batches\.py, line \d+"
    with (
        pytest.raises(RunError, match=rf"^unexpected ValueError \(range.*\) {where}: ") as told,
        wrap_unexpected(),
    ):
        cut_batches([], 0)
    assert isinstance(told.value.__cause__, ValueError)


def test_an_error_from_elsewhere_says_where_it_was_raised() -> None:
    with (
        pytest.raises(RunError, match=r"unexpected KeyError \('x'\) in test_errors\.py, line"),
        wrap_unexpected(),
    ):
        raise KeyError("x")


def test_our_own_errors_stay_as_they_are() -> None:
    with pytest.raises(ConfigError, match=r"^say this$"), wrap_unexpected():
        raise ConfigError("say this")

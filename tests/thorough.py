"""How many examples a property is tried on: some with every run, many with the slow tests."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import settings

THOROUGH = "THOROUGH" in os.environ  # `make test-slow`


def examples(some: int, many: int, **others: object) -> settings:
    """The settings of a property that is tried on ``some`` examples, or on ``many``."""
    return settings(max_examples=many if THOROUGH else some, **others)  # type: ignore[arg-type]


def few(cases: Iterable[Any], *telling: int) -> list[Any]:
    """Parameters of a test: the ``telling`` ones, by place, always; all others with the slow tests.

    A tuple holds the values of several parameters.
    """
    known = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [
        pytest.param(*case, marks=() if n in telling else pytest.mark.slow)
        for n, case in enumerate(known)
    ]

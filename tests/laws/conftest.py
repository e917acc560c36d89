"""Fixtures of all laws."""

from __future__ import annotations

import pytest

from collapipe_flwr.models.splitter import Splitter
from tests import rounds
from tests.skeletons import skeletons_are_copied  # noqa: F401


@pytest.fixture(scope="module", params=["marian", "bert"])
def splitter(request: pytest.FixtureRequest) -> Splitter:
    return rounds.make_splitter(request.param, dropout=0.0)


@pytest.fixture(scope="module")
def bert() -> Splitter:
    return rounds.bert()

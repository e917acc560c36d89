"""Fixtures of all tests."""

from __future__ import annotations

import pytest
from hypothesis import settings

from collapipe_flwr.pipeline import adding

settings.register_profile("any machine", deadline=None)  # beside what the environment asks for
settings.load_profile("any machine")


@pytest.fixture
def small_matrices_add_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """The small models of tests take the ways of large ones."""
    monkeypatch.setattr(adding, "WORTH", 0)

"""Fixtures of all laws."""

from __future__ import annotations

from tests.skeletons import skeletons_are_copied  # noqa: F401

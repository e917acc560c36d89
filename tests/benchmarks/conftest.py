"""Fixtures of all tests of benchmarks."""

from __future__ import annotations

from tests.worlds import small  # noqa: F401

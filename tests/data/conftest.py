"""Fixtures of all tests of data."""

from __future__ import annotations

from tests.tiny_tasks import own_cache  # noqa: F401

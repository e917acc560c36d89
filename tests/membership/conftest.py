"""Fixtures of all tests of membership."""

from __future__ import annotations

from tests.membership.clusters import joining, pair, registry  # noqa: F401

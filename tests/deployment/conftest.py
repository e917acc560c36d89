"""Fixtures of all tests of deployments."""

from __future__ import annotations

from tests.membership.clusters import joining  # noqa: F401

"""Fixtures of all tests of reports."""

from __future__ import annotations

from tests.reporting.browser import browser  # noqa: F401

"""One small setting that every policy can plan."""

from __future__ import annotations

from tests.worlds import small  # noqa: F401

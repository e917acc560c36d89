"""Benchmarks and result scripts: part of the repository, not of the wheel or the FAB."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).parents[1]


def child_environment() -> dict[str, str]:
    """The environment in which ``python -m benchmarks...`` finds this checkout from any folder."""
    paths = (str(ROOT), os.environ.get("PYTHONPATH", ""))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}

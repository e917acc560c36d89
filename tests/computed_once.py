"""Long results: the first test that asks for one computes it, for all workers of a run."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest
from filelock import FileLock

Result = TypeVar("Result")


def folder_of_run(factory: pytest.TempPathFactory) -> Path:
    """Where all workers of this run of pytest find the same files."""
    base = factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


def computed_once(
    factory: pytest.TempPathFactory, name: str, compute: Callable[[], Result]
) -> Result:
    """What ``compute`` returns, which pickle must know; others wait while one computes it."""
    file = folder_of_run(factory) / f"{name}.pickle"
    with FileLock(f"{file}.lock"):
        if not file.exists():
            file.write_bytes(pickle.dumps(compute()))
        result: Result = pickle.loads(file.read_bytes())
    return result

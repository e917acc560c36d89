"""Fixtures of all tests."""

from __future__ import annotations

import gc
import os

import pytest
import torch
from hypothesis import HealthCheck, settings

from collapipe_flwr.pipeline import backward

# Beside what the environment asks for; a starved machine is slow without anything being wrong.
settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")
# Tests run side by side: one thread each, here and in the processes that they start. Sums then have
# one order as well, so equal means equal bits.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_report_header() -> str:
    """Kernels round in different ways, see `closeness`; ATEN_CPU_CAPABILITY chooses others."""
    return f"torch {torch.__version__}, CPU kernels: {torch.backends.cpu.get_cpu_capability()}"


def pytest_collection_finish() -> None:
    """Modules and tests live to the end; the garbage collector need not visit them again."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def small_matrices_are_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The small models of tests take the ways of large ones."""
    monkeypatch.setattr(backward, "WORTH", 0)

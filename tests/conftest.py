"""Fixtures of all tests."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings

from collapipe_flwr.pipeline import backward

settings.register_profile("any machine", deadline=None)  # beside what the environment asks for
settings.load_profile("any machine")


def pytest_report_header() -> str:
    """Kernels round in different ways, see `closeness`; ATEN_CPU_CAPABILITY chooses others."""
    return f"torch {torch.__version__}, CPU kernels: {torch.backends.cpu.get_cpu_capability()}"


@pytest.fixture
def small_matrices_are_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The small models of tests take the ways of large ones."""
    monkeypatch.setattr(backward, "WORTH", 0)

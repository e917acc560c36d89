"""Fixtures of all tests."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from itertools import islice
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, settings

from tests.thorough import THOROUGH

gc.disable()  # until all modules are loaded
# Beside what the environment asks for; a starved machine is slow without anything being wrong.
settings.register_profile(
    "any machine",
    max_examples=100 if THOROUGH else 30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("any machine")
# Tests run side by side: one thread each, here and in the processes that they start. Sums then have
# one order as well, so equal means equal bits.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# For the same reason everything computes on a CPU: an accelerator that nobody asked for would be
# chosen (`compute = "auto"`). `make test-accelerators` leaves this machine's in sight.
if "WITH_ACCELERATORS" not in os.environ:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
# Ray starts its workers at a niceness of 15, at which they get next to nothing of a busy machine.
os.environ.setdefault("RAY_worker_niceness", "0")
# Many processes are started: none should compile again what another one has.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False


def pytest_report_header() -> str:
    """Kernels round in different ways, see `closeness`; ATEN_CPU_CAPABILITY chooses others."""
    import torch

    return f"torch {torch.__version__}, CPU kernels: {torch.backends.cpu.get_cpu_capability()}"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long tests begin the shares that workers get of all tests, one after the other."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    long = [item for item in items if item.get_closest_marker("long")]
    others = iter([item for item in items if not item.get_closest_marker("long")])
    left = len(items)
    items.clear()
    for index in range(workers):
        begin = long[index::workers]
        share = left // (workers - index)
        items += [*begin, *islice(others, max(0, share - len(begin)))]
        left -= share
    items += others


def pytest_collection_finish() -> None:
    """Modules and tests live to the end; the garbage collector need not visit them ever.

    What tests leave behind is collected, but not after every 700 objects.
    """
    import torch  # not above: a process that starts workers and waits for them does without

    torch.set_num_threads(1)
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _the_heap_is_left_alone() -> Iterator[None]:
    """Hosts in this process would give back the heap of all tests after each of their sessions."""
    from collapipe_flwr.host import allocator

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(allocator, "_find_function", lambda _: None)  # as on other systems
        yield


@pytest.fixture(scope="session", autouse=True)
def _flower_collects_no_garbage() -> Iterator[None]:
    """It would visit what all tests have left whenever a strategy empties a record."""
    from flwr.app.message import arrayrecord

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arrayrecord, "gc", SimpleNamespace(collect=lambda: 0))
        yield


@pytest.fixture
def small_matrices_are_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The small models of tests take the ways of large ones."""
    from collapipe_flwr.pipeline import backward

    monkeypatch.setattr(backward, "WORTH", 0)

"""Real daemons that several tests use: their libraries take seconds of both cores to load."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from benchmarks.data_plane.recovery import Daemon, daemons
from tests.skeletons import skeletons_are_copied  # noqa: F401

Hosts = tuple[list[Daemon], Daemon]  # three devices and an edge
WarmDaemons = Callable[[], Hosts]


@pytest.fixture(scope="session")
def warm_daemons() -> Iterator[WarmDaemons]:
    """Those of the test before, all of them running; new ones where one has ended since."""
    with ExitStack() as stack:
        found: list[Hosts] = []

        def running() -> Hosts:
            processes = [host.process for devices, edge in found for host in (*devices, edge)]
            if not found or any(process.poll() is not None for process in processes):
                stack.close()
                found[:] = [stack.enter_context(daemons(3))]
            for process in processes:
                process.send_signal(signal.SIGCONT)
            return found[0]

        yield running

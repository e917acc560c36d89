"""Real daemons that several tests use."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from tests.cluster.daemon_processes import Daemon, running
from tests.cluster.recovered import first, splitter, undisturbed  # noqa: F401
from tests.skeletons import skeletons_are_copied  # noqa: F401

Hosts = tuple[list[Daemon], Daemon]  # three devices and an edge
WarmDaemons = Callable[[], Hosts]


@pytest.fixture(scope="session")
def warm_daemons() -> Iterator[WarmDaemons]:
    """Those of the test before, all of them running; new ones where one has ended since."""
    with ExitStack() as stack:
        found: list[Hosts] = []

        def all_running() -> Hosts:
            processes = [host.process for devices, edge in found for host in (*devices, edge)]
            if not found or any(process.poll() is not None for process in processes):
                stack.close()
                words = [("device", "--name", f"d{n}") for n in range(3)] + [("edge",)]
                started = [Daemon(*each, "--grace-s", "0") for each in words]
                *devices, edge = stack.enter_context(running(*started))
                found[:] = [(devices, edge)]
            for process in processes:
                process.send_signal(signal.SIGCONT)
            return found[0]

        yield all_running

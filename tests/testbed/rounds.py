"""What the tests of whole deployments share: the run, and when something is to fail."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from tests.testbed.processes import Program

RATE_BIT_PER_S = 50_000_000
ROUNDS = 4
ROUND_S = 480.0  # of a machine that does much else
BUSY_S = 0.3  # seconds of CPU after which a daemon is taken to be in the middle of a round
AMID_STEPS = 1 / 3  # of the edge's CPU in the last round, which played its steps once or twice
RUN = {
    "num-server-rounds": ROUNDS,
    "train.examples-per-round": 640,
    "data.train-examples": 2000,
    "data.test-examples": 50,
    "edge.timeout-s": 40.0,  # an edge that restarts on a busy machine
    "scheduler.max-model-share": 0.3,  # two devices at least
    "evaluation.every": ROUNDS,
}


class Deployed(Protocol):
    """A deployment whose run can be looked at."""

    def events(self) -> list[dict[str, Any]]:
        """One per finished round."""
        ...


def planned(event: Mapping[str, Any]) -> set[str]:
    """The devices with a segment in a round."""
    return {s["device_id"] for c in event["plan"]["clusters"] for s in c["segments"]}


def wait_for_round(deployment: Deployed, run: Program, number: int) -> None:
    """Until so many rounds have ended; AssertionError when they do not."""
    end_s = time.monotonic() + ROUND_S
    while len(deployment.events()) < number:
        assert run.process.poll() is None, f"the run ended early:\n{run.tail()}"
        assert time.monotonic() < end_s, f"round {number} never ended:\n{run.tail()}"
        time.sleep(0.1)


def first_at_work(pids: Mapping[str, int], busy_s: float = BUSY_S) -> str:
    """The first that computes for ``busy_s``, which between two rounds none does."""
    idle_s, end_s = {name: cpu_s(pid) for name, pid in pids.items()}, time.monotonic() + ROUND_S
    while True:
        for name, pid in pids.items():
            if cpu_s(pid) > idle_s[name] + busy_s:
                return name
        assert time.monotonic() < end_s, f"none of {sorted(pids)} was ever busy"
        time.sleep(0.02)


def cpu_s(pid: int) -> float:
    """Seconds of CPU that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

"""What the tests of whole deployments share: the run, and when something is to fail."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from typing import Any, Protocol

from tests.testbed.network import Network
from tests.testbed.processes import Program

RATE_BIT_PER_S = 50_000_000
ROUNDS = 4
ROUND_S = 480.0  # of a machine that does much else
AMID_STEPS_BYTES = 300_000  # of activations and gradients; at least 1.2 MB per cluster and round
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


def first_amid_steps(network: Network, hosts: Collection[str]) -> str:
    """The first that sends what only training steps send; called between two rounds.

    Until weights are fetched at a round's end, a device and the edge send nothing else of any size.
    """
    before, end_s = {host: network.sent_bytes(host) for host in hosts}, time.monotonic() + ROUND_S
    while True:
        for host, sent in before.items():
            if network.sent_bytes(host) > sent + AMID_STEPS_BYTES:
                return host
        assert time.monotonic() < end_s, f"none of {sorted(hosts)} was ever at work"
        time.sleep(0.02)

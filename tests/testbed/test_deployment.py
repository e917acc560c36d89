"""`make test-cluster` without root: ten programs on loopback, paced, TLS everywhere.

SuperLink, two SuperNodes, six device daemons and an edge train the built-in task through proxies
that pace what they forward. In round 2 a device dies for good, in round 3 the edge dies and comes
back. Where namespaces are allowed, test_document.py does this and more.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.testbed.deployment import CLUSTERS, HOSTS, Deployment, environment
from tests.testbed.namespaces import namespaces_allowed
from tests.testbed.processes import Program, programs
from tests.testbed.proxies import proxies
from tests.testbed.rounds import (
    RATE_BIT_PER_S,
    ROUND_S,
    ROUNDS,
    RUN,
    first_amid_steps,
    planned,
    wait_for_round,
)


@pytest.mark.cluster
@pytest.mark.timeout(1200)
def test_a_deployment_trains_through_the_loss_of_a_device_and_of_the_edge(tmp_path: Path) -> None:
    if namespaces_allowed():
        pytest.skip("test_document.py does this and more in network namespaces")
    with (
        proxies(HOSTS, rate_bit_per_s=RATE_BIT_PER_S) as network,
        programs(network, tmp_path, environment(tmp_path)) as running,
    ):
        deployment = Deployment(
            network=network, programs=running, folder=tmp_path, run_config=dict(RUN)
        )
        parts = deployment.start()
        run = deployment.run()
        wait_for_round(deployment, run, 1)
        victim = first_amid_steps(network, CLUSTERS["a"])
        _kill(parts[victim])
        wait_for_round(deployment, run, 2)
        first_amid_steps(network, ["edge"])
        _kill(parts["edge"])
        deployment.start_edge()
        assert run.wait(deadline_s=2 * ROUND_S) == 0, run.tail()
        _check(deployment, run, f"a/{victim}")


def _check(deployment: Deployment, run: Program, victim: str) -> None:
    summary, events = deployment.summary(), deployment.events()
    assert summary["status"] == "completed", run.tail(60)
    assert [len(event["plan"]["clusters"]) for event in events] == [2] * ROUNDS
    assert events[-1]["loss"] < 0.9 * events[0]["loss"]
    assert victim in planned(events[1])
    assert any(f"lost {victim}" in sentence for sentence in events[1]["failures"]), run.tail(60)
    assert all(victim not in planned(event) for event in events[2:])
    assert any("replayed" in sentence for sentence in events[2]["failures"]), run.tail(60)
    assert not events[3]["failures"]


def _kill(program: Program) -> None:
    program.send(signal.SIGKILL)
    program.wait(deadline_s=10.0)

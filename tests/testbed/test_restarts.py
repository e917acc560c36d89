"""SIGKILL and restart of Flower's own programs in a deployment with TLS.

SuperLink and ServerApp die in the middle of a round, the SuperLink comes back with its database,
and `resume` ends the run with the bits of an undisturbed one, optimisers that go on from round to
round included. A SuperNode dies with its ClientApp, comes back as another Flower node, and its
cluster takes part again in the same run.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.testbed.deployment import HOSTS, Deployment, environment
from tests.testbed.network import network_of
from tests.testbed.processes import Program, programs

RATE_BIT_PER_S = 50_000_000
ROUND_S = 300.0  # of a machine that does much else
RUN = {
    "num-server-rounds": 3,
    "train.examples-per-round": 160,
    "data.train-examples": 600,
    "data.test-examples": 50,
    "edge.timeout-s": 30.0,
    "round-timeout-s": 300.0,
}


@contextmanager
def deployed(folder: Path, **more: object) -> Iterator[tuple[Deployment, dict[str, Program]]]:
    with (
        network_of(HOSTS, rate_bit_per_s=RATE_BIT_PER_S) as network,
        programs(network, folder, environment(folder)) as running,
    ):
        deployment = Deployment(
            network=network, programs=running, folder=folder, run_config={**RUN, **more}
        )
        yield deployment, deployment.start()


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_a_run_whose_superlink_is_killed_resumes_to_the_bits_of_an_undisturbed_one(
    tmp_path: Path,
) -> None:
    with deployed(tmp_path, **{"train.optimizer-state": "keep"}) as (deployment, parts):
        assert deployment.run("whole").wait(deadline_s=3 * ROUND_S) == 0
        deployment.run()
        wait_for_rounds(deployment, 1)
        parts["superlink"].kill()  # and the ServerApp, its child, in round 2
        assert len(deployment.events()) < RUN["num-server-rounds"]
        deployment.start_superlink()
        folder = str(deployment.run_folder())
        resumed = deployment.run(resume=folder)
        assert resumed.wait(deadline_s=3 * ROUND_S) == 0, resumed.tail()
        assert deployment.summary()["status"] == "completed", resumed.tail(60)
        assert "resumed after round" in resumed.text()
        whole, again = (deployment.run_folder(name) / "model" for name in ("whole", "run"))
        weights = "model.safetensors"
        assert (whole / weights).read_bytes() == (again / weights).read_bytes()


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_a_cluster_whose_supernode_is_killed_takes_part_again_in_the_same_run(
    tmp_path: Path,
) -> None:
    with deployed(tmp_path, **{"num-server-rounds": 4}) as (deployment, parts):
        run = deployment.run()
        wait_for_rounds(deployment, 1)
        parts["supernode-b"].kill()  # and its ClientApp
        deployment.start_supernode("b")
        assert run.wait(deadline_s=4 * ROUND_S) == 0, run.tail()
        assert deployment.summary()["status"] == "completed", run.tail(60)
        told = [set(clusters_of(event)) for event in deployment.events()]
        assert told[0] == told[-1] == {"a", "b"}, told
        assert "cluster b is back as node" in run.text()
        assert not deployment.events()[-1]["failures"]


def clusters_of(event: dict) -> list[str]:
    return [cluster["cluster_id"] for cluster in event["plan"]["clusters"]]


def wait_for_rounds(deployment: Deployment, count: int) -> None:
    end_s = time.monotonic() + 2 * ROUND_S
    while len(deployment.events()) < count:
        assert time.monotonic() < end_s, f"round {count} never ended"
        time.sleep(0.1)

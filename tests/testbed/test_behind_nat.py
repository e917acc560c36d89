"""No machine but its own control unit reaches a cluster, and a run needs no more.

Two sites behind NAT let only connections to the SuperLink's port out, and none in; one has an edge
machine, at the other the control unit is the edge. `flwr run` trains both.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.testbed.deployment import Deployment, environment
from tests.testbed.processes import programs
from tests.testbed.rounds import planned
from tests.testbed.sites import SERVER, sites, sites_allowed

ROUNDS, RUN_S = 2, 300.0
SITES = {"a": ("cu-a", "a1", "a2"), "b": ("cu-b", "b1", "b2", "edge")}
RUN: dict[str, object] = {
    "num-server-rounds": ROUNDS,
    "model.overrides": "d_model=16 encoder_layers=4 decoder_layers=1 encoder_attention_heads=2 "
    "decoder_attention_heads=2 encoder_ffn_dim=24 decoder_ffn_dim=24 max_position_embeddings=64",
    "data.train-examples": 120,
    "data.test-examples": 12,
    "data.max-target-length": 8,
    "train.examples-per-round": 40,
    "scheduler.micro-batch-sizes": "4",
    "scheduler.micro-batches": "2",
    "scheduler.max-model-share": 0.5,  # two devices at least
}


class Behind(Deployment):
    """Clusters of sites: the run knows no address of theirs."""

    def _server_side(self) -> dict[str, object]:
        return {"output-dir": str(self.folder / "runs")}

    def _cluster_toml(self, name: str) -> str:
        text = super()._cluster_toml(name)
        head, edge, _ = text.partition("[edge]")
        return f"{head}[tls]\n" if edge and name == "a" else text


@pytest.mark.cluster
@pytest.mark.timeout(600)
@pytest.mark.skipif(not sites_allowed(), reason="needs root, ip, tc and nft (apt install nftables)")
def test_clusters_behind_nat_train_by_connections_to_the_superlink_alone(tmp_path: Path) -> None:
    env = {**environment(tmp_path), "OMP_NUM_THREADS": "1"}
    with sites(SITES) as network, programs(network, tmp_path, env) as running:
        deployment = Behind(
            network=network,
            programs=running,
            folder=tmp_path,
            run_config=RUN,
            clusters={"a": ("a1", "a2"), "b": ("b1", "b2")},
            resident=True,
        )
        deployment.start()
        run = deployment.run()
        assert run.wait(deadline_s=RUN_S) == 0, run.tail()
        assert deployment.summary()["status"] == "completed"
        assert [planned(event) for event in deployment.events()] == [
            {"a/a1", "a/a2", "b/b1", "b/b2"}
        ] * ROUNDS
        assert not [fault for event in deployment.events() for fault in event["failures"]]
        assert set(network.forbidden().values()) == {0}, network.forbidden()
        # So that the law above could fail:
        reach = f"exec 3<>/dev/tcp/{deployment.members['a1'].dial.replace(':', '/')}"
        tried = network.command(SERVER, ["timeout", "1", "bash", "-c", reach])
        assert subprocess.run(tried, capture_output=True).returncode != 0
        assert network.forbidden()[SERVER] > 0

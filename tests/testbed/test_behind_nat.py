"""No machine but its own control unit reaches a cluster, and a run needs no more.

Two sites behind NAT let only connections to the SuperLink's port out, and none in. At site a, which
has a file by hand, the control unit is the edge. At site b machines join by tokens: an edge, a
board, and a phone that accepts no connection from its own site either. `flwr run` trains both.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.testbed.deployment import Deployment, environment
from tests.testbed.processes import Program, programs
from tests.testbed.rounds import planned
from tests.testbed.sites import SERVER, Sites, sites, sites_allowed

ROUNDS, RUN_S, START_S = 2, 480.0, 180.0
SITES = {"a": ("cu-a", "a1", "a2"), "b": ("cu-b", "board", "phone", "edge")}
UNIT_B = "10.78.2.1"
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

    def start(self) -> dict[str, Program]:
        """Everything but the run."""
        init = ["cluster", "init", "b", "--address", UNIT_B, "--elsewhere", "edge"]
        told = self._type("cu-b", "cu-b", *init, "--members", "2", "--no-measure")
        assert told.wait(deadline_s=START_S) == 0, told.tail()
        boards, edge = re.findall(r"collapipe join (\S+)", told.text())
        self._type("cu-b", "cu-b", "cluster", "serve").wait_for("are let in", deadline_s=START_S)
        joining = {
            "edge server on": self._type("edge", "edge", "join", edge, "--name", "edge"),
            "board on 10.78.2.2:": self._type("board", "board", "join", boards, "--name", "board"),
            f"phone on {UNIT_B}:": self._type(
                "phone", "phone", "join", boards, "--name", "phone", "--dial"
            ),
        }
        for device in ("a1", "a2"):
            self.start_device(device)
        self.start_superlink()
        for words, program in joining.items():
            program.wait_for(words, deadline_s=START_S)
        for name in self.clusters:
            self.start_control_unit(name)
            self.start_supernode(name)
        return joining

    def _type(self, host: str, folder: str, *words: str) -> Program:
        """A command on a host, whose files are in a folder of its own."""
        own = f"COLLAPIPE_FOLDER={self.folder / 'files' / folder}"
        command = ["env", own, sys.executable, "-m", "collapipe_flwr.cli", *words]
        return self.programs.start(host, f"{host}-{words[0]}", command, cwd=self.folder)

    def _server_side(self) -> dict[str, object]:
        return {"output-dir": str(self.folder / "runs")}

    def _cluster_file(self, name: str) -> Path:
        kept = self.folder / "files" / "cu-b" / "b.toml"
        return kept if name == "b" and kept.exists() else super()._cluster_file(name)

    def _cluster_toml(self, name: str) -> str:
        head, _, _ = super()._cluster_toml(name).partition("[edge]")
        return f"{head}[tls]\n"


@pytest.mark.cluster
@pytest.mark.timeout(900)
@pytest.mark.skipif(not sites_allowed(), reason="needs root, ip, tc and nft (apt install nftables)")
def test_clusters_behind_nat_train_by_connections_to_the_superlink_alone(tmp_path: Path) -> None:
    env = {**environment(tmp_path), "OMP_NUM_THREADS": "1"}
    with sites(SITES) as network, programs(network, tmp_path, env) as running:
        network.shut("phone")
        deployment = Behind(
            network=network,
            programs=running,
            folder=tmp_path,
            run_config=RUN,
            clusters={"a": ("a1", "a2"), "b": ("board", "phone")},
            resident=True,
        )
        deployment.start()
        run = deployment.run()
        assert run.wait(deadline_s=RUN_S) == 0, run.tail()
        assert deployment.summary()["status"] == "completed"
        everybody = {"a/a1", "a/a2", "b/board", "b/phone"}
        assert [planned(event) for event in deployment.events()] == [everybody] * ROUNDS
        assert not [fault for event in deployment.events() for fault in event["failures"]]
        assert set(network.forbidden().values()) == {0}, network.forbidden()
        # So that the law above could fail:
        _try(network, SERVER, deployment.members["a1"].dial)
        _try(network, "cu-b", "10.78.2.3:50071")
        assert network.forbidden()[SERVER] > 0 and network.forbidden()["phone"] > 0


def _try(network: Sites, host: str, address: str) -> None:
    reach = f"exec 3<>/dev/tcp/{address.replace(':', '/')}"
    tried = network.command(host, ["timeout", "1", "bash", "-c", reach])
    assert subprocess.run(tried, capture_output=True).returncode != 0

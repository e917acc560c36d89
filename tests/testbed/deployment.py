"""The product as on boards: a SuperLink, two SuperNodes, six devices and an edge, all with TLS.

Every program runs on a host of its own, every link is TLS: Flower's with its own certificates,
ours mutual. A resident control unit is beside its SuperNode.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.testbed.network import Endpoint, Network
from tests.testbed.processes import Program, Programs

PROJECT = Path(__file__).parents[2]
CLUSTERS = {"a": ("a1", "a2", "a3"), "b": ("b1", "b2", "b3")}
BIN = Path(sys.executable).parent
_START_S = 90.0


def list_hosts(clusters: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """All hosts of a deployment of these devices."""
    devices = (device for members in clusters.values() for device in members)
    return ("server", "edge", *(f"cu-{name}" for name in clusters), *devices)


HOSTS = list_hosts(CLUSTERS)


@dataclass(kw_only=True)
class Deployment:
    """Addresses and files of one deployment, and how to start each part of it."""

    network: Network
    programs: Programs
    folder: Path
    run_config: dict[str, object]
    clusters: Mapping[str, Sequence[str]] = field(default_factory=lambda: CLUSTERS)
    memory_mb: int = 6  # of each device
    resident: bool = False
    members: dict[str, Endpoint] = field(init=False)
    superlink: Endpoint = field(init=False)

    def __post_init__(self) -> None:
        self.members = {name: self.network.endpoint(name) for name in ("edge", *self._devices())}
        self.superlink = self.network.endpoint("server")
        for name in self.clusters:
            self._cluster_file(name).write_text(self._cluster_toml(name))
        files = self._cluster_files()
        names = [f"superlink={self.superlink.dialled_host}", "laptop"]
        _collapipe("certs", str(self.certs), *names, *files)

    @property
    def certs(self) -> Path:
        """Where the PEM files are."""
        return self.folder / "certs"

    def start(self) -> dict[str, Program]:
        """Everything but the run, by name."""
        parts = {"edge": self.start_edge()}
        for device in self._devices():
            parts[device] = self.start_device(device)
        parts["superlink"] = self.start_superlink()
        for name in self.clusters:
            if self.resident:
                parts[f"control-unit-{name}"] = self.start_control_unit(name)
            parts[f"supernode-{name}"] = self.start_supernode(name)
        return parts

    def start_superlink(self) -> Program:
        """The SuperLink, with what its database kept of an earlier life."""
        superlink = self.programs.start("server", "superlink", self._superlink(), cwd=self.folder)
        superlink.wait_for("Uvicorn running on", deadline_s=_START_S)
        return superlink

    def start_supernode(self, name: str) -> Program:
        """The SuperNode of one cluster; not waited for."""
        number = list(self.clusters).index(name)
        command = self._supernode(number, name)
        return self.programs.start(f"cu-{name}", f"supernode-{name}", command, cwd=self.folder)

    def start_control_unit(self, name: str) -> Program:
        """What stays loaded beside the SuperNode of one cluster."""
        command = [*_COLLAPIPE, "control-unit", "--socket", str(self._socket(name))]
        unit = self.programs.start(f"cu-{name}", f"control-unit-{name}", command, cwd=self.folder)
        unit.wait_for("control unit at", deadline_s=_START_S)
        return unit

    def start_edge(self) -> Program:
        """The edge of all clusters."""
        files = self._cluster_files()
        command = [*_COLLAPIPE, "edge", "--listen", self.members["edge"].listen, *files]
        edge = self.programs.start("edge", "edge", command, cwd=self.folder)
        edge.wait_for("edge server on", deadline_s=_START_S)
        return edge

    def start_device(self, name: str) -> Program:
        """One device daemon."""
        file = self._cluster_file(name[0])
        command = [*_COLLAPIPE, "device", "--name", name, "--cluster", str(file)]
        command += ["--listen", self.members[name].listen]
        device = self.programs.start(name, name, command, cwd=self.folder)
        device.wait_for(f"{name} on", deadline_s=_START_S)
        return device

    def run(self, name: str = "run", **more: object) -> Program:
        """`flwr run` of a run of that name, with the run-config in one file."""
        home = self.folder / "flower"
        home.mkdir(exist_ok=True)
        (home / "config.toml").write_text(
            f'[superlink.boards]\naddress = "{self.superlink.dial}"\n'
            f'root-certificates = "{self.certs / "ca.pem"}"\n'
        )
        config = self.folder / f"{name}.toml"
        values = {**self.run_config, **self._server_side(), "run-name": name, **more}
        config.write_text("".join(f"{k} = {json.dumps(v)}\n" for k, v in values.items()))
        command = [str(BIN / "flwr"), "run", str(PROJECT), "boards", "--stream"]
        command += ["--run-config", str(config)]
        return self.programs.start("server", "flwr-run", command, cwd=self.folder)

    def run_folder(self, name: str = "run") -> Path:
        """Where a run writes."""
        return self.folder / "runs" / name

    def events(self, name: str = "run") -> list[dict[str, Any]]:
        """One per finished round."""
        path = self.run_folder(name) / "events.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def summary(self, name: str = "run") -> dict[str, Any]:
        """Of the run."""
        text = (self.run_folder(name) / "summary.json").read_text()
        found: dict[str, Any] = json.loads(text)
        return found

    def _devices(self) -> list[str]:
        return [device for members in self.clusters.values() for device in members]

    def _cluster_files(self) -> list[str]:
        return [word for n in self.clusters for word in ("--cluster", str(self._cluster_file(n)))]

    def _cluster_file(self, name: str) -> Path:
        return self.folder / f"{name}.toml"

    def _socket(self, name: str) -> Path:
        return self.folder / f"control-unit-{name}" / "socket"

    def _cluster_toml(self, name: str) -> str:
        devices = "".join(
            f'[[device]]\nname = "{device}"\naddress = "{self.members[device].dial}"\n'
            f'kind = "raspberry-pi-4"\nmemory-mb = {self.memory_mb}\n'
            for device in self.clusters[name]
        )
        return (
            f'id = "{name}"\n[control-unit]\nname = "cu-{name}"\nkind = "raspberry-pi-5"\n{devices}'
            f'[edge]\naddress = "{self.members["edge"].dial}"\n[tls]\n'
        )

    def _superlink(self) -> list[str]:
        host, _, port = self.superlink.listen.rpartition(":")
        command = [str(BIN / "flower-superlink"), "--host", host, "--port", port]
        command += ["--database", str(self.folder / "state.db")]
        command += ["--ssl-ca-certfile", str(self.certs / "ca.pem")]
        command += ["--ssl-certfile", str(self.certs / "superlink.pem")]
        return [*command, "--ssl-keyfile", str(self.certs / "superlink.key")]

    def _supernode(self, number: int, name: str) -> list[str]:
        _, _, port = self.network.endpoint(f"cu-{name}").listen.rpartition(":")
        node = f"partition-id={number} num-partitions={len(self.clusters)}"
        node += f" cluster='{self._cluster_file(name)}' state-dir='{self.folder}/state-{name}'"
        node += f" control-unit='{self._socket(name) if self.resident else ''}'"
        command = [*_COLLAPIPE, "supernode", "--superlink", self.superlink.dial]
        command += ["--root-certificates", str(self.certs / "ca.pem"), "--port", port]
        return [*command, "--node-config", node]

    def _server_side(self) -> dict[str, object]:
        return {
            "output-dir": str(self.folder / "runs"),
            "edge.address": self.members["edge"].dial,
            "edge.certificate-name": "edge",
            "edge.tls-ca": str(self.certs / "ca.pem"),
            "edge.tls-cert": str(self.certs / "server.pem"),
            "edge.tls-key": str(self.certs / "server.key"),
        }


_COLLAPIPE = [sys.executable, "-m", "collapipe_flwr.cli"]


def _collapipe(*arguments: str) -> None:
    subprocess.run([*_COLLAPIPE, *arguments], check=True, timeout=60, capture_output=True)


def environment(folder: Path) -> dict[str, str]:
    """Of every program: this Python, its own Flower home, nothing asked of the internet."""
    return {
        **os.environ,
        "PATH": f"{BIN}{os.pathsep}{os.environ.get('PATH', '')}",
        "PYTHONPATH": str(PROJECT),
        "FLWR_HOME": str(folder / "flower"),
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_TELEMETRY_ENABLED": "0",
        "TOKENIZERS_PARALLELISM": "false",
    }

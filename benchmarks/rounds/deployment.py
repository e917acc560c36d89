"""Flower's and our programs on loopback, with TLS: one cluster of two devices."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import collapipe_flwr
from collapipe_flwr.core.errors import RunError
from collapipe_flwr.core.links import find_free_ports
from collapipe_flwr.core.processes import guard_command

ROOT = Path(collapipe_flwr.__file__).parents[1]
BIN = Path(sys.executable).parent
START_S = 120.0
_LOOK_S = 0.1
_COLLAPIPE = (sys.executable, "-m", "collapipe_flwr.cli")
_PROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "rounds-app"
version = "1.0.0"
license = "Apache-2.0"
[tool.flwr.app]
publisher = "collapipe"
[tool.flwr.app.components]
serverapp = "rounds_app.server:app"
clientapp = "rounds_app.{client}:app"
[tool.flwr.app.config]
num-server-rounds = 1
size = ""
edge = ""
certs = ""
marks = ""
"""


@dataclass(kw_only=True)
class Deployment:
    """Programs whose logs lie in ``folder``; all have ended when ``stack`` has."""

    folder: Path
    stack: ExitStack
    resident: bool
    pids: dict[str, int] = field(default_factory=dict)

    def start(self) -> None:
        """All programs but the run; raises RunError for one that does not start."""
        ports = find_free_ports(5)
        self._superlink, self._edge, *devices, runtime = (f"127.0.0.1:{port}" for port in ports)
        self._cluster_file(devices)
        made = ("superlink=127.0.0.1", "--cluster", str(self.cluster))
        command = [*_COLLAPIPE, "certs", str(self.certs), *made]
        subprocess.run(command, check=True, capture_output=True, timeout=START_S)
        ca, host = str(self.certs / "ca.pem"), self._superlink.partition(":")
        pair = [str(self.certs / f"superlink.{kind}") for kind in ("pem", "key")]
        files = ("--ssl-ca-certfile", ca, "--ssl-certfile", pair[0], "--ssl-keyfile", pair[1])
        flower = [str(BIN / "flower-superlink"), "--host", host[0], "--port", host[2], *files]
        self._run("superlink", flower, "Uvicorn running on")
        at = ("--cluster", str(self.cluster), "--listen")
        self._run("edge", [*_COLLAPIPE, "edge", *at, self._edge], "edge server on")
        for name, address in zip(("d1", "d2"), devices, strict=True):
            device = [*_COLLAPIPE, "device", "--name", name, *at, address]
            self._run(name, device, f"{name} on")
        if self.resident:
            unit = [*_COLLAPIPE, "control-unit", "--socket", str(self._socket)]
            self._run("control-unit", unit, "control unit at")
        node = f"partition-id=0 num-partitions=1 cluster='{self.cluster}' "
        node += f"control-unit='{self._socket if self.resident else ''}'"
        command = [*_COLLAPIPE, "supernode", "--superlink", self._superlink]
        command += ["--root-certificates", ca, "--port", runtime.partition(":")[2]]
        self._run("supernode", [*command, "--node-config", node], "SuperNode ID")

    def train(
        self, client: str, config: Mapping[str, object], marks: Path
    ) -> subprocess.Popen[bytes]:
        """Start a run whose ServerApp writes ``marks`` at its end."""
        project = self.folder / client
        shutil.copytree(Path(__file__).parent / "app", project / "rounds_app")
        (project / "pyproject.toml").write_text(_PROJECT.format(client=client))
        (self.folder / "flower").mkdir(exist_ok=True)
        (self.folder / "flower" / "config.toml").write_text(
            f'[superlink.rounds]\naddress = "{self._superlink}"\n'
            f'root-certificates = "{self.certs / "ca.pem"}"\n'
        )
        edge = "" if client.startswith("plain") else self._edge
        told = {**config, "edge": edge, "certs": str(self.certs), "marks": str(marks)}
        file = self.folder / f"{client}.toml"
        file.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in told.items()))
        command = [str(BIN / "flwr"), "run", str(project), "rounds", "--stream"]
        return self._begin(f"run-{client}", [*command, "--run-config", str(file)])

    def log(self, name: str) -> str:
        """The end of what a program wrote."""
        return "\n".join(self._log(name).read_text(errors="replace").splitlines()[-15:])

    @property
    def cluster(self) -> Path:
        """The cluster file."""
        return self.folder / "bench.toml"

    @property
    def certs(self) -> Path:
        """Where the PEM files are."""
        return self.folder / "certs"

    @property
    def _socket(self) -> Path:
        return self.folder / "control-unit" / "socket"

    def _log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def _cluster_file(self, addresses: Sequence[str]) -> None:
        devices = "".join(
            f'[[device]]\nname = "{name}"\naddress = "{address}"\nkind = "raspberry-pi-4"\n'
            for name, address in zip(("d1", "d2"), addresses, strict=True)
        )
        self.cluster.write_text(
            'id = "bench"\n[control-unit]\nname = "cu"\nkind = "raspberry-pi-5"\n'
            f'{devices}[edge]\naddress = "{self._edge}"\n[tls]\n'
        )

    def _run(self, name: str, command: Sequence[str], says: str) -> None:
        process, end_s = self._begin(name, command), time.monotonic() + START_S
        self.pids[name] = process.pid
        while says not in self._log(name).read_text(errors="replace"):
            if process.poll() is not None or time.monotonic() > end_s:
                raise RunError(f"{name} did not start:\n{self.log(name)}")
            time.sleep(_LOOK_S)

    def _begin(self, name: str, command: Sequence[str]) -> subprocess.Popen[bytes]:
        with self._log(name).open("wb") as log:
            process = subprocess.Popen(
                guard_command(command),
                cwd=self.folder,
                env=self._environment(),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        return self.stack.enter_context(process)

    def _environment(self) -> dict[str, str]:
        return {
            **os.environ,
            "PATH": f"{BIN}{os.pathsep}{os.environ.get('PATH', '')}",
            "PYTHONPATH": str(ROOT),
            "FLWR_HOME": str(self.folder / "flower"),
            "OMP_NUM_THREADS": "1",  # of every program, on both sides: one board each
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_TELEMETRY_ENABLED": "0",
            "TOKENIZERS_PARALLELISM": "false",
        }

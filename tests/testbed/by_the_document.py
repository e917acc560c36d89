"""The deployment of docs/deploy.md by hand: its files and commands, on machines of its names."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.testbed.document import Block, blocks_of
from tests.testbed.machines import PROJECT, Machine
from tests.testbed.network import Network
from tests.testbed.processes import Program, Programs

PAGE, LEVEL = PROJECT / "docs" / "deploy.md", "###"
TRUSTED = "trusted"
ADDRESSES = {
    "server": "10.0.0.1",
    "edge": "10.0.0.2",
    TRUSTED: "10.0.0.3",
    "cu-greenhouse": "10.0.0.10",
    "pi-1": "10.0.0.11",
    "pi-2": "10.0.0.12",
    "nano": "10.0.0.13",
    "cu-workshop": "10.0.0.20",
    "pc-1": "10.0.0.21",
    "pc-2": "10.0.0.22",
}
DEVICES = ("pi-1", "pi-2", "nano", "pc-1", "pc-2")
PLACES = {
    "the machine that you trust": (TRUSTED,),
    "every machine": tuple(name for name in ADDRESSES if name != TRUSTED),
    "pi-1, and with their own names on pi-2, nano, pc-1 and pc-2": DEVICES,
    "the edge": ("edge",),
    "the server": ("server",),
    "cu-greenhouse": ("cu-greenhouse",),
    "cu-workshop": ("cu-workshop",),
}
RUN = "flwr run"
_COMMAND_S = 240.0
_START_S = 120.0
_SAYS = {
    "collapipe-device": "{name} on 10.0.0.",
    "collapipe-edge": "edge server on 10.0.0.2:50061",
    "collapipe-superlink": "Uvicorn running on",
    "collapipe-control-unit": "control unit at",
    "collapipe-supernode": "",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentedDeployment:
    """Carries out the page, block by block; ``more`` is added to its run-config."""

    network: Network
    machines: Mapping[str, Machine]
    programs: Programs
    folder: Path
    env: Mapping[str, str]
    more: Mapping[str, object]

    def start(self) -> None:
        """Everything before the run."""
        for block in self._blocks():
            if RUN not in block.text:
                self._carry_out(block)

    def run(self) -> Program:
        """The run, as the page starts it."""
        (block,) = (b for b in self._blocks() if RUN in b.text)
        (place,) = PLACES[block.place]
        command = self.machines[place].enter(block.text)
        return self.programs.start_here("flwr-run", command, cwd=self.folder)

    def events(self) -> list[dict[str, Any]]:
        """One per finished round."""
        path = self._results() / "events.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def summary(self) -> dict[str, Any]:
        """Of the run."""
        found: dict[str, Any] = json.loads((self._results() / "summary.json").read_text())
        return found

    def systemctl(self, verb: str, unit: str, name: str) -> None:
        """`systemctl VERB UNIT` on one machine, waited for."""
        self._shell(name, f"systemctl {verb} {unit}")
        if verb == "start":
            self._await(name, unit)

    def _blocks(self) -> list[Block]:
        return blocks_of(PAGE, LEVEL)

    def _results(self) -> Path:
        return self.machines["server"].path("/var/lib/collapipe/runs/run")

    def _carry_out(self, block: Block) -> None:
        if block.language == "toml":
            self._write(block)
            return
        for name in PLACES[block.place]:
            text = block.text.replace("pi-1", name) if name in DEVICES else block.text
            self._shell(name, text)
            for unit in _SAYS:
                if f"enable --now {unit}" in text:
                    self._await(name, unit)

    def _write(self, block: Block) -> None:
        on_server = block.place.startswith("~/")
        machine = self.machines["server" if on_server else TRUSTED]
        path = machine.path(f"/root/{block.place.removeprefix('~/')}")
        path.parent.mkdir(parents=True, exist_ok=True)
        more = self.more if path.name == "boards.toml" else {}
        path.write_text(block.text + "".join(f"{k} = {json.dumps(v)}\n" for k, v in more.items()))

    def _shell(self, name: str, text: str) -> None:
        done = subprocess.run(
            self.machines[name].enter(text),
            capture_output=True,
            text=True,
            timeout=_COMMAND_S,
            env=dict(self.env),
        )
        assert done.returncode == 0, f"on {name}:\n{text}\n{done.stdout}\n{done.stderr}"

    def _await(self, name: str, unit: str) -> None:
        words, end_s = _SAYS[unit].format(name=name), time.monotonic() + _START_S
        machine = self.machines[name]
        while words not in machine.service(unit, "log"):
            said = machine.service(unit, "log")
            assert not machine.service(unit, "rc"), f"{unit} on {name} ended:\n{said}"
            assert time.monotonic() < end_s, f"{unit} on {name} never said {words!r}:\n{said}"
            time.sleep(0.2)

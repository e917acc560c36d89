"""The deployment of a soak: struck, healed, and looked after as systemd does.

A program that has ended is started again after 5 s, as `Restart=on-failure` and `RestartSec=5` of
our service files; a run whose ServerApp has ended is resumed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests.faults.soak_schedule import (
    APP,
    CUT,
    DEVICE,
    EDGE,
    HANG,
    LINK,
    NODE,
    SLOW,
    UNIT,
    Fault,
)
from tests.faults.usage import Life, Usage, usages
from tests.testbed.deployment import Deployment, environment, list_hosts
from tests.testbed.namespaces import NamespaceNetwork, namespaces
from tests.testbed.processes import Program, programs

RATE_BIT_PER_S, SLOW_BIT_PER_S = 50_000_000, 400_000
RESTART_S = 5.0
APP_START_S = 60.0  # from `flwr run` until its ServerApp is there
ENDLESS = 1_000_000
APPS = ("what forks ClientApps", "ClientApp")
# What systemd takes for one service, and ends as a whole.
_SERVICES = {LINK: (LINK, "SuperExec", APP), NODE: (NODE, "SuperExec", *APPS)}
RUN = {
    "num-server-rounds": ENDLESS,
    "evaluation.every": ENDLESS,
    "model.overrides": "",
    "lora.rank": 2,
    "lora.target-modules": "q_proj",
    "data.train-examples": 240,
    "data.test-examples": 12,
    "data.max-target-length": 8,
    "train.examples-per-round": 40,
    "train.decay": "none",
    "train.optimizer-state": "keep",
    "scheduler.micro-batch-sizes": "4",
    "scheduler.micro-batches": "2,3",
    "world.channel": "static",
    "edge.timeout-s": 15.0,
    "round-timeout-s": 45.0,
}


@dataclass(slots=True, kw_only=True)
class Site:
    """The parts of a deployment by name, and what has happened to them unasked."""

    deployment: Deployment
    network: NamespaceNetwork
    parts: dict[str, Program]
    unasked: list[str] = field(default_factory=list)
    lives: list[Life] = field(default_factory=list)  # when last sampled
    runs: int = 0
    _killed: set[str] = field(default_factory=set)
    _due_s: dict[str, float] = field(default_factory=dict)  # when a part is started again
    _run: Program | None = None
    _run_s: float = -APP_START_S

    def sample(self, now_s: float) -> dict[Life, Usage]:
        """What every process holds."""
        found = usages(self.network.processes(), now_s)
        self.lives = list(found)
        return found

    def strike(self, fault: Fault) -> None:
        """Begin a fault, on what lived when last sampled."""
        if fault.kind == CUT:
            self.network.cut(fault.host)
        elif fault.kind == SLOW:
            self.network.shape(fault.host, SLOW_BIT_PER_S)
        elif fault.kind == HANG:
            self._signal(fault, signal.SIGSTOP)
        else:
            self._kill(fault)

    def heal(self, fault: Fault) -> None:
        """End it; what was killed comes back by itself."""
        if fault.kind == CUT:
            self.network.plug(fault.host)
        elif fault.kind == SLOW:
            self.network.shape(fault.host, RATE_BIT_PER_S)
        elif fault.kind == HANG:
            self._signal(fault, signal.SIGCONT)

    def tend(self, now_s: float) -> None:
        """Start again what has ended, and start or resume the run where no ServerApp lives."""
        for name, program in self.parts.items():
            if program.process.poll() is None:
                continue
            if name not in self._due_s:
                self._due_s[name] = now_s + RESTART_S
                if name not in self._killed:
                    self.unasked.append(f"{name} ended with {program.process.returncode}")
            elif self._due_s[name] <= now_s:
                self.parts[name] = _starter(self.deployment, name)()
                self._killed.discard(name)
                del self._due_s[name]
        self._keep_running(now_s)

    def _keep_running(self, now_s: float) -> None:
        if any(life.role == APP for life in self.lives):
            if self._run is not None:
                self._run.stop()  # nobody reads what it streams
                self._run = None
            return
        if now_s < self._run_s + APP_START_S or self.parts["superlink"].process.poll() is not None:
            return
        if self.runs and APP not in self._killed and LINK not in self._killed:
            self.unasked.append("the ServerApp ended")
        self._killed -= {APP, LINK}
        begun = {"resume": str(self.deployment.run_folder())} if self.deployment.events() else {}
        self._run, self._run_s = self.deployment.run(**begun), now_s
        self.runs += 1

    def stop(self, deadline_s: float) -> list[str]:
        """SIGTERM to all processes, as systemd does; what goes on after the deadline is killed."""
        if self._run is not None:
            self._run.stop()
        for life in self.sample(0.0):
            with suppress(ProcessLookupError):
                os.kill(life.pid, signal.SIGTERM)
        end_s = time.monotonic() + deadline_s
        while (left := usages(self.network.processes(), 0.0)) and time.monotonic() < end_s:
            for program in self.parts.values():
                program.process.poll()
            time.sleep(0.2)
        for life in left:
            with suppress(ProcessLookupError):
                os.kill(life.pid, signal.SIGKILL)
        return [f"{life.role} on {life.host}" for life in left]

    def _kill(self, fault: Fault) -> None:
        if fault.role in (APP, LINK):
            self._killed.add(fault.role)
            self._run_s = -APP_START_S
        if fault.role == APP:
            self._signal(fault, signal.SIGKILL)
            return
        self._killed.add(_part(fault))
        for role in _SERVICES.get(fault.role, (fault.role,)):
            self._signal(replace(fault, role=role), signal.SIGKILL)

    def _signal(self, fault: Fault, number: signal.Signals) -> None:
        for life in self.lives:
            if (life.host, life.role) == (fault.host, fault.role):
                with suppress(ProcessLookupError):
                    os.kill(life.pid, number)


def _part(fault: Fault) -> str:
    cluster = fault.host.removeprefix("cu-")
    names = {
        DEVICE: fault.host,
        EDGE: "edge",
        LINK: "superlink",
        UNIT: f"control-unit-{cluster}",
        NODE: f"supernode-{cluster}",
    }
    return names[fault.role]


def _starter(deployment: Deployment, name: str) -> Callable[[], Program]:
    kind, _, cluster = name.rpartition("-")
    if kind == "supernode":
        return lambda: deployment.start_supernode(cluster)
    if kind == "control-unit":
        return lambda: deployment.start_control_unit(cluster)
    fixed = {"edge": deployment.start_edge, "superlink": deployment.start_superlink}
    return fixed.get(name, lambda: deployment.start_device(name))


@contextmanager
def site(folder: Path, clusters: Mapping[str, Sequence[str]]) -> Iterator[Site]:
    """Clusters of these devices with resident control units, whose programs all run."""
    scratch = folder / "tmp"
    scratch.mkdir(parents=True)
    own = {"TMPDIR": str(scratch), "XDG_CACHE_HOME": str(folder / "cache")}
    env = {**environment(folder), **own, "OMP_NUM_THREADS": "1"}
    model = str(folder / "model")
    pretrained = {"model.pretrained": model, "data.tokenizer": model}
    subprocess.run([sys.executable, "-m", "tests.faults.soak_model", model], check=True, env=env)
    with (
        namespaces(list_hosts(clusters), rate_bit_per_s=RATE_BIT_PER_S) as network,
        programs(network, folder, env) as running,
    ):
        deployment = Deployment(
            network=network,
            programs=running,
            folder=folder,
            run_config={**RUN, "clusters": len(clusters), **pretrained},
            clusters=clusters,
            memory_mb=1,
            resident=True,
        )
        yield Site(deployment=deployment, network=network, parts=deployment.start())

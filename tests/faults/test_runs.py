"""Whatever dies in a run of one cluster, the run ends completed, resumed where its server died."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from collapipe_flwr.core.keys import Value
from tests.cluster.daemon_processes import ROOT
from tests.faults.hosts import Host, hosts
from tests.faults.rows import Row
from tests.forked import Forked
from tests.integration.conftest import TINY

ROUNDS, STRUCK_ROUND = 3, 2
RUN_S = 120.0
RUN: dict[str, Value] = {
    **TINY,
    "clusters": 1,
    "num-server-rounds": ROUNDS,
    "world.channel": "static",
    "edge.timeout-s": 5.0,
}
CLUSTER = """
id = "shed"
[control-unit]
kind = "raspberry-pi-5"
[[device]]
name = "d0"
address = "{d0}"
memory-mb = 1
[[device]]
name = "d1"
address = "{d1}"
memory-mb = 1
[edge]
address = "{edge}"
"""
REPEATS, RESUMES = "round is repeated", "the run is resumed"
Deployment = tuple[Sequence[Host], Host]
Strike = Callable[[Deployment], None]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What happens to whom; ``strike`` is None for those that kill themselves."""

    role: str
    name: str
    phases: tuple[str, ...]
    how: str
    strike: Strike | None = None


def edge_away(deployment: Deployment) -> None:
    edge = deployment[1]
    edge.stop()
    edge.later(12.0, edge.start)


def devices_away(deployment: Deployment) -> None:
    for device in deployment[0]:
        device.stop()
        device.later(5.0, device.start)


FAULTS = (
    Fault(
        role="server",
        name="killed",
        phases=("planning", "training", "aggregating", "checkpointing", "evaluating"),
        how=RESUMES,
    ),
    Fault(
        role="control unit",
        name="killed",
        phases=("placing", "forward", "collecting", "replying"),
        how=REPEATS,
    ),
    Fault(
        role="edge",
        name="away for 12 s, timeout 5 s",
        phases=("placing", "forward", "replying"),
        how=REPEATS,
        strike=edge_away,
    ),
    Fault(
        role="all devices",
        name="away for 5 s",
        phases=("placing", "forward"),
        how=REPEATS,
        strike=devices_away,
    ),
)


def cases() -> Iterator[Any]:
    """Every fault in each of its phases."""
    for fault in FAULTS:
        for phase in fault.phases:
            name = f"{fault.role}-{fault.name}-{phase}".replace(" ", "-")
            yield pytest.param(fault, phase, id=name)


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with hosts(tmp_path_factory.mktemp("hosts"), devices=2) as found:
        yield found


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "phase"), list(cases()))
def test_the_run_is_completed(
    tmp_path: Path, deployment: Deployment, fault: Fault, phase: str
) -> None:
    env = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "FAULT_ROLE": fault.role,
        "FAULT_PHASE": phase,
        "FAULT_ROUND": str(STRUCK_ROUND),
        "FAULT_STRUCK": str(tmp_path / "struck"),
        "FAULT_STEPS": str(tmp_path / "steps"),
        "FAULT_LOG": str(tmp_path / "log"),
    }
    over = threading.Event()
    striking = threading.Thread(
        target=strike_when_due, args=(fault, deployment, tmp_path / "struck", over)
    )
    striking.start()
    try:
        code = ran(tmp_path, deployment, env)
        if fault.how == RESUMES:
            assert code == -9
            code = ran(tmp_path, deployment, env, resume=str(tmp_path / "runs" / "run"))
        assert code == 0
    finally:
        over.set()
        striking.join()
        for host in (*deployment[0], deployment[1]):
            host.heal()
    seconds, lost = told(tmp_path / "steps")
    check(tmp_path / "runs" / "run", fault)
    Row(
        role=fault.role,
        fault=fault.name,
        phase=phase,
        seconds=seconds,
        steps_lost=lost,
        how=fault.how,
    ).record()


def strike_when_due(
    fault: Fault, deployment: Deployment, struck: Path, over: threading.Event
) -> None:
    while fault.strike is not None and not over.wait(0.01):
        if struck.exists():
            fault.strike(deployment)
            return


def ran(folder: Path, deployment: Deployment, env: dict[str, str], **more: Value) -> int:
    """The exit code of a run."""
    devices, edge = deployment
    names = {f"d{n}": device.address for n, device in enumerate(devices)}
    cluster = folder / "shed.toml"
    cluster.write_text(CLUSTER.format(edge=edge.address, **names))
    values = {
        **RUN,
        "output-dir": str(folder / "runs"),
        "train.state-dir": str(folder / "clusters"),
        "edge.address": edge.address,
        **more,
    }
    process = Forked("tests.faults.run_process", json.dumps(values), str(cluster), env=env)
    try:
        with process.stdout:
            process.stdout.read()
        code = process.wait(RUN_S)
    finally:
        process.kill()
    if code not in (0, -9):
        pytest.fail((folder / "log").read_text()[-3000:])
    return code


def told(steps: Path) -> tuple[float, int]:
    """Seconds from the strike to the end of the first step of the next attempt, and the steps of
    the round that had been done and were done again.
    """
    lines = [line.split() for line in steps.read_text().splitlines()]
    (struck,) = [n for n, (what, _) in enumerate(lines) if what == "struck"]
    begun = [n for n, (what, _) in enumerate(lines) if what.startswith("round-")]
    before = max(n for n in begun if n < struck)
    after = min(n for n in begun if n > struck)
    first = next(n for n, (what, _) in enumerate(lines) if n > after and what == "step")
    again = lines[before][0] == lines[after][0]
    lost = sum(what == "step" for what, _ in lines[before:struck]) if again else 0
    return round(float(lines[first][1]) - float(lines[struck][1]), 1), lost


def check(folder: Path, fault: Fault) -> None:
    """Every round was trained, once, and the model is there."""
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["status"] == "completed", summary
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    assert [event["round_index"] for event in events] == list(range(1, ROUNDS + 1))
    assert all(event["loss"] is not None for event in events)
    assert (folder / "model").is_dir()
    repeated = any("all 1 clusters failed" in why for event in events for why in event["failures"])
    assert repeated is (fault.how == REPEATS)

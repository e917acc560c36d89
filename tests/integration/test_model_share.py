"""No device holds more than its share of what training the whole model was measured to take."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from collapipe_flwr.core.keys import Value
from collapipe_flwr.scheduler import replicating
from tests.integration.conftest import RunApp

ONE_BATCH: dict[str, Value] = {
    "num-server-rounds": 1,
    "clusters": 1,
    "scheduler.policy": "dssda",
    "scheduler.schedule": "gpipe",
    "scheduler.micro-batch-sizes": "4",
    "scheduler.micro-batches": "2",
    "world.memory-share": 1.0,
    "world.energy-share": 100.0,
}
CAUTIOUS = 1.2  # the price of a plan over what was measured


def _event(run_dir: Path) -> dict[str, Any]:
    event: dict[str, Any] = json.loads((run_dir / "events.jsonl").read_text())
    return event


def _devices(event: dict[str, Any]) -> dict[str, int]:
    ends = ("/control-unit", "/edge")
    return {k: size for k, size in event["memory_bytes"].items() if not k.endswith(ends)}


def test_measured_peaks_keep_the_share(shared_run: RunApp) -> None:
    alone = {**ONE_BATCH, "scheduler.max-model-share": 1.0, "world.devices": "jetson-orin-nano"}
    whole = _event(shared_run(alone))
    whole_bytes = sum(whole["memory_bytes"].values())  # of all three parts
    (all_blocks,) = _devices(whole).values()
    (plan,) = whole["plan"]["clusters"]
    assert whole_bytes <= plan["whole_bytes"] <= CAUTIOUS * whole_bytes

    share = round(0.7 * all_blocks / whole_bytes, 3)
    capped = {**ONE_BATCH, "world.devices": "jetson-orin-nano,phone,phone"}
    event = _event(shared_run({**capped, "scheduler.max-model-share": share}))
    (plan,) = event["plan"]["clusters"]
    assert plan["model_share"] == share and len(plan["segments"]) > 1
    assert max(_devices(event).values()) <= share * whole_bytes

    free = _event(shared_run({**capped, "scheduler.max-model-share": 1.0}))
    assert max(_devices(free).values()) > share * whole_bytes  # the cap is why


@pytest.mark.parametrize("replicas", [pytest.param(False, marks=pytest.mark.slow), True])
def test_measured_peaks_under_1f1b_keep_the_share_at_every_depth(
    run_app: RunApp, monkeypatch: pytest.MonkeyPatch, replicas: bool
) -> None:
    """A whole model keeps one micro-batch; stages several, of which their replicas do a part."""
    monkeypatch.setattr(replicating, "WORTH", -1e9)  # also where they make rounds longer
    batch: dict[str, Value] = {**ONE_BATCH, "scheduler.schedule": "1f1b", "run-name": "whole"}
    alone = {"world.devices": "jetson-orin-nano", "scheduler.micro-batches": "1"}
    whole = _event(run_app({**batch, **alone, "scheduler.max-model-share": 1.0}))
    whole_bytes = sum(whole["memory_bytes"].values())  # of all three parts
    batch |= {"world.devices": "jetson-orin-nano,phone,phone", "scheduler.micro-batches": "5"}
    batch |= {"scheduler.replicas": replicas}

    capped: dict[str, Value] = {"scheduler.max-model-share": 0.4, "run-name": "capped"}
    event = _event(run_app({**batch, **capped}))
    (plan,) = event["plan"]["clusters"]
    assert plan["model_share"] == 0.4 and plan["whole_bytes"] <= CAUTIOUS * whole_bytes
    assert min(plan["warmup_depth"][1:-1]) > 1 and len(plan["segments"]) > 1
    assert any(s["replicas"] for s in plan["segments"]) == replicas
    assert max(_devices(event).values()) <= 0.4 * whole_bytes

    free = _event(run_app({**batch, "scheduler.max-model-share": 1.0, "run-name": "free"}))
    assert max(_devices(free).values()) > 0.4 * whole_bytes  # the cap is why

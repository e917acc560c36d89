"""No device holds more than its share of what training the whole model was measured to take."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from collapipe_flwr.core.keys import Value
from tests.integration.conftest import RunApp

ONE_BATCH: dict[str, Value] = {
    "num-server-rounds": 1,
    "clusters": 1,
    "scheduler.micro-batch-sizes": "4",
    "scheduler.micro-batches": "2",
    "world.memory-share": 1.0,
    "world.energy-share": 100.0,
}
LONGEST = 1.1  # the longest batch over the mean one, by which plans are priced


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
    assert plan["whole_bytes"] <= whole_bytes <= plan["whole_bytes"] * LONGEST

    share = round(0.7 * all_blocks / whole_bytes, 3)
    capped = {**ONE_BATCH, "world.devices": "jetson-orin-nano,phone,phone"}
    event = _event(shared_run({**capped, "scheduler.max-model-share": share}))
    (plan,) = event["plan"]["clusters"]
    assert plan["model_share"] == share and len(plan["segments"]) > 1
    assert max(_devices(event).values()) <= share * whole_bytes

    free = _event(shared_run({**capped, "scheduler.max-model-share": 1.0}))
    assert max(_devices(free).values()) > share * whole_bytes  # the cap is why

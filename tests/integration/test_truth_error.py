"""A run whose simulated devices differ from what its plans believe."""

from __future__ import annotations

import json
import math

from collapipe_flwr.core.keys import Value
from tests.integration.conftest import RunApp, events_of


def missed(event: dict) -> float:
    """Largest ``|ln(predicted / measured)|`` of a stage that takes any time."""
    stages = (s for c in event["clusters"].values() for s in c["stages"].values())
    return max(abs(math.log(s["predicted_s"] / s["measured_s"])) for s in stages if s["measured_s"])


def test_a_run_learns_its_true_devices_and_says_how_far_off_it_was(run_app: RunApp) -> None:
    unlike: dict[str, Value] = {"world.truth-error": 0.6, "world.channel": "static"}
    path = run_app(
        {
            **unlike,
            "num-server-rounds": 4,
            "scheduler.policy": "dssda",
            "scheduler.micro-batches": "3",
        }
    )
    events = events_of(path)
    errors = [
        max(abs(cluster["error"]) for cluster in event["clusters"].values()) for event in events
    ]
    assert errors[0] > 0.005 and max(errors[3:]) < 0.5 * errors[0]
    assert missed(events[0]) > 0.3 and missed(events[-1]) < 0.01
    for event in events:
        assert event["latency_s"] == max(c["latency_s"] for c in event["clusters"].values())
        for name, cluster in event["clusters"].items():
            assert not cluster["measured"]  # seconds of this machine say nothing
            assert "edge" in cluster["stages"]
            devices = {s["device_id"] for c in event["plan"]["clusters"] for s in c["segments"]}
            shown = devices & cluster["stages"].keys()
            assert shown == {device for device in devices if device.startswith(f"{name}/")}
            assert {entry["source"] for entry in cluster["energy"].values()} == {"modelled"}
            joules = {device: entry["energy_j"] for device, entry in cluster["energy"].items()}
            assert joules.items() <= event["energy_j"].items()
    summary = json.loads((path / "summary.json").read_text())
    assert summary["prediction_error"] < 0.1
    assert summary["latency_s"] == [event["latency_s"] for event in events]

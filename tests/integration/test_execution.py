"""The run-config reaches every stage: precision, re-computation, clipping, codec, timeline."""

from __future__ import annotations

import json

from tests.integration.conftest import RunApp

ROUND = {"num-server-rounds": 1, "scheduler.policy": "uniform"}


def test_a_timeline_shows_every_stage_of_every_cluster(run_app: RunApp, shared_run: RunApp) -> None:
    exact = shared_run(ROUND)
    run_dir = run_app(
        {
            **ROUND,
            "run-name": "coded",
            "train.timeline": True,
            "train.precision": "bf16",
            "train.recompute": True,
            "train.clip-norm": 0.5,
            "links.codec": "int8",
        }
    )
    assert not list(exact.glob("timeline-*"))
    trace = json.loads((run_dir / "timeline-round1.json").read_text())["traceEvents"]
    clusters = {e["args"]["name"] for e in trace if e["name"] == "process_name"}
    assert len(clusters) == 2
    rows = {e["tid"]: e["args"]["name"] for e in trace if e["name"] == "thread_name"}
    for work in ("forward", "backward", "optimizer"):
        assert {e["tid"] for e in trace if e.get("cat") == work} == set(rows)
    assert "edge" in rows.values() and "control-unit" in rows.values()
    moved, less = (
        json.loads((folder / "events.jsonl").read_text())["bytes"] for folder in (exact, run_dir)
    )
    assert less["d2d"] < 0.75 * moved["d2d"]  # weights and headers are not coded
    assert less["d2e"] < 0.5 * moved["d2e"]

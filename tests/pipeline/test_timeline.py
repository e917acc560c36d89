"""The trace holds every pass of every stage once, in an order that a pipeline allows."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

from collapipe_flwr.pipeline.config import Execution
from collapipe_flwr.pipeline.meter import write_trace
from tests.pipeline.chains import Chain, classic, make_batch, make_parts

SPANS = Execution(keep_spans=True)


def test_a_trace_of_two_steps(tmp_path):
    keep = lambda *place: replace(classic("1f1b")(*place), execution=SPANS)  # noqa: E731
    chain = Chain(make_parts((1, 1)), keep)
    with chain.running() as first:
        for seed in range(2):
            first.train_step(make_batch((2, 2, 2), seed))
    path = tmp_path / "trace.json"
    stages = {s.settings.name: s.report().spans for s in chain.stages}
    write_trace(path, {"cluster-1": stages})
    assert [p.name for p in tmp_path.iterdir()] == ["trace.json"]
    events = json.loads(path.read_text())["traceEvents"]
    rows = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert rows == {0: "control unit", 1: "device 1", 2: "device 2", 3: "edge"}
    passes = {
        (e["tid"], e["args"]["step"], e["name"]): e
        for e in events
        if e.get("cat") in ("forward", "backward")
    }
    assert len(passes) == 4 * 2 * 3 * 2
    assert Counter(e.get("cat") for e in events)["optimizer"] == 4 * 2 * 2
    for (row, step, name), event in passes.items():
        assert event["ts"] >= 0 and event["dur"] > 0
        before = (row - 1, step, name) if name[0] == "F" else (row + 1, step, name)
        if before in passes:
            assert passes[before]["ts"] + passes[before]["dur"] <= event["ts"]


def test_gradients_are_sent_before_those_of_weights_are_computed():
    keep = lambda *place: replace(classic("1f1b")(*place), execution=SPANS)  # noqa: E731
    chain = Chain(make_parts((1, 1)), keep)
    with chain.running() as first:
        first.train_step(make_batch((2, 2, 2), 0))
    for stage in chain.stages[1:]:
        works = [s.work for s in stage.report().spans if s.step == 0 and s.work != "receive"]
        assert works[-5:] == ["backward", "send", "weights", "optimizer", "optimizer"]
        assert works.count("weights") == works.count("backward") == 3
    assert "weights" not in {s.work for s in chain.stages[0].report().spans}

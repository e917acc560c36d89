"""Planned links in a whole run: chosen codecs, kept rates, and both in what the run leaves."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path

from rich.console import Console

from collapipe_flwr.core.links import CODECS
from collapipe_flwr.reporting.console import ProgressPrinter, summary_table
from collapipe_flwr.reporting.events import RoundEvent
from tests.integration.conftest import RunApp, events_of

PLANNED = {"links.codec": "auto", "links.pace": "plan", "world.channel": "static"}


def _shown(run_dir: Path) -> str:
    """The plan of the last round and the table at the end, as people see them."""
    console = Console(width=200, record=True, file=StringIO())
    events = events_of(run_dir)
    ProgressPrinter(2, console).show(RoundEvent.of_json(events[-1]))
    console.print(summary_table(json.loads((run_dir / "summary.json").read_text())))
    return console.export_text()


def test_hops_are_measured_and_senders_keep_to_the_plan(run_app: RunApp) -> None:
    run_dir = run_app({**PLANNED, "num-server-rounds": 1})
    event = json.loads((run_dir / "events.jsonl").read_text())
    plans = {c["cluster_id"]: c for c in event["plan"]["clusters"]}
    assert len(event["links"]) == sum(len(c["hops"]) for c in plans.values())
    for link in event["links"]:
        hops = plans[link["cluster"]]["hops"]
        assert link["codec"] in {hop["codec"] for hop in hops} <= set(CODECS)
        for way in (link["forward"], link["backward"]):
            assert way["bytes"] > 0 and 0 < way["bit_per_s"] < 1.02 * way["planned_bit_per_s"]
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["links"] == event["links"]
    assert sum(link["forward"]["bytes"] for link in summary["links"]) < sum(
        summary["bytes"][kind] for kind in ("d2d", "d2e")
    )
    text = _shown(run_dir)
    assert "link cluster-" in text and "Mbit/s" in text
    if any(hop["codec"] != "fp32" for c in plans.values() for hop in c["hops"]):
        assert "-".join(hop["codec"] for hop in plans["cluster-0"]["hops"]) in text


def test_a_run_without_a_pace_plans_no_rates(shared_run: RunApp) -> None:
    run_dir = shared_run({"num-server-rounds": 1})
    event = json.loads((run_dir / "events.jsonl").read_text())
    assert {link["codec"] for link in event["links"]} == {"fp32"}
    assert all(link["forward"]["planned_bit_per_s"] is None for link in event["links"])
    assert RoundEvent.of_json(event).as_json() == event

"""docs/results-scheduler.md is what its script prints from the files beside it."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.scheduler_runs import commands
from benchmarks.search_lines import pooled
from tests.program import printed_by

ROOT = Path(__file__).parents[2]
DATA = ROOT / "docs/results/scheduler"


def test_the_document_shows_the_recorded_measurements() -> None:
    script = ROOT / "benchmarks/results_scheduler.py"
    document = (ROOT / "docs/results-scheduler.md").read_text(encoding="utf-8")
    assert document == printed_by(script, "write", str(DATA))
    assert "## No device holds most of the model" in document


def test_recorded_measurements_are_of_the_seeds_that_their_commands_name() -> None:
    for name, command in commands():
        if not (DATA / f"{name}.json").exists():
            continue
        values, seeds = recorded(name), set(re.findall(r"(?:--seeds |=)(\d+-\d+)", command))
        cases = values.get("cases", [])
        found = values["setting"]["seeds"] if "setting" in values else [c["seed"] for c in cases]
        ranges = {f"{found[0]}-{found[-1]}"} if found else {r["seeds"] for r in values["search"]}
        assert ranges == seeds, name


def test_a_size_in_several_files_is_one_row() -> None:
    (whole,) = recorded("search-5x4x12")["search"]
    cases = whole["cases"]
    halves = [("83000-83099", cases[:200]), ("83100-83199", cases[200:])]
    parts = [{**whole, "seeds": seeds, "cases": half} for seeds, half in halves]
    (found,) = pooled([{"search": [part]} for part in parts])
    assert (found.size, found.seeds) == (whole["size"], whole["seeds"])
    assert json.loads(json.dumps([asdict(table) for table in found.tables])) == whole["tables"]


def recorded(name: str) -> dict[str, Any]:
    """What a command wrote."""
    values: dict[str, Any] = json.loads((DATA / f"{name}.json").read_text(encoding="utf-8"))
    return values

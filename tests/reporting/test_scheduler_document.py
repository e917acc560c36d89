"""docs/results-scheduler.md is what its script prints from the files beside it."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from benchmarks.search_lines import pooled

ROOT = Path(__file__).parents[2]


def test_the_document_shows_the_recorded_measurements() -> None:
    script, data = ROOT / "benchmarks/results_scheduler.py", ROOT / "docs/results/scheduler"
    written = subprocess.run(
        [sys.executable, str(script), "write", str(data)],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    document = (ROOT / "docs/results-scheduler.md").read_text(encoding="utf-8")
    assert document == written.stdout
    assert "## No device holds most of the model" in document


def test_a_size_in_several_files_is_one_row() -> None:
    text = (ROOT / "docs/results/scheduler/search-5x4x12.json").read_text(encoding="utf-8")
    (whole,) = json.loads(text)["search"]
    parts = [
        {**whole, "seeds": seeds, "cases": cases}
        for seeds, cases in (
            ("83000-83039", whole["cases"][:80]),
            ("83040-83199", whole["cases"][80:]),
        )
    ]
    (found,) = pooled([{"search": [part]} for part in parts])
    assert (found.size, found.seeds) == (whole["size"], whole["seeds"])
    assert json.loads(json.dumps([asdict(table) for table in found.tables])) == whole["tables"]

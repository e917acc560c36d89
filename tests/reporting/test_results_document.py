"""The tables in docs/results.md are made from the files beside it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_the_document_shows_the_recorded_runs() -> None:
    script = DOCS.parent / "benchmarks/results_runs.py"
    command = [sys.executable, str(script), "print"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert (DOCS / "results.md").read_text(encoding="utf-8") == printed.stdout


def test_every_recorded_curve_is_shown_and_every_picture_is_there() -> None:
    text = (DOCS / "results.md").read_text(encoding="utf-8")
    shown = set(re.findall(r"<!-- compare (\S+) ", text))
    recorded = {path.parent.name.rpartition("-")[0] for path in DOCS.glob("results/*/events.jsonl")}
    assert shown == recorded - {"english"}  # a checkpoint to start from, compared with nothing
    assert all((DOCS / f"results/{name}.png").is_file() for name in shown)


def test_the_stream_that_drifts_is_the_recorded_one() -> None:
    text = (DOCS / "online.md").read_text(encoding="utf-8")
    shown = re.search(r"<!-- table online-drift -->\n(.*?)<!-- end -->", text, re.DOTALL)
    script, data = DOCS.parent / "benchmarks/online_drift.py", DOCS / "results/online-drift.json"
    command = [sys.executable, str(script), "--table", str(data)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert shown is not None
    assert shown.group(1).strip() == printed.stdout.strip()

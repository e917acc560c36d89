"""The tables in docs/results.md are made from the files beside it."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

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


@pytest.mark.parametrize(
    ("page", "name", "script"),
    [
        ("online.md", "online-drift", "benchmarks/online_drift.py"),
        ("results-failures.md", "late-updates", "benchmarks/late_updates.py"),
        ("choosing.md", "trusted-depth", "benchmarks/trusted_depth.py"),
    ],
)
def test_the_table_is_the_recorded_one(
    page: str,
    name: str,
    script: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = (DOCS / page).read_text(encoding="utf-8")
    shown = re.search(rf"<!-- table {name} -->\n(.*?)<!-- end -->", text, re.DOTALL)
    program, data = DOCS.parent / script, DOCS / f"results/{name}.json"
    monkeypatch.setattr(sys, "argv", [str(program), "--table", str(data)])
    runpy.run_path(str(program), run_name="__main__")
    assert shown is not None
    assert shown.group(1).strip() == capsys.readouterr().out.strip()

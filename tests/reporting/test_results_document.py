"""The tables in docs/results.md are made from the files beside it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.program import printed_by

DOCS = Path(__file__).parents[2] / "docs"


def test_the_document_shows_the_recorded_runs() -> None:
    script = DOCS.parent / "benchmarks/results_runs.py"
    assert (DOCS / "results.md").read_text(encoding="utf-8") == printed_by(script, "print")


def test_every_recorded_curve_is_shown_and_every_picture_is_there() -> None:
    text = (DOCS / "results.md").read_text(encoding="utf-8")
    shown = set(re.findall(r"<!-- compare (\S+) ", text))
    seeded = set(re.findall(r"<!-- seeds (\S+) ", text))
    folders = {path.parent.name for path in DOCS.glob("results/*/events.jsonl")}
    recorded = {re.sub(r"-[^-]+(-\d+)?$", "", folder) for folder in folders}
    assert shown | seeded == recorded - {"english"}  # a checkpoint to start from, nothing beside it
    assert all((DOCS / f"results/{name}.png").is_file() for name in shown)


@pytest.mark.parametrize(
    ("page", "name", "script"),
    [
        ("online.md", "online-drift", "benchmarks/online_drift.py"),
        ("results-failures.md", "late-updates", "benchmarks/late_updates.py"),
        ("choosing.md", "trusted-depth", "benchmarks/trusted_depth.py"),
    ],
)
def test_the_table_is_the_recorded_one(page: str, name: str, script: str) -> None:
    text = (DOCS / page).read_text(encoding="utf-8")
    shown = re.search(rf"<!-- table {name} -->\n(.*?)<!-- end -->", text, re.DOTALL)
    program, data = DOCS.parent / script, DOCS / f"results/{name}.json"
    assert shown is not None
    assert shown.group(1).strip() == printed_by(program, "--table", str(data)).strip()

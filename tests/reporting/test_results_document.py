"""Tables of the documents are made from the files beside them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.program import printed_by

DOCS = Path(__file__).parents[2] / "docs"


TEXT = "".join((DOCS / name).read_text(encoding="utf-8") for name in ("results.md", "privacy.md"))


def test_the_documents_show_the_recorded_runs() -> None:
    assert printed_by(DOCS.parent / "benchmarks/results_runs.py", "print") == TEXT


def test_every_recorded_curve_is_shown_and_every_picture_is_there() -> None:
    shown = set(re.findall(r"<!-- compare (\S+) ", TEXT))
    seeded = set(re.findall(r"<!-- seeds (\S+) ", TEXT))
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

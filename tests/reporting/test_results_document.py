"""The tables in docs/results.md are what `collapipe compare` prints from the files beside it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from collapipe_flwr.reporting.comparison import markdown, read_curves

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("name", ["banking77", "tatoeba"])
def test_the_document_shows_the_recorded_runs(name: str) -> None:
    text = (DOCS / "results.md").read_text(encoding="utf-8")
    shown = re.search(rf"<!-- table {name} -->\n(.*?)<!-- end -->", text, re.DOTALL)
    assert shown is not None
    runs = DOCS / "results"
    curves = read_curves([f"pipeline={runs}/{name}-pipeline", f"FedAvg={runs}/{name}-fedavg"])
    assert shown.group(1).strip() == markdown(curves).strip()

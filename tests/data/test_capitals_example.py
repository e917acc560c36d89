"""The example that makes tags of plain sentences."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from collapipe_flwr.config.schema import parse
from collapipe_flwr.data.tasks import load_task

SCRIPT = Path(__file__).parents[2] / "examples/capitals.py"


def test_words_lose_capitals_and_commas_and_tags_keep_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, out = tmp_path / "sentences.csv", tmp_path / "tagged.jsonl.gz"
    sentences = [
        '"Ich glaube, dass Tom, mein Freund, Brot isst."',
        "Zu kurz.",
        "Wo ist das „Haus“?",
    ]
    table.write_text("\n".join(["de", *sentences]), encoding="utf-8")
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), str(table), "de", str(out)])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    config = parse({"data.task": "token-classification", "data.train": str(out)})
    task = load_task(config.data)
    rows = task.every_row.to_list()
    assert [" ".join(row["tokens"]) for row in rows] == [
        "ich glaube dass tom mein freund brot isst",
        "wo ist das haus",
    ]
    assert [row["tags"] for row in rows] == [
        ["O", "B-COMMA", "O", "B-BOTH", "O", "B-BOTH", "B-CAPITAL", "O"],
        ["O", "O", "O", "B-CAPITAL"],
    ]

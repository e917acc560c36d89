"""The examples that make data sets of plain tables."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from collapipe_flwr.config.schema import parse
from collapipe_flwr.data.tasks import load_task

EXAMPLES = Path(__file__).parents[2] / "examples"


def run_example(monkeypatch: pytest.MonkeyPatch, script: str, *arguments: str) -> None:
    """Run it as a program."""
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    runpy.run_path(str(EXAMPLES / script), run_name="__main__")


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
    run_example(monkeypatch, "capitals.py", str(table), "de", str(out))
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


def test_labels_become_answers_and_still_part_the_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, out = tmp_path / "requests.csv", tmp_path / "chats.jsonl"
    rows = ["text,intent", *(f"Wo bleibt meine {n}. Karte?,card_arrival" for n in range(6))]
    rows += [f"Das war {n} Euro zu viel.,extra_charge" for n in range(6)]
    table.write_text("\n".join(rows), encoding="utf-8")
    run_example(
        monkeypatch, "labels_as_chat.py", str(table), "text", "intent", "Was will er?", str(out)
    )
    config = parse(
        {
            "data.task": "instruct",
            "data.train": str(out),
            "data.tokenizer": "bytes",
            "data.partition": "natural",
            "data.partition-column": "intent",
        }
    )
    task = load_task(config.data)
    asked = task.every_row[0]
    assert asked["messages"] == [
        {"role": "user", "content": "Was will er?\nWo bleibt meine 0. Karte?"},
        {"role": "assistant", "content": "card arrival"},
    ]
    assert asked["group"] == "card_arrival"

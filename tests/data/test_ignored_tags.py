"""Words with the tag -100 are read, and are neither learned, nor guessed, nor a class."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import ClassLabel, Dataset, List

from collapipe_flwr.core.errors import DataError
from collapipe_flwr.data.config import DataConfig
from collapipe_flwr.data.tasks import Task, load_task

WORDS = ["Anna", "Lee", "saw", "Rome"]
NAMES = ["O", "B-PER", "B-LOC"]
NUMBERS = [1, -100, 0, 2]
TAGS = ["B-PER", "-100", "O", "B-LOC"]
Write = Callable[[Path, list[Any]], str]


def rows(tags: list[Any]) -> dict[str, list[Any]]:
    return {"tokens": [WORDS] * 20, "tags": [tags] * 20}


def lines(folder: Path, tags: list[Any]) -> str:
    text = "\n".join([json.dumps({"tokens": WORDS, "tags": tags})] * 20)
    (folder / "rows.jsonl").write_text(text)
    return str(folder / "rows.jsonl")


def parquet(folder: Path, tags: list[Any]) -> str:
    Dataset.from_dict(rows(tags)).to_parquet(folder / "rows.parquet")
    return str(folder / "rows.parquet")


def declared(folder: Path, tags: list[Any]) -> str:
    table = Dataset.from_dict(rows(tags)).cast_column("tags", List(ClassLabel(names=NAMES)))
    table.save_to_disk(folder / "saved")
    return str(folder / "saved")


def declared_as_a_class(folder: Path, tags: list[Any]) -> str:
    """What ``class_encode_column`` makes of texts."""
    names = ["-100", *NAMES]
    table = Dataset.from_dict(rows(tags)).cast_column("tags", List(ClassLabel(names=names)))
    table.save_to_disk(folder / "saved")
    return str(folder / "saved")


def conll(folder: Path, tags: list[Any]) -> str:
    sentence = "\n".join(f"{word} {tag}" for word, tag in zip(WORDS, tags, strict=True))
    (folder / "rows.conll").write_text("\n\n".join([sentence] * 20))
    return str(folder / "rows.conll")


def tagging(train: str, **settings: Any) -> Task:
    return load_task(DataConfig(task="token-classification", train=train, **settings))


@pytest.mark.parametrize(
    ("write", "tags", "label_names", "labels"),
    [
        (lines, NUMBERS, "", ("0", "1", "2")),
        (lines, [float(tag) for tag in NUMBERS], "", ("0.0", "1.0", "2.0")),
        (lines, NUMBERS, "O B-PER B-LOC", tuple(NAMES)),
        (lines, TAGS, "", ("O", "B-LOC", "B-PER")),
        (lines, TAGS, "O B-PER B-LOC", tuple(NAMES)),
        (parquet, NUMBERS, "", ("0", "1", "2")),
        (parquet, NUMBERS, "O B-PER B-LOC", tuple(NAMES)),
        (declared, NUMBERS, "", tuple(NAMES)),
        (declared_as_a_class, TAGS, "", tuple(NAMES)),
        (conll, TAGS, "", ("O", "B-LOC", "B-PER")),
        (conll, TAGS, "O B-PER B-LOC", tuple(NAMES)),
    ],
)
def test_an_ignored_word_is_no_target_and_no_class(
    write: Write, tags: list[Any], label_names: str, labels: tuple[str, ...], tmp_path: Path
) -> None:
    task = tagging(write(tmp_path, tags), label_names=tuple(label_names.split()))
    assert task.labels == labels
    examples = task.train.to_list()[:2]
    batch = task.collate(examples)
    learned = [label for label in batch["labels"][0].tolist() if label != -100]
    assert len(learned) == 3 and set(learned) == {0, 1, 2}
    references = task.references(examples, batch)
    assert len(references[0].split()) == 3
    assert task.read(batch["labels"], batch) == references
    assert task.score(task.count(references, references)) == {"f1": 1.0, "accuracy": 1.0}


def test_a_row_without_any_target_counts_for_nothing(tmp_path: Path) -> None:
    task = tagging(lines(tmp_path, TAGS))
    ignored = {"tokens": WORDS, "tags": ["-100"] * 4}
    batch = task.collate([ignored])
    assert (batch["labels"] == -100).all()
    guesses = torch.zeros_like(batch["labels"])
    references = task.references([ignored], batch)
    assert task.read(guesses, batch) == references == [""]
    assert task.count([""], references) == {"f1": [0.0, 0.0], "accuracy": [0.0, 0.0]}


def test_one_tag_beside_the_ignored_is_not_enough(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds only one tag"):
        _ = tagging(lines(tmp_path, ["O", "-100", "O", "O"])).labels


@pytest.mark.parametrize("label", [-100, "-100"])
def test_an_ignored_label_of_a_whole_row_is_refused(label: Any, tmp_path: Path) -> None:
    examples = [
        {"text": f"text {row}", "label": [*map(type(label), (0, 1)), label][row % 3]}
        for row in range(30)
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, examples)))
    train = str(tmp_path / "rows.jsonl")
    with pytest.raises(DataError, match=r"data\.label-column .*-100.* remove"):
        _ = load_task(DataConfig(task="classification", train=train)).labels

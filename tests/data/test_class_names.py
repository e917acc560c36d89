"""Numbers of classes keep the names and the order that somebody declared for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from datasets import ClassLabel, Dataset, Features, List, Value

from collapipe_flwr.core.errors import DataError
from collapipe_flwr.data.config import DataConfig
from collapipe_flwr.data.tasks import Task, load_task

NAMES = ["world", "art", "sport"]  # not in the order of the alphabet
WORDS = {"tokens": ["Anna", "saw", "Rome"], "tags": [1, 0, 2]}


def numbered(folder: Path, classes: list[int], **settings: Any) -> Task:
    rows = [{"text": f"text {i}", "label": number} for i, number in enumerate(classes * 10)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    train = str(folder / "rows.jsonl")
    return load_task(DataConfig(task="classification", train=train, **settings))


def test_declared_classes_keep_their_order_even_where_no_row_has_them(tmp_path: Path) -> None:
    features = Features({"text": Value("string"), "label": ClassLabel(names=NAMES)})
    rows = Dataset.from_dict({"text": ["x"] * 20, "label": [0, 2] * 10}, features=features)
    rows.save_to_disk(tmp_path / "saved")
    task = load_task(DataConfig(task="classification", train=str(tmp_path / "saved")))
    assert task.labels == tuple(NAMES)
    ids = task.collate([{"text": "x", "label": "sport"}, {"text": "x", "label": "world"}])["labels"]
    assert ids.tolist() == [2, 0]


def test_declared_tags_keep_their_order(tmp_path: Path) -> None:
    names = ["B-PER", "O", "B-LOC"]
    features = Features({"tokens": List(Value("string")), "tags": List(ClassLabel(names=names))})
    rows = {key: [value] * 20 for key, value in WORDS.items()}
    Dataset.from_dict(rows, features=features).save_to_disk(tmp_path / "saved")
    task = load_task(DataConfig(task="token-classification", train=str(tmp_path / "saved")))
    assert task.labels == tuple(names)
    assert task.train[0]["tags"] == ["O", "B-PER", "B-LOC"]


def test_plain_numbers_get_the_names_of_the_run_config(tmp_path: Path) -> None:
    task = numbered(tmp_path, [0, 2], label_names=("world", "art", "sport"))
    assert task.labels == tuple(NAMES)
    assert set(task.train["label"]) == {"world", "sport"}
    (tmp_path / "words.jsonl").write_text("\n".join([json.dumps(WORDS)] * 20))
    settings = {"train": str(tmp_path / "words.jsonl"), "label_names": ("O", "B-PER", "B-LOC")}
    tags = load_task(DataConfig(task="token-classification", **settings))
    assert tags.train[0]["tags"] == ["B-PER", "O", "B-LOC"]


def test_a_number_without_a_name_is_one_sentence(tmp_path: Path) -> None:
    task = numbered(tmp_path, [0, 3], label_names=("world", "art", "sport"))
    with pytest.raises(DataError, match=r"data\.label-column.* the class 3, but only 0 to 2 have"):
        _ = task.train


def test_names_that_the_names_lack_are_one_sentence(tmp_path: Path) -> None:
    rows = [{"text": "x", "label": "music"}] * 20
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    settings = {"train": str(tmp_path / "rows.jsonl"), "label_names": ("world", "art")}
    with pytest.raises(DataError, match=r"data\.label-names has 2 names, which do not fit .*music"):
        _ = load_task(DataConfig(task="classification", **settings)).train


@pytest.mark.parametrize(
    ("known", "labels"),
    [
        (("10", "2", "1"), ("10", "2", "1")),  # the head has learned this order
        (("2", "1", "10", "7"), ("2", "1", "10", "7")),  # and one more
        (("2", "1"), ("1", "2", "10")),
        (("LABEL_0", "LABEL_1", "LABEL_2"), ("1", "2", "10")),
    ],
)
def test_a_checkpoint_that_knows_all_labels_keeps_its_order(
    tmp_path: Path, known: tuple[str, ...], labels: tuple[str, ...]
) -> None:
    settings = numbered(tmp_path, [1, 2, 10]).settings
    assert load_task(settings, known_labels=known).labels == labels


def test_rows_without_words_are_skipped(tmp_path: Path) -> None:
    rows = [{"tokens": ["Anna", "ran"], "tags": ["B-PER", "O"]}, {"tokens": [], "tags": []}] * 15
    (tmp_path / "words.jsonl").write_text("\n".join(map(json.dumps, rows)))
    task = load_task(DataConfig(task="token-classification", train=str(tmp_path / "words.jsonl")))
    assert 0 < len(task.train) + len(task.test) == 15

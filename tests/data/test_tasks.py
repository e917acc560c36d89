"""Laws of every task: inputs padded and masked, outputs read back, one vocabulary for all."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch

from collapipe_flwr.core.errors import DataError
from collapipe_flwr.data.registry import TASKS, load_task
from collapipe_flwr.data.settings import DataSettings
from collapipe_flwr.data.tasks import Task
from collapipe_flwr.data.vocabulary import Vocabulary

MOODS = ["bad", "fine", "good"]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def write(path: Path, rows: list[tuple[str, ...]]) -> str:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    return str(path)


def moods(path: Path, *, size: int = 30, labels: list[str] = MOODS) -> str:
    rows = [(f"day {row} was{' so' * (row % 4)}", labels[row % len(labels)]) for row in range(size)]
    return write(path, [("text", "mood"), *rows])


def settings_of(name: str, folder: Path) -> DataSettings:
    if name == "number-words":
        return DataSettings(train_examples=40, test_examples=7)
    if name == "classification":
        train, test = moods(folder / "train.csv"), moods(folder / "test.csv", size=6)
        return DataSettings(task=name, train=train, test=test, label_column="mood")
    rows = [("en", "de", "who"), *((f"I am {n}", f"Ich bin {n}", f"w{n % 3}") for n in range(30))]
    return DataSettings(
        task=name,
        train=write(folder / "pairs.csv", rows),
        source_column="en",
        target_column="de",
        partition="natural",
        partition_column="who",
    )


@pytest.fixture(params=sorted(TASKS))
def task(request: pytest.FixtureRequest, tmp_path: Path) -> Task:
    return load_task(settings_of(request.param, tmp_path))


def test_inputs_are_padded_to_the_longest_and_masked(task: Task) -> None:
    inputs = task.collate(task.train.to_list()[:8])
    assert sorted(inputs) == ["attention_mask", "input_ids", "labels"]
    lengths = inputs["attention_mask"].sum(dim=1)
    assert inputs["input_ids"].shape == (8, lengths.max())
    pad = task.tokenizer.pad_token_id
    assert torch.equal(inputs["input_ids"] == pad, inputs["attention_mask"] == 0)
    assert all(tensor.dtype == torch.int64 for tensor in inputs.values())


def test_a_perfect_model_scores_best(task: Task) -> None:
    examples = task.test.to_list()
    labels = task.collate(examples)["labels"]
    if task.labels:
        outputs = torch.nn.functional.one_hot(labels, len(task.labels)).float()
    else:
        outputs = labels.masked_fill(labels < 0, task.tokenizer.pad_token_id)
    predictions = task.decode(outputs)
    assert predictions == task.references(examples)
    best = task.score(predictions, task.references(examples))
    worst = task.score(["?"] * len(examples), task.references(examples))
    assert best[task.metric_name] > worst[task.metric_name]


def test_a_control_unit_with_the_vocabulary_makes_the_same_inputs(task: Task) -> None:
    received = Vocabulary.from_json(task.vocabulary.to_json())
    unit = load_task(task.settings, received)
    examples = task.train.to_list()[:5]
    for name, tensor in task.collate(examples).items():
        assert torch.equal(unit.collate(examples)[name], tensor)
    assert unit.labels == task.labels


def test_clusters_share_out_the_training_set(task: Task) -> None:
    parts = [task.partition(index, 3).to_list() for index in range(3)]
    rows = [str(row) for part in parts for row in part]
    assert sorted(rows) == sorted(str(row) for row in task.train.to_list())


def test_long_texts_are_cut_but_end_as_they_should() -> None:
    settings = DataSettings(train_examples=40, test_examples=1, max_source_length=3)
    task = load_task(settings)
    ids = task.collate(task.train.to_list())["input_ids"]
    assert ids.shape[1] == 3
    assert set(ids[:, 2].tolist()) <= {task.tokenizer.eos_token_id, task.tokenizer.pad_token_id}


def test_without_a_test_file_a_seeded_tenth_is_held_out(tmp_path: Path) -> None:
    settings = settings_of("translation", tmp_path)
    task, again = load_task(settings), load_task(settings)
    train, test = set(task.train["source"]), set(task.test["source"])
    assert (len(train), len(test), train & test) == (27, 3, set())
    assert set(again.test["source"]) == test


def test_subsets_are_seeded_and_not_the_head_of_the_file(tmp_path: Path) -> None:
    train = moods(tmp_path / "train.csv")
    settings = DataSettings(
        task="classification", train=train, label_column="mood", train_examples=9, test_examples=4
    )
    task = load_task(settings)
    assert (len(task.train), len(task.test)) == (9, 4)
    assert task.train["text"][:] != [f"day {row} was{' so' * (row % 4)}" for row in range(9)]
    assert task.labels == tuple(MOODS)


@pytest.mark.parametrize("partition", ["natural", "dirichlet"])
def test_classification_goes_by_its_label(tmp_path: Path, partition: str) -> None:
    settings = DataSettings(
        task="classification",
        train=moods(tmp_path / "train.csv"),
        label_column="mood",
        partition=partition,
    )
    parts = [load_task(settings).partition(index, 2) for index in range(2)]
    assert sum(len(part) for part in parts) == 27
    assert set(parts[0]["label"]) != set(parts[1]["label"]) or partition == "dirichlet"


def test_labels_that_only_the_test_has(tmp_path: Path) -> None:
    settings = DataSettings(
        task="classification",
        train=moods(tmp_path / "train.csv"),
        test=moods(tmp_path / "test.csv", labels=["bad", "awful"]),
        label_column="mood",
    )
    with pytest.raises(DataError, match=r'data\.test has 1 labels .*"awful"'):
        _ = load_task(settings).test


def test_one_label_is_no_classification(tmp_path: Path) -> None:
    train = moods(tmp_path / "train.csv", labels=["bad"])
    with pytest.raises(DataError, match=r'data\.label-column "mood" .*only'):
        _ = load_task(DataSettings(task="classification", train=train, label_column="mood")).labels


def test_numbered_labels_keep_their_order(tmp_path: Path) -> None:
    train = moods(tmp_path / "train.csv", labels=[str(number) for number in range(12)])
    task = load_task(DataSettings(task="classification", train=train, label_column="mood"))
    assert task.labels == tuple(str(number) for number in range(12))


def test_no_training_file_is_named() -> None:
    with pytest.raises(DataError, match=r"data\.train is empty"):
        _ = load_task(DataSettings(task="translation")).train


def test_testing_on_the_training_file_is_refused(tmp_path: Path) -> None:
    train = moods(tmp_path / "train.csv")
    settings = DataSettings(task="classification", train=train, test=train, label_column="mood")
    with pytest.raises(DataError, match=r"data\.test .* is also data\.train"):
        _ = load_task(settings).test


def test_too_few_rows_to_hold_out(tmp_path: Path) -> None:
    train = moods(tmp_path / "train.csv", size=3)
    settings = DataSettings(
        task="classification", train=train, label_column="mood", test_examples=3
    )
    with pytest.raises(DataError, match=r"data\.train has 3 rows, too few"):
        _ = load_task(settings).train


@pytest.mark.parametrize("damaged", ["", "[]", '{"labels": []}'])
def test_a_damaged_vocabulary_is_an_error(damaged: str) -> None:
    with pytest.raises(DataError, match="damaged"):
        Vocabulary.from_json(damaged)

"""Rows that cannot be used are all named, or left out and counted."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from collapipe_flwr.core.errors import DataError
from collapipe_flwr.data.config import DataConfig
from collapipe_flwr.data.tasks import Task, load_task

GOOD = {"tokens": ["Anna", "runs"], "tags": ["B-PER", "O"]}


def tagged(path: Path, *, skip: bool) -> Task:
    return load_task(DataConfig(task="token-classification", train=str(path), skip_bad_rows=skip))


@pytest.fixture
def conll(tmp_path: Path) -> Path:
    path = tmp_path / "names.conll"
    path.write_text("Anna B-PER\nruns O\n\n" * 20 + "Bert\nand\nlaughs O\n\n" + "Lee B-PER\n\n" * 2)
    return path


def test_a_mark_of_byte_order_is_no_part_of_a_word(tmp_path: Path) -> None:
    path = tmp_path / "names.conll"
    path.write_text("-DOCSTART- O\n\n" + "Anna B-PER\nruns O\n\n" * 20, encoding="utf-8-sig")
    words = {word for row in tagged(path, skip=False).train["tokens"] for word in row}
    assert words == {"Anna", "runs"}


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    path = tmp_path / "names.jsonl"
    rows = [GOOD, {**GOOD, "tokens": ["Anna", " "]}, *[GOOD] * 20, {**GOOD, "tags": ["O"]}]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def test_every_line_without_a_tag_is_named(conll: Path) -> None:
    with pytest.raises(DataError, match="2 words without a tag, in lines 61 and 62: write a word"):
        _ = tagged(conll, skip=False).train


def test_every_bad_row_is_named_with_what_is_wrong_with_it(lines: Path) -> None:
    with pytest.raises(DataError) as refusal:
        _ = tagged(lines, skip=False).train
    assert str(refusal.value) == (
        f'2 of 23 rows of "{lines}" cannot be used: data.tags-column "tags" has not as many tags '
        'as words in row 23; data.tokens-column "tokens" has an empty word in row 2; correct or '
        "remove them, or leave them out by data.skip-bad-rows=true"
    )


def test_bad_rows_are_left_out_and_counted(conll: Path, lines: Path) -> None:
    for path, rows, bad in ((conll, 23, 1), (lines, 23, 2)):
        task = tagged(path, skip=True)
        assert len(task.train) + len(task.test) == rows - bad
        assert task.skipped[str(path)].startswith(f'{bad} of {rows} rows of "{path}" skipped: ')
        assert all(len(row["tokens"]) == len(row["tags"]) for row in task.every_row)


def test_texts_and_labels_stay_together(tmp_path: Path) -> None:
    path = tmp_path / "moods.csv"
    path.write_text("text,label\n" + "a,x\nb,y\n" * 10 + ",x\nb, \na,x\n")
    task = load_task(DataConfig(task="classification", train=str(path), skip_bad_rows=True))
    assert {(row["text"], row["label"]) for row in task.every_row} == {("a", "x"), ("b", "y")}
    assert len(task.every_row) == 21


@pytest.mark.parametrize("picture", ["1.png", [[1, 2], [3, 4]]])
def test_rows_without_a_picture_are_named_or_left_out(tmp_path: Path, picture: object) -> None:
    path = tmp_path / "pictures.jsonl"
    Image.new("L", (2, 2)).save(tmp_path / "1.png")
    rows = [{"image": None, "label": "x"}, *[{"image": picture, "label": "y"}] * 4]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    settings = DataConfig(task="image-classification", train=str(path))
    with pytest.raises(DataError, match=r'1 of 5 .*data\.image-column "image" is empty in row 1'):
        _ = load_task(settings).every_row
    kept = load_task(replace(settings, skip_bad_rows=True)).every_row["image"][:]
    of_file = {"bytes": None, "path": str(tmp_path / "1.png")}
    assert kept == [of_file if isinstance(picture, str) else picture] * 4


def test_a_file_of_bad_rows_alone_is_refused_all_the_same(tmp_path: Path) -> None:
    path = tmp_path / "empty.csv"
    path.write_text("text,label\n" + ",x\n" * 30)
    with pytest.raises(DataError, match=r"30 of 30 rows .* in rows 1, 2, .*, 20 and 10 more"):
        _ = load_task(DataConfig(task="classification", train=str(path), skip_bad_rows=True)).train

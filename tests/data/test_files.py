"""Tables come whole out of every format; what cannot be read says why and by which key."""

from __future__ import annotations

import csv
import errno
import gc
import gzip
import json
from pathlib import Path

import pytest
from datasets import ClassLabel, Dataset, DatasetDict, Features, Value, load_dataset
from datasets.exceptions import DatasetGenerationError

from collapipe_flwr.core.errors import DataError
from collapipe_flwr.data.config import DataConfig
from collapipe_flwr.data.files import load_table, read_conll
from collapipe_flwr.data.reader import read_column, read_lists
from collapipe_flwr.data.tasks import load_task

ROWS = [("007", "NA"), ("say hi, you", "null"), ("ü\nline", "3")]


def write(path: Path) -> Path:
    opening = gzip.open if path.suffix == ".gz" else open
    with opening(path, "wt", encoding="utf-8", newline="") as file:
        if ".json" in path.name:
            file.writelines(json.dumps({"text": t, "label": b}) + "\n" for t, b in ROWS)
        else:
            delimiter = "\t" if ".tsv" in path.name else ","
            csv.writer(file, delimiter=delimiter).writerows([("text", "label"), *ROWS])
    return path


@pytest.mark.parametrize(
    "name", ["a.csv", "a.csv.gz", "a.tsv", "a.json", "a.jsonl", "a.jsonl.gz", "a.tsv.gz"]
)
def test_every_format_gives_the_same_texts(tmp_path: Path, name: str) -> None:
    table = load_table(str(write(tmp_path / name)), key="data.train", split="train")
    for index, title in enumerate(("text", "label")):
        texts = read_column(table, title, key="data.text-column", of=name)
        assert texts == [row[index] for row in ROWS]


DATES = ["2020-03-05", "2021-01-01T10:00", "2021-01-01 10:00:00"]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "folder/train.jsonl", "a.jsonl.gz"])
def test_texts_that_look_like_dates_stay_as_they_are_written(tmp_path: Path, name: str) -> None:
    rows = [{"text": text, "in": {"it": text}, "tokens": [text, "007"]} for text in DATES]
    text = json.dumps(rows) if name.endswith(".json") else "\n".join(map(json.dumps, rows))
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    with (gzip.open if name.endswith(".gz") else open)(path, "wt") as file:
        file.write(text)
    given = path.parent if path.parent != tmp_path else path
    table = load_table(str(given), key="data.train", split="train")
    for title in ("text", "in.it"):
        assert read_column(table, title, key="data.text-column", of=name) == DATES
    assert read_lists(table, "tokens", key="k", of=name) == [[date, "007"] for date in DATES]


def test_a_late_text_among_dates_is_no_error(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"  # datasets reads 10 MB at a time
    path.write_text(f'{{"text": "{DATES[2]}"}}\n' * 320_000 + '{"text": "soon"}\n')
    texts = load_table(str(path), key="data.train", split="train")["text"]
    assert (texts[0], texts[319_999], texts[320_000]) == (DATES[2], DATES[2], "soon")


def test_a_table_of_dates_that_others_have_cached_is_read_anew(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "2020-03-05"}\n' * 2)
    theirs = load_dataset("json", data_files=str(tmp_path / "rows.jsonl"), split="train")
    assert theirs.features["text"] != Value("string")
    table = load_table(str(tmp_path / "rows.jsonl"), key="data.train", split="train")
    assert table["text"][:] == ["2020-03-05"] * 2


@pytest.mark.parametrize("values", ['1, "007"', 'true, "x"', "1, true"])
def test_columns_of_several_kinds_are_refused(tmp_path: Path, values: str) -> None:
    one, other = values.split(", ")
    (tmp_path / "rows.jsonl").write_text(f'{{"text": {one}}}\n{{"text": {other}}}\n' * 3)
    with pytest.raises(DataError, match=r"several kinds|changed from"):
        table = load_table(str(tmp_path / "rows.jsonl"), key="data.train", split="train")
        read_column(table, "text", key="data.text-column", of="rows.jsonl")


def test_whole_numbers_that_reading_rounds_are_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": 12345678901234567890}\n{"text": 1}\n')
    table = load_table(str(tmp_path / "rows.jsonl"), key="data.train", split="train")
    with pytest.raises(DataError, match=r'data\.text-column "text" .* rounded .* write them as'):
        read_column(table, "text", key="data.text-column", of="rows.jsonl")


def test_what_is_not_a_number_is_empty() -> None:
    table = Dataset.from_dict({"text": [1.5, float("nan"), None]})
    assert read_column(table, "text", key="data.text-column", of="x") == ["1.5", "", ""]


@pytest.mark.parametrize("blank", ["\n", "\n\n \t\n", "\r\n"])
def test_empty_lines_behind_the_header_shift_no_columns(tmp_path: Path, blank: str) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(f"text,label\n{blank}a,x\nb,y\n", newline="")
    table = load_table(str(path), key="data.train", split="train")
    assert (table["text"][:], table["label"][:]) == (["a", "b"], ["x", "y"])
    path.write_text(f"text,label\n{blank}a,x,more\nb,y,more\n", newline="")
    with pytest.raises(DataError, match="a row with 3 fields after a first line with 2 names"):
        load_table(str(path), key="data.train", split="train")


@pytest.mark.parametrize("space", ["\u00a0", "\u3000", "\u2028", "\x85"])
def test_only_blanks_part_the_words_of_a_line(tmp_path: Path, space: str) -> None:
    word = f"10{space}000"
    (tmp_path / "rows.conll").write_text(f"{word}\tB-X\nruns  O\n\nno O\n", encoding="utf-8")
    table = read_conll(tmp_path / "rows.conll", "data.train")
    assert table["tokens"][:] == [[word, "runs"], ["no"]]
    assert table["tags"][:] == [["B-X", "O"], ["O"]]
    texts = Dataset.from_dict({"tokens": [f" {word} runs\n"]})
    assert read_lists(texts, "tokens", key="k", of="x") == [[word, "runs"]]


@pytest.mark.parametrize(
    ("number", "name"),
    [(errno.ENOSPC, ""), (errno.EACCES, "cache/x"), (errno.EACCES, "."), (errno.ENOTDIR, "cache")],
)
def test_a_cache_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, name: str
) -> None:
    place = str(tmp_path / name) if name else None

    def full(*_: object, **__: object) -> None:
        try:
            raise OSError(number, "no", place)
        except OSError as error:
            raise DatasetGenerationError("An error occurred") from error

    monkeypatch.setattr("collapipe_flwr.data.files.load_dataset", full)
    with pytest.raises(DataError, match=rf"{tmp_path}/cache, cannot be written .* HF_HOME"):
        load_table(str(write(tmp_path / "a.csv")), key="data.train", split="train")


def test_texts_may_be_long_and_lines_end_as_on_old_computers(tmp_path: Path) -> None:
    texts, path = ["x" * 200_000, "y"], tmp_path / "rows.csv"
    path.write_text("text,label\r" + "".join(f"{text},a\r" for text in texts), newline="")
    assert load_table(str(path), key="data.train", split="train")["text"][:] == texts


def test_a_column_of_row_numbers_needs_no_name(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text(",text,label\n0,a,x\n1,b,y\n")  # as pandas writes it
    table = load_table(str(tmp_path / "rows.csv"), key="data.train", split="train")
    assert table["text"][:] == ["a", "b"] and table["label"][:] == ["x", "y"]


def test_a_path_may_hold_what_is_magic_in_patterns(tmp_path: Path) -> None:
    folder = tmp_path / "new [v2] *?"
    folder.mkdir()
    (folder / "rows1.csv").write_text("text\nanother\n")
    table = load_table(str(write(folder / "rows[1].csv")), key="data.train", split="train")
    assert table["text"][:] == [text for text, _ in ROWS]
    (folder / "parts").mkdir()
    for split, size in (("train", 3), ("test", 2)):
        (folder / "parts" / f"{split}.csv").write_text("text\n" + "a\n" * size)
        for name in (folder / "parts", f"{folder / 'parts'}:{split}"):
            assert len(load_table(str(name), key="data.train", split=split)) == size


@pytest.mark.parametrize("name", ["lines.txt", "lines.txt.gz"])
def test_a_byte_order_mark_is_no_text(tmp_path: Path, name: str) -> None:
    opening = gzip.open if name.endswith(".gz") else open
    with opening(tmp_path / name, "wt", encoding="utf-8-sig") as file:
        file.write("first\nsecond \ufeff\n")
    table = load_table(str(tmp_path / name), key="data.train", split="train")
    assert table["text"][:] == ["first", "second \ufeff"]


def test_a_directory_gives_the_asked_split(tmp_path: Path) -> None:
    folder = tmp_path / "corpus"
    folder.mkdir()
    write(folder / "train.jsonl")
    (folder / "test.jsonl").write_text('{"text": "only", "label": "one"}\n')
    for split, size in (("train", 3), ("test", 1)):
        assert len(load_table(str(folder), key="data.train", split=split)) == size


def test_class_labels_become_their_names() -> None:
    features = Features({"label": ClassLabel(names=["no", "yes"])})
    table = Dataset.from_dict({"label": [1, 0, 1]}, features=features)
    assert read_column(table, "label", key="data.label-column", of="x") == ["yes", "no", "yes"]


@pytest.mark.parametrize("name", ["~nobody-here/rows.csv", "~nobody-here/saved:train"])
def test_a_home_that_does_not_exist_is_a_wrong_path(name: str) -> None:
    with pytest.raises(DataError, match=r'data\.train "~nobody-here/.*" does not exist'):
        load_table(name, key="data.train", split="train")


def test_numbers_become_texts() -> None:
    table = Dataset.from_dict({"label": [3, 1]}, features=Features({"label": Value("int64")}))
    assert read_column(table, "label", key="data.label-column", of="x") == ["3", "1"]


def test_missing_column_lists_those_that_exist() -> None:
    table = Dataset.from_dict({"text": ["x"], "intent": ["y"]})
    with pytest.raises(DataError, match=r'data\.label-column "label".*text, intent'):
        read_column(table, "label", key="data.label-column", of="x.csv")


@pytest.mark.parametrize("empty", ["", "  ", None])
def test_empty_rows_are_located(empty: str | None, tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    Dataset.from_dict({"text": ["x", empty, "y", empty], "label": ["a"] * 4}).to_parquet(path)
    settings = DataConfig(task="classification", train=str(path))
    with pytest.raises(DataError, match='"text" is empty in rows 2 and 4'):
        _ = load_task(settings).train


DAMAGED = gzip.compress(b'{"a": 1}\n', mtime=0)
DAMAGED = DAMAGED[:10] + b"\xff" + DAMAGED[11:]  # the first byte behind the header


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("absent.csv", None, "does not exist"),
        ("./absent", None, "does not exist"),
        ("notes.doc", b"x", "in no format that can be read"),
        ("empty.csv", b"", "is empty: give a file"),
        ("twice.csv", b"a,a\n1,2\n", "distinct column names"),
        (
            "long.csv",
            b"text,label\n" + b"x,hello,a\n" * 3,
            "3 fields after a first line with 2 names",
        ),
        ("headonly.csv", b"a,b\n", "it has no rows"),
        ("broken.jsonl", b"{]\n", "could not be loaded"),
        ("empty.jsonl", b"", "it is empty"),
        ("broken.csv.gz", b"no gzip", "could not be read"),
        (
            "half.jsonl.gz",
            gzip.compress(b'{"a": 1}\n', mtime=0)[:-9],
            "could not be loaded .*ended before",
        ),
        ("damaged.csv.gz", DAMAGED, "could not be read .*invalid block"),
        ("damaged.conll.gz", DAMAGED, "could not be read .*invalid block"),
        ("damaged.jsonl.gz", DAMAGED, "could not be loaded .*invalid block"),
    ],
)
def test_unreadable_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: bytes | None, reason: str
) -> None:
    monkeypatch.chdir(tmp_path)
    if content is not None:
        Path(name).write_bytes(content)
    with pytest.raises(DataError, match=rf'data\.train ".*{Path(name).name}".*{reason}'):
        load_table(name, key="data.train", split="train")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"a,b\n1,2\n1,2,3,4\n", "Expected 2 fields in line 3"),
        (b"a,b\n1,\xfc\n", "utf-8.*save the file as UTF-8"),
        (b'a,b\n"1,2\n' + b"1,2\n" * 50_000, "EOF inside string"),
    ],
)
def test_malformed_rows_give_the_reason(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(content)
    with pytest.raises(DataError, match=reason):
        load_table(str(path), key="data.train", split="train")
    gc.collect()  # datasets leaves the file open until then


def test_an_unreachable_hub_data_set_names_key_and_way_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(
        DataError, match=r'data\.train "nobody/nothing" could not be loaded .*local'
    ):
        load_table("nobody/nothing", key="data.train", split="train")


NESTED = [{"doc": {"en": "a", "de": "b"}, "tags": ["x"], "label": 1}] * 2


def test_a_field_of_an_object_is_named_by_a_dot() -> None:
    table = Dataset.from_list(NESTED)
    assert read_column(table, "doc.de", key="data.target-column", of="x.jsonl") == ["b", "b"]


@pytest.mark.parametrize(
    ("name", "way_out"), [("doc", 'such as "doc.en"'), ("tags", "one text or number in each row")]
)
def test_objects_and_lists_are_no_texts(name: str, way_out: str) -> None:
    with pytest.raises(DataError, match=rf'data\.text-column "{name}" of .*{way_out}'):
        read_column(Dataset.from_list(NESTED), name, key="data.text-column", of="x.jsonl")


def test_a_folder_of_save_to_disk_is_read(tmp_path: Path) -> None:
    rows = Dataset.from_dict({"text": ["x", "y", "z"]})
    rows.save_to_disk(tmp_path / "one")
    DatasetDict(train=rows, test=rows.select([0])).save_to_disk(tmp_path / "both")
    for folder, split, size in (("one", "train", 3), ("both", "train", 3), ("both", "test", 1)):
        assert len(load_table(str(tmp_path / folder), key="data.train", split=split)) == size
    with pytest.raises(DataError, match='no split "dev", only train, test'):
        load_table(str(tmp_path / "both"), key="data.test", split="dev")


def test_a_saved_table_without_splits_is_not_both_training_and_test_data(tmp_path: Path) -> None:
    Dataset.from_dict({"text": ["x", "y", "z"]}).save_to_disk(tmp_path / "saved")
    saved = str(tmp_path / "saved")
    for train, test in ((saved, saved), (f"{saved}:train", f"{saved}:test")):
        task = load_task(DataConfig(task="masked-lm", train=train, test=test))
        with pytest.raises(DataError, match=r'data\.test .* has no split "test", .* one table'):
            _ = task.test


def test_a_split_of_a_folder_is_named_behind_a_colon(tmp_path: Path) -> None:
    rows = Dataset.from_dict({"text": ["x", "y", "z"]})
    DatasetDict(learn=rows, check=rows.select([0])).save_to_disk(tmp_path / "saved")
    rows.to_parquet(tmp_path / "files" / "train.parquet")
    rows.select([0]).to_parquet(tmp_path / "files" / "validation.parquet")
    for name, size in (("saved:learn", 3), ("saved:check", 1), ("files:validation", 1)):
        assert len(load_table(f"{tmp_path / name}", key="data.train", split="train")) == size
    with pytest.raises(DataError, match=r'no split "test", only train, valid.* "\S*files:train"'):
        load_table(f"{tmp_path / 'files'}", key="data.test", split="test")


def test_the_only_split_of_a_folder_serves_unless_both_roles_name_it(tmp_path: Path) -> None:
    (tmp_path / "some").mkdir()
    (tmp_path / "some" / "notes.txt").write_text("x\n")
    assert len(load_table(str(tmp_path / "some"), key="data.test", split="test")) == 1
    with pytest.raises(DataError, match='no split "test", only train'):
        load_table(str(tmp_path / "some"), key="k", split="test", only_split_serves=False)

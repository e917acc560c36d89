"""Laws of a growing folder: each row is fresh once, replay comes from before, files may grow."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st

from collapipe_flwr.core.errors import DataError
from collapipe_flwr.core.json_codec import from_json, to_json
from collapipe_flwr.data.config import DataConfig
from collapipe_flwr.data.files import load_table
from collapipe_flwr.data.stream import Stream, StreamExamples, StreamPlace, draw_stream_round
from collapipe_flwr.data.tasks import load_task
from tests.thorough import examples

PAST = Dataset.from_dict({"text": ["p0", "p1", "p2"]})


def read(name: str) -> Dataset:
    try:
        lines = Path(name).read_text().splitlines()
        return Dataset.from_dict({"text": [json.loads(line) for line in lines]})
    except ValueError as error:
        raise DataError(str(error)) from error


def as_they_are(rows: Dataset) -> Dataset:
    return rows


def stream_of(folder: Path) -> Stream:
    return Stream(folder, read, as_they_are)


def add(folder: Path, name: str, texts: Sequence[str], mode: str = "w") -> None:
    with (folder / name).open(mode) as file:
        file.write("".join(json.dumps(text) + "\n" for text in texts))


def step(
    stream: Stream, place: StreamPlace, *, limit: int = 4, share: float = 0.5, seed: int = 0
) -> StreamExamples:
    rng = np.random.default_rng(seed)
    kept = from_json(StreamPlace, to_json(place), "place")  # as between two processes
    return draw_stream_round(stream, kept, PAST, limit=limit, replay_share=share, rng=rng)


def fresh_rows(stream: Stream, place: StreamPlace) -> tuple[list[str], StreamPlace]:
    found = step(stream, place, limit=100, share=0.0)
    return found.fresh["text"][:], found.place


@examples(4, 12)
@given(
    arrivals=st.lists(st.tuples(st.integers(0, 7), st.booleans()), min_size=1, max_size=6),
    limit=st.integers(1, 6),
)
def test_every_row_is_fresh_once_and_replay_comes_from_before(
    tmp_path_factory: pytest.TempPathFactory, arrivals: list[tuple[int, bool]], limit: int
) -> None:
    """Rows arrive in files of their own, or at the end of the first file."""
    folder = tmp_path_factory.mktemp("stream")
    place, fresh, sent = (), [], []
    for number in range(60):
        if number >= len(arrivals) + 2 and len(fresh) >= len(sent):
            break  # two rounds or more without anything new, most often
        if number < len(arrivals):
            count, grows = arrivals[number]
            texts = [f"{number}.{i}" for i in range(count)]
            if texts:
                add(folder, "000.json" if grows else f"{number:03}.json", texts, "a")
            sent += texts
        before = {*PAST["text"], *fresh}
        chosen = step(stream_of(folder), place, limit=limit, seed=number)
        assert len(chosen.fresh) + len(chosen.replayed) == limit
        if len(chosen.replayed):
            assert set(chosen.replayed["text"]) <= before
        fresh += chosen.fresh["text"][:]
        place = chosen.place
    assert sorted(fresh) == sorted(sent)
    if not any(grows for _, grows in arrivals):
        assert fresh == sent


def test_a_file_that_sorts_before_those_read_still_comes_once(tmp_path: Path) -> None:
    add(tmp_path, "m.json", ["m0", "m1"])
    add(tmp_path, "z.json", ["z0"])
    first = step(stream_of(tmp_path), ())
    add(tmp_path, "a.json", ["a0", "a1"])
    second = step(stream_of(tmp_path), first.place)
    assert (first.fresh["text"][:], second.fresh["text"][:]) == (["m0", "m1"], ["z0", "a0"])


@pytest.mark.parametrize("texts", [["a0"], ["a0", "b1"], ["b0", "a1", "a2"]])
def test_a_file_that_changed_after_it_was_read_is_named_and_refused(
    tmp_path: Path, texts: list[str]
) -> None:
    """Shorter, of equal length (and age), or longer."""
    add(tmp_path, "a.json", ["a0", "a1"])
    age = (tmp_path / "a.json").stat()
    first = step(stream_of(tmp_path), ())
    add(tmp_path, "a.json", texts)
    os.utime(tmp_path / "a.json", ns=(age.st_atime_ns, age.st_mtime_ns))
    words = r'a\.json" has changed since 2 examples of it were read: put it back .* a new file'
    with pytest.raises(DataError, match=words):
        step(stream_of(tmp_path), first.place)


def test_a_file_of_which_nothing_was_read_may_change(tmp_path: Path) -> None:
    add(tmp_path, "a.json", ["a0", "a1"])
    add(tmp_path, "b.json", ["b0"])
    first = step(stream_of(tmp_path), ())
    add(tmp_path, "b.json", ["new"])
    assert step(stream_of(tmp_path), first.place).fresh["text"][:] == ["new"]
    (tmp_path / "b.json").unlink()
    assert len(step(stream_of(tmp_path), first.place).fresh) == 0


def test_a_file_that_cannot_be_read_waits_until_it_is_whole(tmp_path: Path, caplog) -> None:
    add(tmp_path, "a.json", ["a0", "a1"])
    (tmp_path / "b.json").write_text('"b0"\n"b')
    rows, place = fresh_rows(stream_of(tmp_path), ())
    assert rows == ["a0", "a1"]
    assert f'"{tmp_path / "b.json"}" is left out until it can be read' in caplog.text
    with (tmp_path / "a.json").open("a") as file:
        file.write('"a')  # now the rest of a file that was read waits, too
    found = step(stream_of(tmp_path), place)
    assert len(found.fresh) == 0 and set(found.replayed["text"]) <= {*PAST["text"]}
    for name in ("a", "b"):
        with (tmp_path / f"{name}.json").open("a") as file:
            file.write('2"\n')
    rows, place = fresh_rows(stream_of(tmp_path), found.place)
    assert rows == ["a2", "b0", "b2"]
    assert fresh_rows(stream_of(tmp_path), place)[0] == []


def _text(name: str) -> Dataset:
    return load_table(name, key="data.stream", split="train").select_columns("text")


@pytest.fixture
def text_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[StreamPlace], tuple[list[str], StreamPlace]]:
    """What of the folder ``s`` is fresh by the real readers, behind a place."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "s"
    folder.mkdir()
    return lambda place: fresh_rows(Stream(folder, _text, as_they_are), place)


Fresh = Callable[[StreamPlace], tuple[list[str], StreamPlace]]


@pytest.mark.parametrize("name", ["a.csv", "a.csv.gz", "a.jsonl", "a.jsonl.gz", "a.txt"])
def test_rows_at_the_end_of_a_file_that_was_read_are_fresh(
    tmp_path: Path, text_stream: Fresh, name: str
) -> None:
    def grow(*texts: str, first: str = "") -> None:
        lines = [json.dumps({"text": t}) if "json" in name else t for t in texts]
        found = "".join(f"{line}\n" for line in [first, *lines] if line).encode()
        with (tmp_path / "s" / name).open("ab") as file:
            file.write(gzip.compress(found) if name.endswith(".gz") else found)

    grow("one", "two", first="text" if "csv" in name else "")
    rows, place = text_stream(())
    assert rows == ["one", "two"]
    grow("three")
    assert text_stream(place)[0] == ["three"]


def test_a_file_that_grows_is_held_once_by_the_cache_and_not_once_per_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, file = tmp_path / "cache", tmp_path / "a.jsonl.gz"
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", cache)
    task = load_task(DataConfig(task="masked-lm"))
    held = []
    for number in range(1, 4):
        with file.open("ab") as more:
            more.write(gzip.compress(b'{"text": "one"}\n'))
        for _ in range(2):
            assert len(task.read_file(str(file))) == number
        held.append(len(list(cache.rglob("*"))))
        assert len(list(cache.rglob("*.arrow"))) == 1
    assert len(set(held)) == 1


@pytest.mark.parametrize("task", ["masked-lm", "causal-lm"])
def test_empty_rows_are_no_examples_of_a_language_model(tmp_path: Path, task: str) -> None:
    for name, texts in (("full", 9 * ["one two"]), ("sparse", 9 * ["", "one two", " "])):
        rows = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        (tmp_path / f"{name}.jsonl").write_text(rows)
    model = load_task(DataConfig(task=task, train=str(tmp_path / "full.jsonl"), vocab_size=300))
    full, sparse = (
        model.make_examples(model.read_file(str(tmp_path / f"{name}.jsonl")))
        for name in ("full", "sparse")
    )
    assert sparse[:] == full[:]


def test_half_a_line_is_not_taken_for_a_row(tmp_path: Path, text_stream: Fresh) -> None:
    file = tmp_path / "s" / "a.csv"
    file.write_text("text\none\ntw")
    rows, place = text_stream(())
    assert rows == ["one"]
    file.write_text("text\none\ntwo\nthree")
    rows, place = text_stream(place)
    assert rows == ["two"]
    rows, place = text_stream(place)  # it has not changed since: this is its end
    assert rows == ["three"]
    assert text_stream(place)[0] == []


def test_a_parquet_file_does_not_grow(tmp_path: Path, text_stream: Fresh) -> None:
    file = tmp_path / "s" / "a.parquet"
    Dataset.from_dict({"text": ["one"]}).to_parquet(str(file))
    place = text_stream(())[1]
    with file.open("ab") as more:
        more.write(file.read_bytes())
    with pytest.raises(DataError, match=r"a\.parquet\" has changed .* new rows belong"):
        text_stream(place)


def test_examples_that_join_rows_stay_what_they_were_when_the_file_grows(tmp_path: Path) -> None:
    """As those of language models do: a short last one is not made longer."""

    def joined(rows: Dataset) -> Dataset:
        texts = rows["text"][:]
        return Dataset.from_dict(
            {"text": ["+".join(texts[i : i + 2]) for i in range(0, len(texts), 2)]}
        )

    stream = Stream(tmp_path, read, joined)
    add(tmp_path, "a.json", ["a0", "a1", "a2"])
    rows, place = fresh_rows(stream, ())
    assert rows == ["a0+a1", "a2"]
    add(tmp_path, "a.json", ["a3", "a4", "a5"], "a")
    rows, place = fresh_rows(stream, place)
    assert rows == ["a3+a4", "a5"]
    assert set(step(stream, place, limit=50).replayed["text"]) >= {"a2", "a5"}


def test_unfinished_files_are_left_alone(tmp_path: Path) -> None:
    for name in (".hidden", "x.json.tmp", "y.part"):
        add(tmp_path, name, ["no"])
    assert stream_of(tmp_path).files(()) == []


def test_what_is_wrong_with_the_folder_is_said(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.stream has no folder"):
        stream_of(tmp_path / "missing")
    add(tmp_path, "gone.json", ["a0", "a1"])
    first = step(stream_of(tmp_path), ())
    (tmp_path / "gone.json").unlink()
    with pytest.raises(DataError, match=r'no longer has ".*gone\.json", of which 2 examples'):
        step(stream_of(tmp_path), first.place)


def test_half_a_sentence_is_not_taken_for_one(tmp_path: Path) -> None:
    file = tmp_path / "a.conll"
    file.write_text("He PRON\nruns VERB\n\nShe PRON\n")

    def sentences(name: str) -> Dataset:
        tokens = load_table(name, key="data.stream", split="train")["tokens"][:]
        return Dataset.from_dict({"text": [" ".join(words) for words in tokens]})

    stream = Stream(tmp_path, sentences, as_they_are)
    rows, place = fresh_rows(stream, ())
    assert rows == ["He runs"]
    with file.open("a") as more:
        more.write("walks VERB\n\n")
    assert fresh_rows(stream, place)[0] == ["She walks"]

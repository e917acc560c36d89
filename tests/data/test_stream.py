"""Laws of a growing folder: each row is fresh once, replay comes from before, rounds repeat."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st

from collapipe_flwr.core.errors import DataError
from collapipe_flwr.data.stream import Stream, StreamPlace, StreamRound, next_round

PAST = Dataset.from_dict({"text": ["p0", "p1", "p2"]})


def read(name: str) -> Dataset:
    return Dataset.from_dict({"text": json.loads(Path(name).read_text())})


def add(folder: Path, name: str, texts: list[str]) -> None:
    (folder / name).write_text(json.dumps(texts))


def step(
    stream: Stream, place: StreamPlace, server_round: int, *, limit: int = 4, share: float = 0.5
) -> StreamRound:
    rng = np.random.default_rng(server_round)
    return next_round(
        stream, place, PAST, server_round=server_round, limit=limit, replay_share=share, rng=rng
    )


@settings(max_examples=30)
@given(arrivals=st.lists(st.integers(0, 7), min_size=1, max_size=6), limit=st.integers(1, 6))
def test_every_row_is_fresh_once_in_order_and_replay_comes_from_before(
    tmp_path_factory: pytest.TempPathFactory, arrivals: list[int], limit: int
) -> None:
    folder = tmp_path_factory.mktemp("stream")
    stream, place, fresh, sent = Stream(folder, read), StreamPlace(), [], []
    for server_round in range(1, 60):
        if server_round <= len(arrivals) and arrivals[server_round - 1]:
            texts = [f"{server_round}.{i}" for i in range(arrivals[server_round - 1])]
            add(folder, f"{server_round:03}.json", texts)
            sent += texts
        before = {*PAST["text"], *fresh}
        chosen = step(stream, place, server_round, limit=limit)
        assert len(chosen.fresh) + len(chosen.replayed) == limit
        if len(chosen.replayed):
            assert set(chosen.replayed["text"]) <= before
        if len(chosen.fresh):
            fresh += chosen.fresh["text"][:]
        place = chosen.place
    assert fresh == sent


def test_a_repeated_round_has_the_same_examples_though_more_has_arrived(tmp_path: Path) -> None:
    add(tmp_path, "a.json", ["a0", "a1", "a2"])
    stream = Stream(tmp_path, read)
    first = step(stream, StreamPlace(), 1)
    add(tmp_path, "b.json", ["b0"])
    again = step(stream, first.place, 1)
    assert again.place == first.place
    assert again.fresh.to_dict() == first.fresh.to_dict()
    assert again.replayed.to_dict() == first.replayed.to_dict()


def test_a_file_that_sorts_before_those_read_still_comes_once(tmp_path: Path) -> None:
    add(tmp_path, "m.json", ["m0", "m1"])
    stream = Stream(tmp_path, read)
    first = step(stream, StreamPlace(), 1)
    add(tmp_path, "a.json", ["a0", "a1"])
    second = step(stream, first.place, 2)
    assert (first.fresh["text"][:], second.fresh["text"][:]) == (["m0", "m1"], ["a0", "a1"])


@pytest.mark.parametrize("texts", [["a0"], ["a0", "a1", "a2"]])
def test_a_file_that_changed_after_it_was_read_is_refused(tmp_path: Path, texts: list[str]) -> None:
    add(tmp_path, "a.json", ["a0", "a1"])
    first = step(Stream(tmp_path, read), StreamPlace(), 1)
    add(tmp_path, "a.json", texts)
    with pytest.raises(DataError, match=rf"has {len(texts)} rows where 2 were read.*into new ones"):
        step(Stream(tmp_path, read), first.place, 2)


def test_unfinished_files_are_left_alone(tmp_path: Path) -> None:
    for name in (".hidden", "x.json.tmp", "y.part"):
        add(tmp_path, name, ["no"])
    assert Stream(tmp_path, read).files(()) == ()


def test_what_is_wrong_with_the_folder_is_said(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.stream has no folder"):
        Stream(tmp_path / "missing", read)
    with pytest.raises(DataError, match=r"no longer has gone\.json"):
        Stream(tmp_path, read).files(("gone.json",))

"""Reading rounds while they are written: each line once, whole lines only, and files replaced."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from collapipe_flwr.core.errors import RunError
from collapipe_flwr.reporting.run_directory import EVENTS, RunDirectory, newest_event
from collapipe_flwr.reporting.run_reader import EventTail


def _event(index: int, text: str = "") -> dict[str, object]:
    return {"round_index": index, "text": text}


def _rounds(tail: EventTail) -> list[int]:
    return [event["round_index"] for event in tail.read_new()]


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path / "run")


def test_each_round_is_read_once(directory: RunDirectory) -> None:
    tail = EventTail(directory.path)
    assert _rounds(tail) == []
    directory.append_event(_event(1))
    directory.append_event(_event(2))
    assert _rounds(tail) == [1, 2]
    assert _rounds(tail) == []
    directory.append_event(_event(3))
    assert (_rounds(tail), tail.generation) == ([3], 0)


def test_a_folder_may_come_to_be_later(tmp_path: Path) -> None:
    tail = EventTail(tmp_path / "later")
    assert (_rounds(tail), newest_event(tmp_path / "later")) == ([], None)
    RunDirectory(tmp_path / "later").append_event(_event(1))
    assert (_rounds(tail), tail.generation) == ([1], 0)


def test_a_torn_last_line_is_left_until_it_is_complete(directory: RunDirectory) -> None:
    directory.append_event(_event(1))
    line = json.dumps(_event(2)) + "\n"
    tail = EventTail(directory.path)
    with (directory.path / EVENTS).open("a") as file:
        file.write(line[:9])
        file.flush()
        assert _rounds(tail) == [1]
        newest = newest_event(directory.path)
        assert newest is not None and newest["round_index"] == 1
        file.write(line[9:])
    assert _rounds(tail) == [2]


def test_rounds_of_a_resumed_run_are_read_from_the_start(directory: RunDirectory) -> None:
    tail = EventTail(directory.path)
    for index in (1, 2, 3):
        directory.append_event(_event(index))
    assert _rounds(tail) == [1, 2, 3]
    directory.rewrite_events([_event(1)])
    assert (_rounds(tail), tail.generation) == ([1], 1)
    directory.append_event(_event(2, "again"))
    assert (_rounds(tail), tail.generation) == ([2], 1)


def test_a_file_rewritten_in_place_is_read_from_the_start(directory: RunDirectory) -> None:
    """So is one that bears the inode of a file that was removed."""
    path, tail = directory.path / EVENTS, EventTail(directory.path)
    path.write_text(json.dumps(_event(1)) + "\n")
    assert _rounds(tail) == [1]
    path.write_text("".join(json.dumps(_event(index, "other")) + "\n" for index in (1, 2, 3)))
    assert (_rounds(tail), tail.generation) == ([1, 2, 3], 1)


def test_much_is_read_piece_by_piece(directory: RunDirectory) -> None:
    for index in range(1, 8):
        directory.append_event(_event(index, "x" * 100))
    tail, pieces = EventTail(directory.path), []
    while found := tail.read_new(250):
        pieces.append([event["round_index"] for event in found])
    assert pieces == [[1, 2], [3, 4], [5, 6], [7]]


def test_a_damaged_line_is_named(directory: RunDirectory) -> None:
    directory.append_event(_event(1))
    with (directory.path / EVENTS).open("a") as file:
        file.write("{nonsense\n")
    with pytest.raises(RunError, match=r"events\.jsonl, line 2: no event of a round"):
        EventTail(directory.path).read_new()


@pytest.mark.parametrize("size", [1, 1 << 20, 3 << 20])
def test_the_newest_round_is_found_from_the_end(directory: RunDirectory, size: int) -> None:
    directory.append_event(_event(1, "x" * size))
    for expected in (1, 2):
        newest = newest_event(directory.path)
        assert newest is not None and newest["round_index"] == expected
        directory.append_event(_event(2, "y" * size))

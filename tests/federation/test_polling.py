"""How often a server looks for replies."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from flwr.app import Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from collapipe_flwr import LocalGrid
from collapipe_flwr.federation.wrapped_grid import LONGEST_S, SHORTEST_S, PollingGrid, polling


class Slow(LocalGrid):
    """A grid whose replies are there so many seconds after the messages."""

    def __init__(self, takes_s: float) -> None:
        super().__init__({1: lambda message, _: Message(RecordDict(), reply_to=message)})
        self.takes_s, self.now_s, self.pushed_s = takes_s, 0.0, 0.0
        self.looks_s: list[float] = []

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        self.pushed_s = self.now_s
        return super().push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        self.looks_s.append(self.now_s - self.pushed_s)
        there = self.now_s - self.pushed_s >= self.takes_s
        return super().pull_messages(message_ids) if there else []

    def pause(self, seconds: float) -> None:
        assert SHORTEST_S <= seconds <= LONGEST_S
        self.now_s += seconds


@pytest.fixture(autouse=True)
def identity(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


def exchange(grid: PollingGrid, timeout: float | None = None) -> list[Message]:
    return grid.send_and_receive([Message(RecordDict(), 1, "train")], timeout=timeout)


@pytest.mark.parametrize("takes_s", [1.0, 20.0, 300.0])
def test_replies_are_found_late_by_a_tenth_at_most_and_at_once_when_expected(
    takes_s: float,
) -> None:
    slow = Slow(takes_s)
    grid = PollingGrid(slow, now=lambda: slow.now_s, pause=slow.pause)
    for late_s in (max(0.1 * takes_s, SHORTEST_S), 0.02 * takes_s + SHORTEST_S):
        slow.looks_s.clear()
        assert len(exchange(grid)) == 1
        assert slow.looks_s[-1] - takes_s <= min(late_s, LONGEST_S) + 1e-9
        assert len(slow.looks_s) < 60 + takes_s / LONGEST_S


def test_a_timeout_ends_the_wait() -> None:
    slow = Slow(100.0)
    grid = PollingGrid(slow, now=lambda: slow.now_s, pause=slow.pause)
    assert exchange(grid, timeout=5.0) == []
    assert 5.0 <= slow.now_s <= 5.0 + LONGEST_S


def test_only_grids_of_flowers_are_wrapped() -> None:
    grid = Slow(1.0)
    assert polling(grid) is grid
    flowers = type("HttpGrid", (Slow,), {"__module__": "flwr.superlink.grid.http_grid"})(1.0)
    assert isinstance(polling(flowers), PollingGrid)

"""How often a server looks for replies."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import wait

import pytest
from flwr.app import Message, RecordDict

from collapipe_flwr import LocalGrid
from collapipe_flwr.federation.wrapped_grid import LONGEST_S, SHORTEST_S, PollingGrid, polling

pytestmark = pytest.mark.usefixtures("identity")


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


class Halved(LocalGrid):
    """A grid that waits for the rest of the reply of node 2."""

    def __init__(self) -> None:
        super().__init__(
            dict.fromkeys((1, 2, 3), lambda message, _: Message(RecordDict(), reply_to=message))
        )
        self.is_whole = threading.Event()
        self.fails = False
        self.halved = ""

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        sent = list(messages)
        ids = super().push_messages(sent)
        nodes = {m.metadata.dst_node_id: i for m, i in zip(sent, ids, strict=True)}
        self.halved = nodes.get(2, self.halved)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        asked = list(message_ids)
        if self.halved in asked:
            self.is_whole.wait()
            if self.fails:
                raise ConnectionError("the SuperNode died while it uploaded this")
        return super().pull_messages(asked)


@pytest.fixture
def halved(monkeypatch: pytest.MonkeyPatch) -> Iterator[Halved]:
    monkeypatch.setattr("collapipe_flwr.federation.wrapped_grid.PATIENCE_S", 0.05)
    grid = Halved()
    yield grid
    grid.is_whole.set()


def test_a_reply_that_is_never_whole_holds_up_neither_the_others_nor_the_timeout(
    halved: Halved,
) -> None:
    grid = PollingGrid(halved)
    sent = [Message(RecordDict(), node, "train") for node in (1, 2, 3)]
    replies = grid.send_and_receive(sent, timeout=0.6)
    assert {reply.metadata.src_node_id for reply in replies} == {1, 3}
    assert grid.pull_messages([halved.halved]) == []
    halved.is_whole.set()
    while not (late := grid.pull_messages([halved.halved])):
        time.sleep(0.01)
    assert [reply.metadata.src_node_id for reply in late] == [2]
    assert grid.pull_messages([halved.halved]) == []


@pytest.mark.parametrize("awaited", [True, False])
def test_a_late_reply_outlives_other_exchanges_if_it_is_awaited(
    halved: Halved, awaited: bool
) -> None:
    grid = PollingGrid(halved)
    grid.send_and_receive([Message(RecordDict(), n, "train") for n in (1, 2, 3)], timeout=0.1)
    late = halved.halved
    if awaited:
        assert grid.pull_messages([late]) == []
    halved.is_whole.set()
    wait(grid._fetches._under_way)
    for node in (1, 3):
        assert len(grid.send_and_receive([Message(RecordDict(), node, "evaluate")])) == 1
    assert [reply.metadata.src_node_id for reply in grid.pull_messages([late])] == [2] * awaited
    exchange(grid)
    assert not grid._fetches._under_way and not grid._fetches._awaited


def test_a_late_reply_whose_fetch_failed_is_asked_for_again(halved: Halved) -> None:
    grid, halved.fails = PollingGrid(halved), True
    grid.send_and_receive([Message(RecordDict(), n, "train") for n in (1, 2, 3)], timeout=0.1)
    late = halved.halved
    assert grid.pull_messages([late]) == []
    halved.is_whole.set()
    wait(grid._fetches._under_way)
    halved.fails = False
    grid.send_and_receive([Message(RecordDict(), 1, "evaluate")])
    assert [reply.metadata.src_node_id for reply in grid.pull_messages([late])] == [2]


def test_what_the_grid_raises_is_raised() -> None:
    class Broken(LocalGrid):
        def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
            raise ConnectionError(f"no SuperLink has {len(list(message_ids))}")

    grid = Broken({1: lambda message, _: Message(RecordDict(), reply_to=message)})
    with pytest.raises(ConnectionError, match="no SuperLink has 1"):
        exchange(PollingGrid(grid))


def test_only_grids_of_flowers_are_wrapped() -> None:
    grid = Slow(1.0)
    assert polling(grid) is grid
    flowers = type("HttpGrid", (Slow,), {"__module__": "flwr.superlink.grid.http_grid"})(1.0)
    assert isinstance(polling(flowers), PollingGrid)

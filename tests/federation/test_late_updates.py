"""Late updates join a later round as FedBuff has it; none is lost, and none counts twice."""

from __future__ import annotations

import math

import pytest
import torch
from flwr.app import Error, Message
from flwr.serverapp.strategy import FedAvg

from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.federation.arrays import decode_tensors, encode_tensors
from collapipe_flwr.federation.local_grid import LocalGrid
from collapipe_flwr.federation.messages import LATE
from collapipe_flwr.federation.records import read_assignment
from collapipe_flwr.federation.strategy import CollaPipe
from tests.federation.memory_edge import MemoryEdge
from tests.federation.split_clusters import FixedPlanner, model, trainer, wrapped

NAN = {"extra": {"embed.weight": torch.full((3, 2), torch.nan)}}


class LateGrid(LocalGrid):
    """Node 2 needs ``rounds`` rounds more than there are; its replies are here to pull then."""

    def __init__(self, nodes, rounds: int) -> None:
        super().__init__(nodes)
        self._rounds, self._round = rounds, 0
        self._due: dict[str, int] = {}
        self.asked: list[list[int]] = []

    def send_and_receive(self, messages, *, timeout=None):
        del timeout
        sent = list(messages)
        if sent:
            self._round += 1
            self.asked.append(sorted(m.metadata.dst_node_id for m in sent))
        replies = []
        for message, name in zip(sent, self.push_messages(sent), strict=True):
            if message.metadata.dst_node_id == 2 and self._rounds:
                self._due[name] = self._round + self._rounds
                replies.append(Message(Error(LATE, "late"), reply_to=message))
            else:
                replies += self.pull_messages([name])
        return replies

    def pull_messages(self, message_ids):
        due = [name for name in message_ids if self._due.get(name, 0) <= self._round]
        return super().pull_messages(due)

    def hurry(self, _seconds: float) -> None:
        """Whoever waits lets time pass."""
        self._round += 1


def trained(grid: LateGrid, edge: MemoryEdge, rounds: int, records: list | None = None):
    """All weights after so many rounds; checks that no session is left."""
    inner = FedAvg(fraction_evaluate=0.0, min_train_nodes=1, min_available_nodes=1)
    planner = FixedPlanner("c1", "c2")
    records = [] if records is None else records
    strategy = wrapped(edge, planner, records, inner, late="join")
    strategy._hooks.late._sleep = grid.hurry
    result = strategy.start(grid, encode_tensors(model()), num_rounds=rounds)
    assert edge.replicas == {}
    return decode_tensors(result.arrays)


def nodes(edge: MemoryEdge, **change):
    return {1: trainer(edge, 1.0, 10), 2: trainer(edge, 3.0, 30, **change)}


@pytest.mark.parametrize("late", [1, 2])
def test_a_late_update_joins_the_round_that_is_open_with_its_staleness_weight(late: int) -> None:
    edge, records = MemoryEdge(), []
    grid = LateGrid(nodes(edge), late)
    final = trained(grid, edge, 1 + late, records)
    weight, alone = 30 / math.sqrt(1 + late), 1.0 + late  # after the rounds of cluster 1 alone
    joined = (10 * (alone + 1) + weight * (alone + 3)) / (10 + weight)
    for key in ("embed.weight", "decoder.weight"):
        assert final[key].flatten().tolist() == pytest.approx([joined] * final[key].numel())
    assert grid.asked == [[1, 2], *[[1]] * late]
    assert [set(record.telemetry) for record in records[:-1]] == [{"c1"}] * late
    assert set(records[-1].telemetry) == {"c1", "c2"}
    assert not any(record.failures for record in records)
    assert f"cluster c2 joins late by {late} rounds" in records[-1].remarks[-1]


def test_no_round_of_a_cluster_is_lost_or_counted_twice() -> None:
    edge, records = MemoryEdge(), []
    grid = LateGrid(nodes(edge), 1)
    trained(grid, edge, 6, records)
    told = [(m.metadata.dst_node_id, read_assignment(m.content).progress) for m in grid.sent]
    assert [(p.rounds, p.last_round) for node, p in told if node == 2] == [(0, 0), (1, 1), (2, 3)]
    assert sum("c2" in record.telemetry for record in records) == 3  # each of its three rounds
    assert [(p.rounds, p.last_round) for node, p in told if node == 1][-1] == (5, 5)


def test_the_last_round_waits_for_all() -> None:
    edge, records = MemoryEdge(), []
    trained(LateGrid(nodes(edge), 1), edge, 1, records)
    assert set(records[0].telemetry) == {"c1", "c2"}


def test_a_round_in_which_all_are_late_waits_for_the_first() -> None:
    edge, records = MemoryEdge(), []
    grid = LateGrid({2: trainer(edge, 3.0, 30)}, 1)
    final = trained(grid, edge, 2, records)
    assert final["embed.weight"][0, 0] == 1.0 + 3.0 + 3.0
    assert [set(record.telemetry) for record in records] == [{"c2"}] * 2


def test_a_late_update_that_cannot_be_used_is_refused_and_its_cluster_asked_again() -> None:
    edge, records = MemoryEdge(), []
    grid = LateGrid(nodes(edge, **NAN), 1)
    trained(grid, edge, 4, records)
    assert "late by 1 rounds: " in records[1].failures["c2"]
    assert "not finite" in records[1].failures["c2"]
    assert [2 in asked for asked in grid.asked] == [True, False, True, False]
    assert {
        read_assignment(m.content).progress.rounds for m in grid.sent if m.metadata.dst_node_id == 2
    } == {0}


def test_where_nobody_is_late_nothing_changes() -> None:
    plain, joining = MemoryEdge(), MemoryEdge()
    one = trained(LateGrid(nodes(joining), 0), joining, 2)
    inner = FedAvg(fraction_evaluate=0.0)
    strategy = wrapped(plain, FixedPlanner("c1", "c2"), [], inner)
    two = strategy.start(LocalGrid(nodes(plain)), encode_tensors(model()), num_rounds=2).arrays
    assert all(torch.equal(one[key], value) for key, value in decode_tensors(two).items())


def test_another_word_is_refused() -> None:
    with pytest.raises(ConfigError, match="late must be 'drop' or 'join', got 'wait'"):
        CollaPipe(FedAvg(), late="wait")

"""Late updates join a later round as FedBuff has it; none is lost, and none counts twice."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from flwr.app import Error, Message
from flwr.serverapp.strategy import FedAvg

from collapipe_flwr.core.errors import ConfigError, LinkError, RunError
from collapipe_flwr.federation import attempts
from collapipe_flwr.federation.arrays import decode_tensors, encode_tensors
from collapipe_flwr.federation.local_grid import LocalGrid
from collapipe_flwr.federation.records import LATE, read_assignment
from collapipe_flwr.federation.strategy import CollaPipe
from tests.federation.split_clusters import FixedPlanner, model, trainer, wrapped

NAN = {"extra": {"embed.weight": torch.full((3, 2), torch.nan)}}


class LateGrid(LocalGrid):
    """Late nodes need ``rounds`` rounds more than there are; their replies are to be pulled then.

    ``more_rounds`` of a node are on top.
    """

    def __init__(self, nodes, rounds: int) -> None:
        super().__init__(nodes)
        self.late_nodes, self.more_rounds = {2}, {}
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
            node = message.metadata.dst_node_id
            if node in self.late_nodes and self._rounds:
                self._due[name] = self._round + self._rounds + self.more_rounds.get(node, 0)
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


def trained(
    grid: LateGrid,
    rounds: int,
    records: list | None = None,
    planner: FixedPlanner | None = None,
    within_s: float = 3600.0,
    kind: type[FedAvg] = FedAvg,
    **options,
):
    """All weights after so many rounds; late updates join."""
    inner = kind(fraction_evaluate=0.0, min_train_nodes=1, min_available_nodes=1)
    planner = planner or FixedPlanner("c1", "c2")
    records = [] if records is None else records
    strategy = wrapped(planner, records, inner, late="join", **options)
    strategy._hooks.late._sleep = grid.hurry
    result = strategy.start(grid, encode_tensors(model()), rounds, within_s)
    return decode_tensors(result.arrays)


def nodes(**change):
    return {1: trainer(1.0, 10), 2: trainer(3.0, 30, **change)}


@pytest.mark.parametrize("late", [1, 2])
def test_a_late_update_joins_the_round_that_is_open_with_its_staleness_weight(late: int) -> None:
    records = []
    grid = LateGrid(nodes(), late)
    final = trained(grid, 1 + late, records)
    weight, alone = 30 / math.sqrt(1 + late), 1.0 + late  # after the rounds of cluster 1 alone
    joined = (10 * (alone + 1) + weight * (alone + 3)) / (10 + weight)
    for key in ("embed.weight", "decoder.weight"):
        assert final[key].flatten().tolist() == pytest.approx([joined] * final[key].numel())
    assert grid.asked == [[1, 2], *[[1]] * late]
    assert [set(record.telemetry) for record in records[:-1]] == [{"c1"}] * late
    assert set(records[-1].telemetry) == {"c1", "c2"}
    assert not any(record.failures for record in records)
    assert f"cluster c2 joins late by {late} rounds" in str(records[-1].incidents[-1])


def test_no_round_of_a_cluster_is_lost_or_counted_twice() -> None:
    records = []
    grid = LateGrid(nodes(), 1)
    trained(grid, 6, records)
    told = [(m.metadata.dst_node_id, read_assignment(m.content).progress) for m in grid.sent]
    assert [(p.rounds, p.last_round) for node, p in told if node == 2] == [(0, 0), (1, 1), (2, 3)]
    assert sum("c2" in record.telemetry for record in records) == 3  # each of its three rounds
    assert [(p.rounds, p.last_round) for node, p in told if node == 1][-1] == (5, 5)


class Choosy(FedAvg):
    """Drops its second round."""

    def aggregate_train(self, server_round, replies):
        kept = () if server_round == 2 else replies
        return super().aggregate_train(server_round, kept)


def test_an_update_that_joined_a_round_that_is_dropped_is_dropped_with_it() -> None:
    records = []
    grid = LateGrid(nodes(), 1)
    final = trained(grid, 4, records, kind=Choosy)
    assert ["c2" in record.telemetry for record in records] == [False, True, False, True]
    assert grid.asked == [[1, 2], [1], [1, 2], [1]]  # it trains again, from the start
    told = [(m.metadata.dst_node_id, read_assignment(m.content).progress) for m in grid.sent]
    assert [p.rounds for node, p in told if node == 2] == [0, 0]
    weight, alone = 30 / math.sqrt(2), 3.0  # after the first and the third round
    joined = (10 * (alone + 1) + weight * (alone + 3)) / (10 + weight)
    assert final["embed.weight"].flatten().tolist() == pytest.approx([joined] * 6)


def test_the_last_round_waits_for_all() -> None:
    records = []
    trained(LateGrid(nodes(), 1), 1, records)
    assert set(records[0].telemetry) == {"c1", "c2"}


def test_a_round_in_which_all_are_late_waits_for_the_first() -> None:
    records = []
    grid = LateGrid({2: trainer(3.0, 30)}, 1)
    final = trained(grid, 2, records)
    assert final["embed.weight"][0, 0] == 1.0 + 3.0 + 3.0
    assert [set(record.telemetry) for record in records] == [{"c2"}] * 2


def test_a_late_update_that_cannot_be_used_is_refused_and_its_cluster_asked_again() -> None:
    records = []
    grid = LateGrid(nodes(**NAN), 1)
    trained(grid, 4, records)
    assert "late by 1 rounds: " in records[1].failures["c2"]
    assert "not finite" in records[1].failures["c2"]
    assert [2 in asked for asked in grid.asked] == [True, False, True, False]
    assert {
        read_assignment(m.content).progress.rounds for m in grid.sent if m.metadata.dst_node_id == 2
    } == {0}


class Renamed(FixedPlanner):
    """Node 9 is cluster c2, too."""

    def plan(self, server_round, nodes):
        planned = super().plan(server_round, nodes)
        return replace(planned, cluster_ids={n: f"c{2 if n == 9 else n}" for n in nodes})


class Replacing(LateGrid):
    """From the second round on, node 9 is there instead of node 2."""

    def get_node_ids(self):
        return [1, 9] if self._round else [1, 2]


@pytest.mark.parametrize("again", [False, True])
def test_a_late_cluster_that_is_back_as_another_node_counts_once(again: bool) -> None:
    records = []
    grid = Replacing({**nodes(), 9: trainer(3.0, 30)}, 1)
    grid.late_nodes = {2, 9} if again else {2}
    trained(grid, 3, records, Renamed("c1", "c2"))
    told = [(m.metadata.dst_node_id, read_assignment(m.content).progress) for m in grid.sent]
    seen = [(node, p.rounds, p.last_round) for node, p in told if node != 1]
    assert seen == [(2, 0, 0), (9, 0, 0), *([] if again else [(9, 1, 2)])]
    assert ["c2" in record.telemetry for record in records] == [False, not again, True]
    assert not any(record.failures for record in records)


def out_of_memory(message, context):
    del message, context
    raise LinkError("no memory left")


def test_a_round_whose_late_clusters_all_fail_is_lost() -> None:
    records = []
    grid = LateGrid({2: out_of_memory}, 1)
    with pytest.raises(RunError, match=r"round 1: all 1 clusters failed, first c2: .*no memory"):
        trained(grid, 2, records)


def test_a_round_whose_late_clusters_all_fail_is_repeated(monkeypatch) -> None:
    monkeypatch.setattr(attempts, "sleep", lambda _: None)
    records = []
    fates = [out_of_memory, trainer(3.0, 30), trainer(3.0, 30)]
    grid = LateGrid({2: lambda *given: fates.pop(0)(*given)}, 1)
    final = trained(grid, 2, records, retries=1)
    assert final["embed.weight"][0, 0] == 1.0 + 3.0 + 3.0
    assert [sum(i.kind == "retry" for i in record.incidents) for record in records] == [1, 0]


def test_a_round_waits_for_a_late_update_that_can_be_used() -> None:
    records = []
    grid = LateGrid({2: out_of_memory, 1: trainer(3.0, 30)}, 1)
    grid.late_nodes, grid.more_rounds = {1, 2}, {1: 2}
    final = trained(grid, 2, records)
    assert final["embed.weight"][0, 0] == 1.0 + 3.0 + 3.0
    assert [set(record.telemetry) for record in records] == [{"c1"}, {"c1"}]
    assert set(records[0].failures) == {"c2"}


def test_a_late_cluster_that_stays_silent_in_its_round_has_failed() -> None:
    records = []
    grid = LateGrid({2: trainer(3.0, 30)}, 99)
    with pytest.raises(RunError, match="all 1 clusters failed, first c2: no reply before"):
        trained(grid, 2, records, within_s=0.0)


def test_where_nobody_is_late_nothing_changes() -> None:
    one = trained(LateGrid(nodes(), 0), 2)
    inner = FedAvg(fraction_evaluate=0.0)
    strategy = wrapped(FixedPlanner("c1", "c2"), [], inner)
    two = strategy.start(LocalGrid(nodes()), encode_tensors(model()), num_rounds=2).arrays
    assert all(torch.equal(one[key], value) for key, value in decode_tensors(two).items())


def test_another_word_is_refused() -> None:
    with pytest.raises(ConfigError, match="late must be 'drop' or 'join', got 'wait'"):
        CollaPipe(FedAvg(), late="wait")

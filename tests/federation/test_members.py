"""A run sees its own clusters and nobody else."""

from __future__ import annotations

import pytest
from flwr.app import ArrayRecord, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy.strategy_utils import sample_nodes

from collapipe_flwr.core.errors import RunError
from collapipe_flwr.federation.local_grid import LocalGrid
from collapipe_flwr.federation.members import ClusterGrid
from tests.federation.test_discovery import cluster, spare


def _arrays() -> ArrayRecord:
    import numpy as np

    return ArrayRecord([np.zeros(100, np.float32)])


def _client() -> ClientApp:
    app = ClientApp()

    @app.train()
    def train(message, context):
        del context
        content = RecordDict({"arrays": _arrays(), "metrics": MetricRecord({"loss": 1.0})})
        return Message(content, reply_to=message)

    @app.evaluate()
    def evaluate(message, context):
        return train(message, context)

    return app


def test_only_clusters_are_seen():
    client = _client()
    grid = LocalGrid({1: client, 2: client, 3: client})
    assert ClusterGrid(grid, {3: "a", 1: "b", 9: "c"}).get_node_ids() == [1, 3]


def test_who_is_away_or_fails_is_lost_and_who_sits_out_by_plan_is_not():
    def broken(_message, _context):
        raise RuntimeError("no memory left")

    grid = LocalGrid({1: _client(), 2: _client(), 3: broken})
    members = ClusterGrid(grid, {1: "a", 2: "b", 3: "c", 4: "away"})
    assert members.get_node_ids() == [1, 2, 3]
    asked = [Message(RecordDict({"arrays": _arrays()}), node, "train") for node in (1, 3)]
    members.send_and_receive(asked)
    assert members.lost == {"c", "away"}
    members.send_and_receive([Message(RecordDict({"arrays": _arrays()}), 3, "evaluate")])
    assert members.lost == {"c", "away"}  # of the last training


class SlowGrid(LocalGrid):
    """Some nodes keep their answers back; time passes only while one waits for them."""

    def __init__(self, nodes, silent) -> None:
        super().__init__(nodes)
        self.silent = set(silent)
        self.waited_s = 0.0

    def pull_messages(self, message_ids):
        kept = {m.metadata.message_id for m in self.sent if m.metadata.dst_node_id in self.silent}
        return super().pull_messages([i for i in message_ids if i not in kept])

    def send_and_receive(self, messages, *, timeout=None):
        ids = self.push_messages(messages)
        replies = self.pull_messages(ids)
        self.waited_s += timeout if len(replies) < len(ids) else 0.0
        return replies


def test_a_node_that_never_says_who_it_is_is_waited_for_once():
    grid = SlowGrid({1: _client(), 9: cluster("b")}, silent={9})
    members = ClusterGrid(grid, {1: "a", 2: "b"})
    assert members.get_node_ids() == [1]
    once = grid.waited_s
    assert 0 < once <= 60
    assert all(members.get_node_ids() == [1] for _ in range(20))
    assert grid.waited_s == once
    assert len(grid.sent) == 1


def test_nodes_that_never_answer_cost_a_bounded_time_however_many_come():
    grid = SlowGrid({1: _client()}, silent=range(10, 99))
    members = ClusterGrid(grid, {1: "a", 2: "b"})
    for node in range(10, 99):
        grid.add(node, cluster("b"))
        assert members.get_node_ids() == [1]
    assert grid.waited_s <= 120
    grid.add(100, cluster("b"))
    assert members.get_node_ids() == [1, 100]


def test_a_node_that_answers_late_is_taken_in_with_the_next_look():
    grid = SlowGrid({1: _client(), 8: spare, 9: cluster("b")}, silent={8, 9})
    members = ClusterGrid(grid, {1: "a", 2: "b"})
    assert members.get_node_ids() == [1]
    grid.silent.clear()
    assert members.get_node_ids() == [1, 9]
    assert members.clusters == {1: "a", 9: "b"}
    asked = len(grid.sent)
    assert members.get_node_ids() == [1, 9]
    assert len(grid.sent) == asked  # nor is the spare one asked again


@pytest.mark.parametrize("code", [2, 5])
def test_a_node_that_fails_is_asked_again_without_a_wait(code):
    def failing(message, context):
        del context
        return Message(Error(code, "no memory left"), reply_to=message)

    grid = SlowGrid({1: _client(), 9: failing}, silent=())
    members = ClusterGrid(grid, {1: "a", 2: "b"})
    assert members.get_node_ids() == [1]
    grid.silent = {9}  # from now on its failures take their time
    assert all(members.get_node_ids() == [1] for _ in range(5))
    assert grid.waited_s == 0.0
    grid.silent.clear()
    grid.add(9, cluster("b"))
    assert members.get_node_ids() == [1]  # its last failure
    assert members.get_node_ids() == [1, 9]


def test_an_answer_of_a_node_that_has_gone_since_counts_for_nothing():
    grid = SlowGrid({1: _client(), 9: cluster("b")}, silent={9})
    members = ClusterGrid(grid, {1: "a", 2: "b"})
    assert members.get_node_ids() == [1]
    grid._nodes.pop(9)
    grid.silent.clear()
    grid.add(10, cluster("b"))
    assert members.get_node_ids() == [1, 10]
    assert members.clusters == {1: "a", 10: "b"}


def test_nobody_takes_the_name_of_a_cluster_that_is_there(caplog: pytest.LogCaptureFixture):
    grid = LocalGrid({1: cluster("a"), 2: cluster("b")})
    members = ClusterGrid(grid, {1: "a", 2: "b"})
    grid.add(8, cluster("b"))
    grid.add(9, cluster("b"))
    assert all(members.get_node_ids() == [1, 2] for _ in range(3))
    assert members.clusters == {1: "a", 2: "b"}
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warned) == 2 and all("cluster b" in sentence for sentence in warned)
    grid._nodes.pop(8)
    assert members.get_node_ids() == [1, 2]
    grid._nodes.pop(2)
    assert members.get_node_ids() == [1, 9]
    grid.add(2, cluster("b"))
    assert members.get_node_ids() == [1, 9]


def test_clusters_that_are_all_gone_are_waited_for_as_long_as_there_is_patience():
    now_s = 0.0
    members = ClusterGrid(LocalGrid({}), {1: "A"}, patience_s=300.0, now=lambda: now_s)
    assert members.get_node_ids() == []
    now_s = 300.0
    assert members.get_node_ids() == []
    now_s = 301.0
    with pytest.raises(RunError, match=r"no cluster has been connected for 300 s"):
        members.get_node_ids()


def test_a_strategy_that_waits_for_more_clusters_than_there_are_ends_the_run(
    monkeypatch: pytest.MonkeyPatch,
):
    slept_s: list[float] = []
    monkeypatch.setattr("flwr.serverapp.strategy.strategy_utils.sleep", slept_s.append)
    client = _client()
    grid = LocalGrid({1: client})
    members = ClusterGrid(grid, {1: "a", 2: "b"}, patience_s=300.0, now=lambda: sum(slept_s))
    with pytest.raises(RunError, match=r"300 s \(node-timeout-s\) .* \(1 of 2\): start the miss"):
        sample_nodes(members, 2, 2)
    assert 300 < sum(slept_s) <= 302
    grid.add(2, client)
    assert set(sample_nodes(members, 2, 2)[0]) == {1, 2}


@pytest.mark.parametrize("apart", ["sending", "joining", "pausing"])
def test_polls_that_are_not_of_one_wait_never_end_the_run(apart: str):
    now_s = 0.0
    client = _client()
    grid = LocalGrid({1: client, 2: client})
    members = ClusterGrid(grid, {1: "a", 2: "b", 3: "c"}, patience_s=1.5, now=lambda: now_s)
    for round_number in range(9):
        assert 1 in members.get_node_ids()
        now_s += 1.0
        if apart == "sending":
            members.send_and_receive([Message(RecordDict({"arrays": _arrays()}), 1, "train")])
        elif apart == "joining":
            grid.add(3, client) if round_number % 2 else grid._nodes.pop(3, None)
        else:
            now_s += 1.0

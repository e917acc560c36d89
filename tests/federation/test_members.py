"""A run sees its own clusters and nobody else, and knows what training them sends."""

from __future__ import annotations

from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from collapipe_flwr.federation.local_grid import LocalGrid
from collapipe_flwr.federation.members import Members
from collapipe_flwr.federation.records import (
    WholeTask,
    array_bytes,
    read_progress,
    whole_task_config,
)


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
    assert Members(grid, {3: "a", 1: "b", 9: "c"}).get_node_ids() == [1, 3]


def test_bytes_are_those_of_training_messages_and_replies():
    members = Members(LocalGrid({1: _client()}), {1: "a"})
    for kind in ("train", "evaluate"):
        members.send_and_receive([Message(RecordDict({"arrays": _arrays()}), 1, kind)])
    assert members.take_train_bytes() == 2 * array_bytes(_arrays()) + 8  # and the loss
    assert members.take_train_bytes() == 0


def test_orders_of_a_plain_strategy_get_their_own_progress_in_records_of_their_own():
    task = WholeTask(
        model_spec_json="", vocabulary_json="", batch_size=1, micro_batch_size=1, optimizers=()
    )

    def broken(_message, _context):
        raise RuntimeError("no memory left")

    grid = LocalGrid({1: _client(), 2: broken})
    members = Members(grid, {1: "a", 2: "b"})
    for server_round in (1, 2, 3):
        config = whole_task_config(task)
        config["server-round"] = server_round
        shared = RecordDict({"arrays": _arrays(), "config": config})
        members.send_and_receive([Message(shared, node, "train") for node in (1, 2)])
        assert set(config) == set(whole_task_config(task)) | {"server-round"}
        assert shared["config"] is config
    told = [read_progress(message.content) for message in grid.sent]
    assert [p.last_round for p in told[0::2]] == [0, 1, 2]
    assert [p.last_round for p in told[1::2]] == [0, 0, 0]


def test_who_is_away_or_fails_is_lost_and_who_sits_out_by_plan_is_not():
    def broken(_message, _context):
        raise RuntimeError("no memory left")

    grid = LocalGrid({1: _client(), 2: _client(), 3: broken})
    members = Members(grid, {1: "a", 2: "b", 3: "c", 4: "away"})
    assert members.get_node_ids() == [1, 2, 3]
    asked = [Message(RecordDict({"arrays": _arrays()}), node, "train") for node in (1, 3)]
    members.send_and_receive(asked)
    assert members.lost == {"c", "away"}
    members.send_and_receive([Message(RecordDict({"arrays": _arrays()}), 3, "evaluate")])
    assert members.lost == {"c", "away"}  # of the last training

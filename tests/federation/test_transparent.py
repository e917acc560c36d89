"""Around unmodified clients the wrapper changes nothing but the plan beside the weights."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message
from flwr.serverapp.strategy import (
    DifferentialPrivacyServerSideFixedClipping,
    FedAdam,
    FedAvg,
    FedMedian,
    FedProx,
    Krum,
    Strategy,
)

from collapipe_flwr.core.errors import ConfigError, RunError
from collapipe_flwr.federation.local_grid import LocalGrid
from collapipe_flwr.federation.records import read_assignment
from collapipe_flwr.federation.strategy import CollaPipe

INNER: dict[str, Callable[[], Strategy]] = {
    "fedavg": FedAvg,
    "fedprox": lambda: FedProx(proximal_mu=0.1),
    "fedadam": FedAdam,
    "fedmedian": FedMedian,
    "krum": lambda: Krum(num_malicious_nodes=1),
    "dp": lambda: DifferentialPrivacyServerSideFixedClipping(FedAvg(), 0.7, 0.5, 4),
}


def run(strategy: Strategy, arrays: ArrayRecord, drifting, wire) -> ArrayRecord:
    random.seed(11)
    np.random.seed(11)
    nodes = {n: drifting(0.1 * n, examples=7 * n) for n in range(1, 5)}
    grid = LocalGrid(nodes, wire=wire)
    return strategy.start(grid, arrays.copy(), num_rounds=3).arrays


@pytest.mark.parametrize("name", INNER)
def test_final_arrays_are_bit_identical_to_the_inner_strategys(name, floats, drifting, wire):
    plain = run(INNER[name](), floats, drifting, wire)
    wrapped = run(CollaPipe(INNER[name]()), floats, drifting, wire)
    assert list(plain) == list(wrapped)
    for key in plain:
        assert plain[key].data == wrapped[key].data
        assert not np.array_equal(plain[key].numpy(), floats[key].numpy())


def test_metrics_are_the_inner_strategys(floats, drifting):
    grid = LocalGrid({n: drifting(0.1, examples=n) for n in (1, 2)})
    plain = FedAvg().start(grid, floats, num_rounds=2)
    wrapped = CollaPipe(FedAvg()).start(grid, floats, num_rounds=2)
    assert plain.train_metrics_clientapp == wrapped.train_metrics_clientapp
    assert plain.evaluate_metrics_clientapp == wrapped.evaluate_metrics_clientapp


def test_messages_share_no_record_and_the_inner_ones_stay_unchanged(floats, drifting):
    inner = FedAvg()
    grid = LocalGrid({n: drifting(0.1) for n in (1, 2)})
    made = []
    configure = inner.configure_train
    inner.configure_train = lambda *args: made.extend(configure(*args)) or made
    sent = CollaPipe(inner).configure_train(1, floats, ConfigRecord({"lr": 0.5}), grid)
    first, second = (message.content for message in sent)
    assert first is not second
    assert all(first[name] is not second[name] for name in first)
    assert set(made[0].content["config"]) == {"lr", "server-round"}
    assert first["config"]["lr"] == 0.5


def test_arrays_without_any_float_reach_the_inner_strategy_untouched(drifting):
    trees = ArrayRecord({"0": Array(np.frombuffer(b"a boosted tree", dtype=np.uint8))})
    sent = CollaPipe(FedAvg()).configure_train(
        1, trees, ConfigRecord(), LocalGrid({n: drifting(0.1) for n in (1, 2)})
    )
    assert sent[0].content["arrays"]["0"].data == trees["0"].data


def test_unmodified_nodes_are_asked_without_a_plan(floats, drifting):
    records = []
    grid = LocalGrid({n: drifting(0.1) for n in (1, 2, 3)})
    CollaPipe(FedAvg(), on_round=records.append).start(grid, floats, num_rounds=2)
    trained = [m for m in grid.sent if m.metadata.message_type == "train"]
    assert len(trained) == 6
    for message in trained:
        task = read_assignment(message.content)
        assert task.plan is None and task.cluster_id == f"node-{message.metadata.dst_node_id}"
    assert records[0].plan is None and records[0].outcome.latency_s is None


def test_a_scheduler_without_a_model_to_split_is_refused_at_once():
    with pytest.raises(ConfigError, match="scheduler has no effect without a model to split"):
        CollaPipe(FedAvg(), scheduler="dssda")


def test_a_lost_node_that_answers_under_another_id_is_matched_by_its_message(floats, drifting):
    def lost(message, context):
        del context
        reply = Message(Error(5, "Node Unavailable"), reply_to=message)
        reply.metadata.__dict__["_src_node_id"] = 1  # what Flower's SuperLink does
        return reply

    records = []
    grid = LocalGrid({1: drifting(0.1), 7: lost})
    CollaPipe(FedAvg(fraction_evaluate=0.0), on_round=records.append).start(
        grid, floats, num_rounds=1
    )
    assert records[0].failures == {"node-7": "Node Unavailable"}


class Deaf(LocalGrid):
    """No reply arrives in time."""

    def send_and_receive(self, messages, *, timeout=None):
        del timeout
        self.push_messages(messages)
        return []


def test_when_nobody_replies_in_time_the_run_goes_on_with_the_arrays_it_has(floats, drifting):
    records, seen = [], []
    strategy = CollaPipe(FedAvg(), on_round=records.append)
    grid = Deaf({n: drifting(0.1) for n in (1, 2)})
    result = strategy.start(
        grid, floats, num_rounds=2, evaluate_fn=lambda _, arrays: seen.append(arrays)
    )
    assert len(result.arrays) == 0
    assert all(arrays is floats for arrays in seen)
    late = "no reply before the round's timeout"
    assert [record.failures for record in records] == [{"node-1": late, "node-2": late}] * 2


def test_when_nobody_replies_in_time_the_run_ends_where_that_is_asked_for(floats, drifting):
    with pytest.raises(RunError, match="no reply before the round's timeout"):
        CollaPipe(FedAvg(), on_total_failure="raise").start(
            Deaf({n: drifting(0.1) for n in (1, 2)}), floats
        )
    with pytest.raises(ConfigError, match="on_total_failure must be 'continue' or 'raise'"):
        CollaPipe(FedAvg(), on_total_failure="stop")


def test_a_round_without_sampled_nodes_passes(floats, drifting):
    inner = FedAvg(fraction_train=0.0, fraction_evaluate=0.0)
    grid = LocalGrid({n: drifting(0.1) for n in (1, 2)})
    assert len(CollaPipe(inner).start(grid, floats, num_rounds=1).arrays) == 0

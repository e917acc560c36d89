"""Split training: a whole model to each cluster, and a whole one of each to the inner strategy."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from flwr.app import ConfigRecord
from flwr.serverapp.strategy import FedAvg, FedProx, Strategy

from collapipe_flwr.core.errors import ConfigError, ProtocolError, RunError
from collapipe_flwr.core.outcome import RoundOutcome
from collapipe_flwr.federation.arrays import decode_tensors, encode_tensors
from collapipe_flwr.federation.local_grid import LocalGrid
from collapipe_flwr.federation.records import (
    ARRAYS,
    read_assignment,
)
from collapipe_flwr.pipeline.optimizer import OptimizerConfig
from tests.federation.split_clusters import (
    CONSTANT,
    FixedPlanner,
    cluster_plan,
    failing,
    model,
    trainer,
    wrapped,
)
from tests.federation.test_discovery import profile
from tests.federation.test_planner import NODES, rounds


def test_two_clusters_average_whole_models(wire):
    records = []
    grid = LocalGrid({1: trainer(1.0, 10), 2: trainer(3.0, 30)}, wire=wire)
    strategy = wrapped(FixedPlanner("c1", "c2"), records)
    final = decode_tensors(strategy.start(grid, encode_tensors(model()), num_rounds=2).arrays)
    assert list(final) == list(model())
    for key in ("embed.weight", "blocks.0.weight", "decoder.weight"):
        assert torch.equal(final[key], model()[key] + 2 * 2.5), key  # (1*10 + 3*30)/40 a round
        assert final[key].dtype == model()[key].dtype
    assert torch.equal(final[CONSTANT], model()[CONSTANT])  # not even by a rounding
    assert final["decoder.steps"] == 4 + 2 + 2  # 2.5 a round, truncated as by load_state_dict
    assert [sorted(record.asked) for record in records] == [["c1", "c2"]] * 2
    assert records[1].outcome.latency_s == 2.0
    assert set(records[0].telemetry) == {"c1", "c2"}


def test_one_cluster_and_one_reply_is_the_inner_strategy_itself():
    grid = LocalGrid({1: trainer(1.0, 10)})
    inner = FedAvg(fraction_evaluate=0.0, min_train_nodes=1, min_available_nodes=1)
    start = encode_tensors(model())
    final = wrapped(FixedPlanner("c1"), [], inner).start(grid, start, num_rounds=1).arrays
    alone = encode_tensors({k: v if k == CONSTANT else v + 1 for k, v in model().items()})
    assert {k: v.data for k, v in final.items()} == {k: v.data for k, v in alone.items()}


def test_a_message_holds_the_whole_model_and_only_its_own_plan():
    grid = LocalGrid({1: failing, 2: failing})
    strategy = wrapped(FixedPlanner("c1", "c2"), [])
    config = ConfigRecord({"batch": 5})
    sent = strategy.configure_train(3, encode_tensors(model()), config, grid)
    tasks = {m.metadata.dst_node_id: read_assignment(m.content) for m in sent}
    for node, other in ((1, "c2"), (2, "c1")):
        message = next(m for m in sent if m.metadata.dst_node_id == node)
        assert tasks[node].plan == cluster_plan(f"c{node}")
        assert tasks[node].server_round == 3
        assert other not in str(message.content["config"])
        assert list(message.content[ARRAYS]) == list(model())
        assert len(message.content.config_records) == 1
    assert tasks[1].split.learning.optimizer.learning_rate == pytest.approx(0.3)
    assert not any(key.startswith("collapipe") for key in config)
    strategy.close()


def test_a_cluster_that_the_plan_leaves_out_gets_no_message():
    records = []
    grid = LocalGrid({1: trainer(1.0, 10), 2: failing})
    wrapped(FixedPlanner("c1"), records).start(grid, encode_tensors(model()), num_rounds=1)
    assert [m.metadata.dst_node_id for m in grid.sent] == [1]
    assert records[0].failures == {}


def test_the_round_goes_on_without_a_failed_cluster():
    records = []
    grid = LocalGrid({1: trainer(1.0, 10), 2: failing})
    strategy = wrapped(FixedPlanner("c1", "c2"), records)
    final = decode_tensors(strategy.start(grid, encode_tensors(model()), num_rounds=1).arrays)
    assert torch.equal(final["decoder.weight"], torch.full((2, 2), 2.0))
    assert records[0].failures == {"c2": "device d2 of node 2 does not answer; restart it"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"missing": "embed.weight"}, r"did not return embed.weight \(1 arrays are missing"),
        ({"missing": "decoder.weight"}, r"c2 did not return decoder.weight .*: reply with every"),
        ({"extra": {"lm_head": torch.ones(1)}}, "lm_head, which was not sent"),
        ({"extra": {"embed.weight": torch.ones(2, 3)}}, r"embed.weight as float32 \(2, 3\)"),
        ({"extra": {"embed.weight": torch.ones(3, 2).long()}}, r"embed.weight as int64 \(3, 2\)"),
        ({"extra": {"embed.weight": torch.full((3, 2), float("nan"))}}, "training diverged"),
        ({"weight": 0}, "num-examples = 0 or without it: .* must be > 0"),
        ({"weight": float("nan")}, "num-examples = nan .* must be > 0"),
        ({"telemetry": "c1"}, "cluster c2 sent telemetry of 'c1'"),
        ({"profile": profile("c1")}, "cluster c2 sent telemetry of 'c1'"),
        ({"replanned": cluster_plan("c1")}, "cluster c2 sent telemetry of 'c1'"),
    ],
)
def test_a_reply_that_does_not_fit_is_a_failure_that_says_why(change, words):
    records = []
    grid = LocalGrid({1: trainer(1.0, 10), 2: trainer(3.0, 30, **change)})
    strategy = wrapped(FixedPlanner("c1", "c2"), records)
    final = decode_tensors(strategy.start(grid, encode_tensors(model()), num_rounds=1).arrays)
    assert torch.equal(final["decoder.weight"], torch.full((2, 2), 2.0))  # cluster 1 alone
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(records[0].failures["c2"])


def test_only_replies_that_were_aggregated_are_built_upon():
    class Choosy(FedAvg):
        """Drops its first round."""

        def aggregate_train(self, server_round, replies):
            return (
                (None, None)
                if server_round == 1
                else super().aggregate_train(server_round, replies)
            )

    diverging = {"extra": {"blocks.0.weight": torch.full((2, 2), torch.inf)}}
    grid = LocalGrid({1: trainer(1.0, 10), 2: trainer(3.0, 30, **diverging)})
    strategy = wrapped(FixedPlanner("c1", "c2"), [], Choosy(fraction_evaluate=0.0))
    strategy.start(grid, encode_tensors(model()), num_rounds=4)
    told = [(m.metadata.dst_node_id, read_assignment(m.content).progress) for m in grid.sent]
    ours = [(p.rounds, p.last_round) for node, p in told if node == 1]
    assert ours == [(0, 0), (0, 0), (1, 2), (2, 3)]
    assert {p.rounds for node, p in told if node == 2} == {0}


def test_when_all_fail_the_run_ends_with_the_first_sentence():
    grid = LocalGrid({1: failing, 2: failing})
    strategy = wrapped(FixedPlanner("c1", "c2"), [])
    with pytest.raises(RunError, match=r"all 2 clusters failed, first c[12]: device d2 of node"):
        strategy.start(grid, encode_tensors(model()), num_rounds=2)


def asked(inner: Strategy, config: ConfigRecord, server_round: int = 3):
    """The optimizers of clusters in one round."""
    strategy = wrapped(FixedPlanner("c1", "c2"), [], inner)
    grid = LocalGrid({1: failing, 2: failing})
    sent = strategy.configure_train(server_round, encode_tensors(model()), config, grid)
    tasks = [read_assignment(message.content).split for message in sent]
    strategy.close()
    return [task.learning.optimizer for task in tasks]


def test_a_proximal_term_reaches_clusters():
    inner = FedProx(fraction_evaluate=0.0, proximal_mu=0.1)
    for optimizer in asked(inner, ConfigRecord()):
        assert optimizer == OptimizerConfig(learning_rate=0.1 * 3, proximal_mu=0.1)


@pytest.mark.parametrize("key", ["lr", "learning-rate"])
def test_the_inner_strategys_learning_rate_goes_first(key):
    class Halving(FedAvg):
        def configure_train(self, server_round, arrays, config, grid):
            config[key] = 0.8 / server_round
            return super().configure_train(server_round, arrays, config, grid)

    for server_round in (1, 2):
        found = asked(Halving(), ConfigRecord({key: 0.8}), server_round)
        assert {optimizer.learning_rate for optimizer in found} == {0.8 / server_round}


@pytest.mark.parametrize(("key", "value"), [("lr", "fast"), ("lr", -1.0), ("proximal-mu", [0.1])])
def test_learning_that_makes_no_sense_is_refused(key, value):
    with pytest.raises(ConfigError, match=rf"config sets {key} to .*: set a number >= 0"):
        asked(FedAvg(), ConfigRecord({key: value}))


def test_a_strategy_that_sends_more_than_the_model_is_refused_with_a_split_model():
    class Controlled(FedAvg):
        def configure_train(self, server_round, arrays, config, grid):
            for message in super().configure_train(server_round, arrays, config, grid):
                message.content["controls"] = arrays.copy()
                yield message

    grid = LocalGrid({1: failing, 2: failing})
    strategy = wrapped(FixedPlanner("c1", "c2"), [], Controlled())
    with pytest.raises(ProtocolError, match="exactly one ArrayRecord, got 2: leave out the split"):
        strategy.start(grid, encode_tensors(model()))


def test_a_strategy_that_trains_nobody_asks_nobody():
    records = []
    grid = LocalGrid({1: failing, 2: failing})
    inner = FedAvg(fraction_train=0.0)
    strategy = wrapped(FixedPlanner("c1", "c2"), records, inner)
    assert len(strategy.start(grid, encode_tensors(model()), num_rounds=1).arrays) == 0
    assert grid.sent == []
    assert records[0].outcome == RoundOutcome()


def test_a_node_that_is_evaluated_without_a_plan_of_its_own_is_passed_over():
    grid = LocalGrid({1: trainer(1.0, 10), 2: trainer(3.0, 30)})
    inner = FedAvg(fraction_train=0.5, min_train_nodes=1)
    strategy = wrapped(FixedPlanner("c1", "c2"), [], inner)
    strategy.start(grid, encode_tensors(model()), num_rounds=1)
    trained, tested = grid.sent
    assert trained.metadata.dst_node_id == tested.metadata.dst_node_id


def test_a_cluster_behind_two_nodes_is_refused():
    class Twins(FixedPlanner):
        def plan(self, server_round, nodes):
            planned = super().plan(server_round, nodes)
            return replace(planned, cluster_ids=dict.fromkeys(nodes, "c1"))

    grid = LocalGrid({1: failing, 2: failing})
    with pytest.raises(RunError, match="cluster c1 is asked twice in a round"):
        wrapped(Twins("c1"), []).start(grid, encode_tensors(model()))


def test_a_global_model_without_the_edges_arrays_is_refused():
    arrays = encode_tensors({"embed.weight": torch.ones(3, 2)})
    grid = LocalGrid({1: failing, 2: failing})
    with pytest.raises(RunError, match=r"lacks blocks\.0\.weight, .* of the whole model"):
        wrapped(FixedPlanner("c1", "c2"), []).start(grid, arrays)


def test_clusters_that_a_round_did_not_train_are_evaluated_all_the_same() -> None:
    arrays = encode_tensors(model())
    inner = FedAvg(fraction_train=0.5, min_train_nodes=1)
    strategy = wrapped(rounds("uniform"), [], inner)
    grid = LocalGrid({node: trainer(1.0, 8) for node in NODES})
    asked = strategy.configure_train(1, arrays, ConfigRecord(), grid)
    assert len(asked) == 1
    strategy.aggregate_train(1, grid.send_and_receive(asked))
    tested = strategy.configure_evaluate(1, arrays, ConfigRecord(), grid)
    assert {message.metadata.dst_node_id for message in tested} == set(NODES)

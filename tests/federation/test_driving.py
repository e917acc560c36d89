"""A strategy with a `start` of its own drives, and stays the object that its user works with."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterable
from pathlib import Path

import pytest
from flwr.app import ConfigRecord, Message, MetricRecord
from flwr.serverapp.strategy import (
    DifferentialPrivacyServerSideFixedClipping,
    FedAvg,
    FedXgbBagging,
    FedXgbCyclic,
    Result,
    Strategy,
)

from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.federation.checkpoint import Checkpoints
from collapipe_flwr.federation.inner import check_inner, make_driver
from collapipe_flwr.federation.local_grid import LocalGrid
from collapipe_flwr.federation.resuming import Checkpointed
from collapipe_flwr.federation.strategy import CollaPipe


class Saving(FedAvg):
    """As in Flower's advanced example: scores, files and a learning rate of its own."""

    def set_save_path(self, path: Path) -> None:
        self.save_path = path

    def configure_train(self, server_round, arrays, config, grid) -> Iterable[Message]:
        if server_round == 2:
            config["lr"] *= 0.5
        yield from super().configure_train(server_round, arrays, config, grid)

    def start(self, grid, initial_arrays, num_rounds=2, *, note="") -> Result:
        self.best_loss, self.note, self.started_as = 9.0, note, type(self).__name__
        result, arrays = Result(), initial_arrays
        config = ConfigRecord({"lr": 0.5})
        self.summary()
        for server_round in range(1, num_rounds + 1):
            messages = self.configure_train(server_round, arrays, config, grid)
            arrays, metrics = self.aggregate_train(server_round, grid.send_and_receive(messages))
            self._keep_best(server_round, metrics)
            result.arrays, result.train_metrics_clientapp[server_round] = arrays, metrics
        return result

    def _keep_best(self, server_round: int, metrics: MetricRecord) -> None:
        if metrics["loss"] < self.best_loss:
            self.best_loss = metrics["loss"]
            (self.save_path / f"round-{server_round}").write_text(str(self.best_loss))


def grid(drifting) -> LocalGrid:
    return LocalGrid({n: drifting(0.1 * n, examples=n) for n in (1, 2)})


def test_its_own_start_runs_with_our_hooks_and_leaves_its_attributes(floats, drifting, tmp_path):
    plain, inner, records = Saving(), Saving(), []
    plain.set_save_path(tmp_path)
    expected = plain.start(grid(drifting), floats, note="x")
    (tmp_path / "wrapped").mkdir()
    strategy = CollaPipe(inner, on_round=records.append)
    strategy.set_save_path(tmp_path / "wrapped")
    here = grid(drifting)
    found = strategy.start(here, floats, note="x")
    assert vars(inner) | {"save_path": tmp_path} == vars(plain)
    assert (tmp_path / "wrapped" / "round-1").read_text() == (tmp_path / "round-1").read_text()
    assert strategy.best_loss == inner.best_loss == plain.best_loss
    assert inner.started_as == "Saving"
    assert found.train_metrics_clientapp == expected.train_metrics_clientapp
    assert {k: a.data for k, a in found.arrays.items()} == {
        k: a.data for k, a in expected.arrays.items()
    }
    assert len(records) == 2
    assert [m.content["config"]["lr"] for m in here.sent] == [0.5, 0.5, 0.25, 0.25]
    assert all("collapipe.cluster-id" in m.content["config"] for m in here.sent)


def test_a_run_that_is_saved_is_driven_as_well(floats, drifting, tmp_path):
    seen = []

    class Noting(FedAvg):
        def start(self, *args, **kwargs):
            seen.append("own start")
            return super().start(*args, **kwargs)

    saved = Checkpointed(CollaPipe(Noting()), Checkpoints(folder=tmp_path / "saved"))
    saved.start(grid(drifting), floats, num_rounds=2)
    assert seen == ["own start"]
    assert len(list((tmp_path / "saved").iterdir())) == 2


class Passing(FedAvg):
    def start(self, *args, **kwargs):
        return super().start(*args, **kwargs)


class Noting(FedAvg):
    def start(self, note, grid, *args, **kwargs):
        self.note = note
        return super().start(grid, *args, **kwargs)


@pytest.mark.parametrize(("inner", "first"), [(Passing(), ()), (Noting(), ("x",))])
@pytest.mark.parametrize(
    ("args", "kwargs"),
    [((4, 7.5), {}), ((4,), {"timeout": 7.5}), ((), {"num_rounds": 4, "timeout": 7.5})],
)
def test_what_a_start_only_passes_on_counts_by_flowers_names(
    floats, drifting, inner, first, args, kwargs
):
    strategy, told = CollaPipe(inner), []
    running = strategy._hooks.running
    strategy._hooks.running = lambda *given: told.append(given) or running(*given)
    strategy.start(*first, grid(drifting), floats, *args, **kwargs)
    assert told == [(7.5, 4)]


def test_attributes_are_read_and_set_on_the_inner_strategy():
    inner = FedAvg(fraction_train=0.5)
    strategy = CollaPipe(inner)
    assert strategy.fraction_train == 0.5
    strategy.fraction_train = 1.0
    strategy.run_dir = "here"
    assert (inner.fraction_train, inner.run_dir) == (1.0, "here")
    assert "run_dir" not in vars(strategy)
    assert not hasattr(strategy, "nowhere")
    assert copy.deepcopy(strategy).run_dir == "here"
    assert pickle.loads(pickle.dumps(strategy)).run_dir == "here"


def test_a_method_that_was_replaced_on_the_instance_is_called_once_by_ours(floats, drifting):
    inner, calls = FedAvg(fraction_evaluate=0.0), []
    configure = inner.configure_train
    inner.configure_train = lambda *args: calls.append(args[0]) or configure(*args)
    here = grid(drifting)
    CollaPipe(inner).start(here, floats, num_rounds=2)
    assert calls == [1, 2]
    assert all("collapipe.cluster-id" in m.content["config"] for m in here.sent)


def test_a_driver_is_the_inner_strategy_in_another_body():
    inner = Saving()
    driven = make_driver(inner, FedAvg())
    driven.later = 3
    assert inner.later == 3
    assert isinstance(driven, Saving)
    assert type(copy.copy(driven)) is Saving
    assert type(pickle.loads(pickle.dumps(driven))) is Saving
    driven.summary = "mine"
    assert inner.summary == "mine"
    assert driven.summary != "mine"


def test_a_strategy_finds_the_ids_of_its_own_messages_in_the_replies(floats, drifting):
    class Matching(FedAvg):
        """Weighs by who was asked for what, as an asynchronous strategy does."""

        def configure_train(self, *args):
            self.asked = list(super().configure_train(*args))
            return self.asked

        def aggregate_train(self, server_round, replies):
            by_id = {message.metadata.message_id: message for message in self.asked}
            self.matched = [by_id[r.metadata.reply_to_message_id] for r in replies]
            assert all(
                m.metadata.dst_node_id == r.metadata.src_node_id
                for m, r in zip(self.matched, replies, strict=True)
            )
            assert all(set(m.content["config"]) == {"server-round"} for m in self.matched)
            return super().aggregate_train(server_round, replies)

    inner = Matching()
    CollaPipe(inner).start(grid(drifting), floats, num_rounds=2)
    assert len(inner.matched) == 2


def test_replies_that_nobody_asked_for_reach_a_strategy_of_whole_models(floats, drifting):
    seen = []

    class Late(FedAvg):
        def aggregate_train(self, server_round, replies):
            seen.append(len(replies))
            return super().aggregate_train(server_round, replies)

    strategy, here = CollaPipe(Late()), grid(drifting)
    first = strategy.configure_train(1, floats, ConfigRecord(), here)
    late = here.send_and_receive(first)
    second = strategy.configure_train(
        2, floats, ConfigRecord(), LocalGrid({3: drifting(0.1), 4: drifting(0.1)})
    )
    assert second
    strategy.aggregate_train(2, late)
    assert seen == [2]


class Legacy:
    """Stands for a strategy of Flower's former interface."""


Legacy.__module__ = "flwr.server.strategy.fedavg"


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        (None, "got None: pass one, for example FedAvg"),
        ("fedavg", "got 'fedavg': pass one, for example FedAvg"),
        (FedAvg, r"got the class FedAvg: make one, CollaPipe\(FedAvg\(\), \.\.\.\)"),
        (Legacy(), "Legacy of flwr.server.strategy, Flower's former interface: import Legacy from"),
        (CollaPipe(FedAvg()), "already inside this strategy: wrap once"),
        (
            DifferentialPrivacyServerSideFixedClipping(CollaPipe(FedAvg()), 0.1, 1.0, 2),
            "already inside this strategy: wrap once",
        ),
    ],
)
def test_what_cannot_be_wrapped_is_refused_with_a_way_out(strategy, words):
    with pytest.raises(ConfigError, match=words):
        CollaPipe(strategy)


@pytest.mark.parametrize("trees", [FedXgbBagging, FedXgbCyclic])
def test_trees_are_refused_where_a_model_is_split(trees):
    check_inner(trees(), CollaPipe, split=False)
    inner: Strategy = DifferentialPrivacyServerSideFixedClipping(trees(), 0.1, 1.0, 2)
    for strategy in (trees(), inner):
        with pytest.raises(ConfigError, match=f"{trees.__name__} aggregates boosted trees"):
            check_inner(strategy, CollaPipe, split=True)


def test_a_real_legacy_strategy_is_refused():
    legacy = pytest.importorskip("flwr.server.strategy")
    with pytest.raises(ConfigError, match=r"import FedAvg from flwr\.serverapp\.strategy"):
        CollaPipe(legacy.FedAvg())

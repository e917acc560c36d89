"""Every strategy of Flower gives the same bits wrapped and not, whatever its arrays and clients.

Clients are those of a torch project: `load_state_dict` of what they get, `state_dict` back.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from itertools import product

import flwr.serverapp.strategy as flower
import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import adaptiveclipping_mod, fixedclipping_mod
from flwr.serverapp.strategy import Result, Strategy

from collapipe_flwr.federation.local_grid import LocalGrid
from collapipe_flwr.federation.strategy import CollaPipe
from tests.federation.strategies import ALL, AVERAGING, PRIVATE, TREES, Make
from tests.thorough import few

ROUNDS = 2
NODES = 5
MODS = {
    "DifferentialPrivacyClientSideAdaptiveClipping": [adaptiveclipping_mod],
    "DifferentialPrivacyClientSideFixedClipping": [fixedclipping_mod],
}
Outcome = Result | BaseException
Model = Callable[[], torch.nn.Module]


def test_the_table_holds_every_strategy_of_flower():
    assert set(ALL) == set(flower.__all__) - {"Result", "Strategy"}


class Floats(torch.nn.Module):
    """Parameters of three widths, a scalar and an empty one among them."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.weight = torch.nn.Parameter(torch.randn(4, 3, generator=generator))
        self.scale = torch.nn.Parameter(torch.tensor(1.5))
        self.narrow = torch.nn.Parameter(torch.randn(5, generator=generator).half())
        self.wide = torch.nn.Parameter(torch.randn(2, 2, generator=generator).double())
        self.none = torch.nn.Parameter(torch.empty(0, 3))


class Counting(torch.nn.Module):
    """BatchNorm's counter, positions and a mask beside the weights."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(4)
        self.norm = torch.nn.BatchNorm1d(3)
        self.weight = torch.nn.Parameter(torch.randn(4, 3, generator=generator))
        self.register_buffer("positions", torch.arange(4))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("bytes", torch.tensor([250, 3], dtype=torch.uint8))


def moved(module: torch.nn.Module, node: int) -> None:
    """One client's training: every float a step, every counter a few, a flag now and then."""
    generator = torch.Generator().manual_seed(node)
    for tensor in module.state_dict().values():
        if tensor.is_floating_point():
            step = 0.1 * node * torch.randn(tensor.shape, generator=generator)
            tensor += step.to(tensor.dtype)
        elif tensor.dtype == torch.bool:
            tensor ^= torch.rand(tensor.shape, generator=generator) < 0.4
        else:
            tensor += node
    module.load_state_dict(module.state_dict())


def torch_app(model: Model, node: int, name: str) -> ClientApp:
    app, module = ClientApp(), model()

    def loaded(message: Message) -> torch.nn.Module:
        module.load_state_dict(message.content["arrays"].to_torch_state_dict())
        return module

    @app.train(mods=MODS.get(name))
    def train(message: Message, context: Context) -> Message:
        del context
        module = loaded(message)
        moved(module, node)
        metrics = MetricRecord(
            {"loss": 1.0 / node, "spread": [0.1 * node, 0.5], "num-examples": 7 * node}
        )
        content = RecordDict({"arrays": ArrayRecord(module.state_dict()), "metrics": metrics})
        return Message(content, reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        del context
        total = sum(float(t.double().sum()) for t in loaded(message).state_dict().values())
        metrics = MetricRecord({"total": total, "num-examples": node})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return app


def trees(count: int) -> ArrayRecord:
    """A boosted model of ``count`` trees, in the bytes that Flower's strategies read."""
    model = {
        "gbtree_model_param": {"num_trees": str(count), "num_parallel_tree": "1"},
        "iteration_indptr": list(range(count + 1)),
        "trees": [{"id": n} for n in range(count)],
        "tree_info": [0] * count,
    }
    booster = json.dumps({"learner": {"gradient_booster": {"model": model}}}).encode()
    return ArrayRecord({"0": Array(np.frombuffer(booster, dtype=np.uint8).copy())})


def tree_app(node: int) -> ClientApp:
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        del context
        metrics = MetricRecord(
            {"seen": len(message.content["arrays"]["0"].data), "num-examples": node}
        )
        return Message(RecordDict({"arrays": trees(1), "metrics": metrics}), reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        del context
        metrics = MetricRecord(
            {"size": len(message.content["arrays"]["0"].data), "num-examples": node}
        )
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return app


class Losing(LocalGrid):
    """Replies of some nodes never arrive."""

    lost: frozenset[int] = frozenset()

    def send_and_receive(self, messages, *, timeout=None):
        replies = super().send_and_receive(messages, timeout=timeout)
        return [reply for reply in replies if reply.metadata.src_node_id not in self.lost]


def failing(message: Message, context: Context) -> Message:
    raise RuntimeError(f"no memory left for {message.metadata.message_type} on {context.node_id}")


def nodes(name: str, model: Model) -> dict[int, ClientApp]:
    numbers = range(1, NODES + 1)
    if name in TREES:
        return {n: tree_app(n) for n in numbers}
    return {n: torch_app(model, n, name) for n in numbers}


def outcome(strategy: Strategy, grid: LocalGrid, start: ArrayRecord) -> Outcome:
    """The run's result, or what it raised; equal chance for everyone."""
    random.seed(11)
    np.random.seed(11)
    centrally: dict[int, MetricRecord] = {}

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        total = sum(float(np.sum(a.numpy(), dtype=np.float64)) for a in arrays.values())
        centrally[server_round] = MetricRecord({"sum": total})
        return centrally[server_round]

    try:
        return strategy.start(grid, start.copy(), num_rounds=ROUNDS, evaluate_fn=evaluate)
    except Exception as error:
        return error


def assert_same(plain: Outcome, wrapped: Outcome) -> None:
    if not isinstance(plain, Result):
        assert (type(wrapped), str(wrapped)) == (type(plain), str(plain))
        return
    assert isinstance(wrapped, Result), wrapped
    assert list(plain.arrays) == list(wrapped.arrays)
    for key, array in plain.arrays.items():
        found = wrapped.arrays[key]
        assert (found.dtype, found.shape, found.data) == (array.dtype, array.shape, array.data), key
    assert plain.train_metrics_clientapp == wrapped.train_metrics_clientapp
    assert plain.evaluate_metrics_clientapp == wrapped.evaluate_metrics_clientapp
    assert plain.evaluate_metrics_serverapp == wrapped.evaluate_metrics_serverapp


def compare(name: str, model: Model, wire, make: Make | None = None, **settings) -> Outcome:
    """Run a strategy plain and wrapped, assert that nothing differs, give back the plain run."""
    make = make or ALL[name]
    grids = []
    for _ in range(2):
        grid = Losing(nodes(name, model) | settings.get("others", {}), wire=wire)
        grid.lost = frozenset(settings.get("lost", ()))
        grids.append(grid)
    start = trees(2) if name in TREES else ArrayRecord(model().state_dict())
    own = settings.get("own", {})
    plain = outcome(make(**own), grids[0], start)
    wrapped = outcome(CollaPipe(make(**own)), grids[1], start)
    assert_same(plain, wrapped)
    asked = [[(m.metadata.dst_node_id, m.metadata.message_type) for m in g.sent] for g in grids]
    assert asked[0] == asked[1]
    return plain


@pytest.mark.parametrize("name", ALL)
def test_of_floats(name, wire):
    plain = compare(name, Floats, wire)
    assert isinstance(plain, Result)
    assert len(plain.train_metrics_clientapp) == len(plain.evaluate_metrics_clientapp) == ROUNDS


# Flower's own arithmetic cannot hold these: an update of integers times a float, in place.
NO_INTEGERS = {*PRIVATE, "QFedAvg"}


@pytest.mark.parametrize("name", [*AVERAGING, *PRIVATE])
def test_of_integers_and_flags(name, wire):
    plain = compare(name, Counting, wire)
    trained = isinstance(plain, Result) and len(plain.arrays) > 0
    assert trained == (name not in NO_INTEGERS)
    if trained:
        Counting().load_state_dict(plain.arrays.to_torch_state_dict())


# One of every way in which Flower's strategies choose nodes and read replies.
WAYS = few(
    ALL, *(list(ALL).index(name) for name in ("FedAvg", "QFedAvg", "Krum", *PRIVATE, *TREES))
)


@pytest.mark.parametrize("name", WAYS)
def test_with_a_failing_client_and_a_missing_reply(name, wire):
    compare(name, Floats, wire, others={2: failing}, lost=[4])


@pytest.mark.parametrize("name", WAYS)
def test_when_all_clients_fail(name, wire):
    plain = compare(name, Floats, wire, others=dict.fromkeys(range(1, NODES + 1), failing))
    if isinstance(plain, Result):
        assert not plain.arrays
        assert not plain.train_metrics_clientapp


@pytest.mark.parametrize("name", [way for way in WAYS if way.values != ("FedXgbCyclic",)])
def test_with_a_sample_of_the_clients(name, wire):
    own = {"fraction_train": 0.6, "fraction_evaluate": 0.4, "min_available_nodes": NODES}
    compare(name, Floats, wire, own=own)


@pytest.mark.parametrize("name", WAYS)
def test_without_evaluation_and_with_keys_of_ones_own(name, wire):
    keys = {"weighted_by_key": "num-examples", "configrecord_key": "settings"}
    plain = compare(name, Floats, wire, own={"fraction_evaluate": 0.0, **keys})
    if name != "FedXgbCyclic":  # it asks one node all the same
        assert not plain.evaluate_metrics_clientapp


@pytest.mark.parametrize(
    ("name", "inside"), few(product(PRIVATE, ["FedAdam", "FedMedian", "Krum"]), 0, 4, 8, 9)
)
def test_private_strategies_around_others(name, inside, wire):
    def make(**settings) -> Strategy:
        private = PRIVATE[name](**settings)
        private.strategy = AVERAGING[inside](**settings)
        return private

    compare(name, Floats, wire, make)


@pytest.mark.parametrize("name", PRIVATE)
def test_private_strategies_around_collapipe(name, wire):
    start = ArrayRecord(Floats().state_dict())
    plain = outcome(PRIVATE[name](), LocalGrid(nodes(name, Floats), wire=wire), start)
    around = PRIVATE[name]()
    around.strategy = CollaPipe(around.strategy)
    assert_same(plain, outcome(around, LocalGrid(nodes(name, Floats), wire=wire), start))


def test_wrapping_draws_nothing_from_the_strategys_chance(wire):
    own: Mapping[str, float] = {"fraction_train": 0.6}
    start = ArrayRecord(Floats().state_dict())
    plain = outcome(flower.FedAvg(**own), LocalGrid(nodes("FedAvg", Floats), wire=wire), start)
    strategy = CollaPipe(flower.FedAvg(**own))
    assert_same(plain, outcome(strategy, LocalGrid(nodes("FedAvg", Floats), wire=wire), start))

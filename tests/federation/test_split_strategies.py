"""With a split model a strategy gives what it gives for the unsplit one, and mods see it whole."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod, adaptiveclipping_mod, fixedclipping_mod
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideFixedClipping,
    FedAvg,
    Strategy,
)

from collapipe_flwr.core.errors import RunError
from collapipe_flwr.federation.arrays import decode_tensors, encode_tensors, load_into
from collapipe_flwr.federation.local_grid import LocalGrid
from collapipe_flwr.federation.records import (
    ARRAYS,
    EXAMPLES,
    METRICS,
    SHORT,
    read_assignment,
    read_profile,
    write_profile,
)
from collapipe_flwr.federation.strategy import CollaPipe
from collapipe_flwr.models.any_splitter import DescribedModel
from tests.federation.split_clusters import EDGE_KEYS, FixedPlanner, model, trainer, wrapped
from tests.federation.strategies import AVERAGING, PRIVATE
from tests.federation.test_discovery import profile

NODES = (1, 2, 3, 4, 5)
NAMES = tuple(f"c{node}" for node in NODES)
INTEGER = "decoder.steps"
SERVER_SIDE = [name for name in PRIVATE if "ServerSide" in name]
NORM = 0.1


def start(*, integers: bool) -> dict[str, torch.Tensor]:
    """The model that is trained: narrow and wide floats, and a counter at the edge."""
    generator = torch.Generator().manual_seed(2)
    first = {
        "embed.weight": torch.randn(3, 2, generator=generator),
        "blocks.0.weight": torch.randn(2, 2, generator=generator).half(),
        "decoder.weight": torch.randn(2, 2, generator=generator),
        INTEGER: torch.tensor([4]),
    }
    return first if integers else {**first, INTEGER: torch.tensor([4.0])}


def narrow(edge: MemoryEdge, planner: FixedPlanner, records: list, inner: Strategy) -> CollaPipe:
    return wrapped(planner, records, inner, keys=start(integers=False))


def unsplit(node: int):
    """The peer of `trainer`: the same step on the whole model."""

    def train(message: Message, context: Context) -> Message:
        del context
        arrays = decode_tensors(load_into(encode_tensors(train.model), message.content[ARRAYS]))
        step = 0.3 * node
        moved = {k: v + int(step) if k == INTEGER else v + step for k, v in arrays.items()}
        metrics = MetricRecord({"loss": step, EXAMPLES: 7 * node})
        content = RecordDict({ARRAYS: encode_tensors(moved), METRICS: metrics})
        return Message(content, reply_to=message)

    return train


class Ordered(LocalGrid):
    """Replies in the order of nodes, as a split round sorts them."""

    def send_and_receive(self, messages, *, timeout=None):
        replies = super().send_and_receive(messages, timeout=timeout)
        return sorted(replies, key=lambda reply: reply.metadata.src_node_id)


def trained(strategy: Strategy, grid: LocalGrid, arrays: ArrayRecord) -> ArrayRecord:
    random.seed(3)
    np.random.seed(3)
    return strategy.start(grid, arrays.copy(), num_rounds=1).arrays


@pytest.mark.parametrize("name", [*AVERAGING, *SERVER_SIDE])
def test_a_strategy_aggregates_the_split_model_as_it_would_the_unsplit_one(name, wire):
    make = {**AVERAGING, **PRIVATE}[name]
    tensors = start(integers=name in AVERAGING and name != "QFedAvg")
    arrays = encode_tensors(tensors)
    peers = {}
    for node in NODES:
        peers[node] = unsplit(node)
        peers[node].model = tensors
    plain = trained(make(fraction_evaluate=0.0), Ordered(peers, wire=wire), arrays)
    clusters = {n: trainer(0.3 * n, 7 * n) for n in NODES}
    strategy = narrow(edge, FixedPlanner(*NAMES), [], make(fraction_evaluate=0.0))
    found = trained(strategy, LocalGrid(clusters, wire=wire), arrays)
    expected = load_into(arrays, plain)
    assert list(found) == list(expected)
    for key, array in expected.items():
        assert (found[key].dtype, found[key].data) == (array.dtype, array.data), key
        assert found[key].data != arrays[key].data or key == INTEGER


def test_the_integers_are_those_of_a_reply_that_krum_accepts():
    steps = {1: (1.0, 10), 2: (1.0, 10), 3: (1.0, 10), 4: (9.0, 1000), 5: (1.0, 10)}
    grid = LocalGrid({n: trainer(*steps[n]) for n in NODES})
    inner = AVERAGING["Krum"](fraction_evaluate=0.0)
    final = wrapped(FixedPlanner(*NAMES), [], inner).start(
        grid, encode_tensors(model()), num_rounds=1
    )
    assert decode_tensors(final.arrays)["decoder.steps"] == 4 + 1


def app(edge: MemoryEdge, node: int, *mods) -> ClientApp:
    """A cluster whose ClientApp has mods."""
    made = ClientApp()
    made.train(mods=list(mods))(trainer(float(node), 7))
    return made


def floats() -> ArrayRecord:
    return encode_tensors(start(integers=False))


def update(reply: ArrayRecord, before: ArrayRecord) -> torch.Tensor:
    new, old = decode_tensors(reply), decode_tensors(before)
    return torch.cat([(new[key] - old[key]).double().flatten() for key in old])


class Watching(FedAvg):
    """Keeps the models that it is given."""

    def aggregate_train(self, server_round, replies):
        self.seen = [reply.content[ARRAYS].copy() for reply in replies if reply.has_content()]
        self.failures = [reply.error.reason for reply in replies if reply.has_error()]
        return super().aggregate_train(server_round, replies)


def private(edge: MemoryEdge, inner: Strategy, *mods) -> LocalGrid:
    """One round of whole clusters 1 and 2 with these mods."""
    grid = LocalGrid({n: app(edge, n, *mods) for n in (1, 2)})
    strategy = narrow(edge, FixedPlanner("c1", "c2", whole=("c1", "c2")), [], inner)
    strategy.start(grid, floats(), num_rounds=1)
    return grid


@pytest.mark.parametrize("adaptive", [False, True])
def test_clipping_mods_bound_the_whole_update(adaptive):
    inner = Watching(fraction_evaluate=0.0)
    if adaptive:
        around = DifferentialPrivacyClientSideAdaptiveClipping(
            inner, 0.0, 2, initial_clipping_norm=NORM
        )
    else:
        around = DifferentialPrivacyClientSideFixedClipping(inner, 0.0, NORM, 2)
    grid = private(edge, around, adaptiveclipping_mod if adaptive else fixedclipping_mod)
    assert [set(m.content[ARRAYS]) for m in grid.sent] == [set(floats())] * 2
    assert all(read_assignment(m.content).split.whole for m in grid.sent)
    assert len(inner.seen) == 2
    for reply in inner.seen:
        moved = update(reply, floats())
        assert moved.norm() == pytest.approx(NORM, rel=2e-3)  # of narrow floats
        assert (moved != 0).all()  # the edge's part moves as well


def test_local_privacy_noises_the_whole_update():
    inner = Watching(fraction_evaluate=0.0)
    np.random.seed(1)
    private(MemoryEdge(), inner, LocalDpMod(NORM, sensitivity=1.0, epsilon=1.0, delta=0.1))
    noise = [update(reply, floats()) for reply in inner.seen]
    assert all(moved.norm() > NORM for moved in noise)
    assert noise[0].abs().min() > 0
    assert not torch.equal(*noise)


def test_a_cluster_that_is_not_whole_gets_its_part_beside_one_that_is():
    edge, inner = MemoryEdge(), Watching(fraction_evaluate=0.0)
    grid = LocalGrid({1: trainer(1.0, 10), 2: trainer(3.0, 30)})
    strategy = narrow(edge, FixedPlanner("c1", "c2", whole=("c2",)), [], inner)
    final = decode_tensors(strategy.start(grid, floats(), num_rounds=1).arrays)
    sent = {m.metadata.dst_node_id: set(m.content[ARRAYS]) for m in grid.sent}
    assert sent == {1: set(floats()) - EDGE_KEYS, 2: set(floats())}
    first = decode_tensors(floats())
    assert torch.equal(final["decoder.weight"], first["decoder.weight"] + 2.5)
    assert not inner.failures


def test_a_whole_cluster_that_replies_with_its_part_is_refused():
    edge, inner, records = MemoryEdge(), Watching(fraction_evaluate=0.0), []
    parts = trainer(1.0, 10, missing="decoder.weight")
    grid = LocalGrid({1: parts, 2: trainer(3.0, 30)})
    planner = FixedPlanner("c1", "c2", whole=("c1", "c2"))
    narrow(edge, planner, records, inner).start(grid, floats(), num_rounds=1)
    assert "did not return decoder.weight" in records[0].failures["c1"]
    assert len(inner.seen) == 1


def around(edge: MemoryEdge, planner: FixedPlanner) -> DifferentialPrivacyServerSideFixedClipping:
    split = narrow(edge, planner, [], Watching(fraction_evaluate=0.0))
    return DifferentialPrivacyServerSideFixedClipping(split, 0.0, NORM, 2)


def test_clipping_at_the_server_around_collapipe_bounds_whole_replies():
    strategy = around(edge, FixedPlanner("c1", "c2", whole=("c1", "c2")))
    grid = LocalGrid({n: trainer(float(n), 10) for n in (1, 2)})
    strategy.start(grid, floats(), num_rounds=1)
    for reply in strategy.strategy.seen:
        assert update(reply, floats()).norm() == pytest.approx(NORM, rel=2e-3)


def test_clipping_at_the_server_around_collapipe_never_bounds_parts_in_silence():
    strategy = around(edge, FixedPlanner("c1", "c2"))
    grid = LocalGrid({n: trainer(float(n), 10) for n in (1, 2)})
    with pytest.raises(ValueError, match="zip"):
        strategy.start(grid, floats(), num_rounds=1)
    strategy.strategy.close()


def test_a_model_to_split_is_refused_inside_another_strategy():
    described = DescribedModel(object(), SHORT)
    inside = CollaPipe(FedAvg(), model=described, scheduler=FixedPlanner("c1", "c2"))
    strategy = DifferentialPrivacyServerSideFixedClipping(inside, 0.0, NORM, 2)
    grid = LocalGrid({n: trainer(float(n), 10) for n in (1, 2)})
    with pytest.raises(RunError, match=r"put that inside, CollaPipe\(OtherStrategy\(FedAvg\(\)"):
        strategy.start(grid, floats(), num_rounds=1)


def test_a_description_says_whether_a_cluster_is_whole():
    plain = profile("c1")
    assert not read_profile(write_profile(plain)).whole
    assert read_profile(write_profile(replace(plain, whole=True))).whole

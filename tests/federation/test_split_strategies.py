"""With a split model a strategy gives what it gives for the unsplit one, and mods see it whole."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.client.mod import secaggplus_mod
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod, adaptiveclipping_mod, fixedclipping_mod, message_size_mod
from flwr.server.workflow import SecAggPlusWorkflow
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
    FedAvg,
    Strategy,
)

from collapipe_flwr.cluster.order import LearningSettings
from collapipe_flwr.core.errors import RunError
from collapipe_flwr.federation.arrays import decode_tensors, encode_tensors, load_into
from collapipe_flwr.federation.client.cluster import Cluster
from collapipe_flwr.federation.local_grid import LocalGrid
from collapipe_flwr.federation.planner import (
    DescribedClusters,
)
from collapipe_flwr.federation.planning import Planning
from collapipe_flwr.federation.records import (
    ARRAYS,
    EXAMPLES,
    METRICS,
    SHORT,
)
from collapipe_flwr.federation.split import SplitTraining
from collapipe_flwr.federation.strategy import CollaPipe
from collapipe_flwr.models.any_splitter import DescribedModel
from tests.federation.split_clusters import FixedPlanner, model, trainer, wrapped
from tests.federation.strategies import AVERAGING, PRIVATE

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


def narrow(inner: Strategy, *names: str) -> CollaPipe:
    return wrapped(FixedPlanner(*names), [], inner, keys=start(integers=False))


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
    strategy = narrow(make(fraction_evaluate=0.0), *NAMES)
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


def floats() -> ArrayRecord:
    return encode_tensors(start(integers=False))


def update(reply: ArrayRecord) -> torch.Tensor:
    new, old = decode_tensors(reply), decode_tensors(floats())
    return torch.cat([(new[key] - old[key]).double().flatten() for key in old])


class Watching(FedAvg):
    """Keeps the models that it is given."""

    def aggregate_train(self, server_round, replies):
        self.seen = [reply.content[ARRAYS].copy() for reply in replies if reply.has_content()]
        return super().aggregate_train(server_round, replies)


class Compressed(Strategy):
    """Restores replies to `compressing` for the strategy inside."""

    def __init__(self, inside: Strategy) -> None:
        self.inside = inside

    def summary(self) -> None:
        self.inside.summary()

    def configure_train(self, server_round, arrays, config, grid):
        self.sent = arrays
        return self.inside.configure_train(server_round, arrays, config, grid)

    def aggregate_train(self, server_round, replies):
        replies = list(replies)
        for reply in replies:
            signs = reply.content.array_records.pop("signs")
            size, sent = reply.content[METRICS].pop("size"), decode_tensors(self.sent)
            moved = {k: sent[k] + size * sign for k, sign in decode_tensors(signs).items()}
            reply.content[ARRAYS] = encode_tensors(moved)
        return self.inside.aggregate_train(server_round, replies)

    def configure_evaluate(self, server_round, arrays, config, grid):
        return self.inside.configure_evaluate(server_round, arrays, config, grid)

    def aggregate_evaluate(self, server_round, replies):
        return self.inside.aggregate_evaluate(server_round, replies)


def compressing(message: Message, context: Context, call_next) -> Message:
    """A mod that replies with the signs of the whole update and its mean size."""
    sent = decode_tensors(message.content[ARRAYS])
    reply = call_next(message, context)
    new = decode_tensors(reply.content.array_records.pop(ARRAYS))
    moved = {key: tensor - sent[key] for key, tensor in new.items()}
    sizes = torch.cat([tensor.double().abs().flatten() for tensor in moved.values()])
    reply.content[METRICS]["size"] = float(sizes.mean())
    reply.content["signs"] = encode_tensors({k: t.sign().char() for k, t in moved.items()})
    return reply


def noising() -> LocalDpMod:
    return LocalDpMod(NORM, sensitivity=1.0, epsilon=1.0, delta=0.1)


def fixed(strategy: Strategy) -> Strategy:
    return DifferentialPrivacyClientSideFixedClipping(strategy, 0.3, NORM, len(NODES))


def adaptive(strategy: Strategy) -> Strategy:
    return DifferentialPrivacyClientSideAdaptiveClipping(
        strategy, 0.3, len(NODES), initial_clipping_norm=NORM
    )


def at_the_server(strategy: Strategy) -> Strategy:
    return DifferentialPrivacyServerSideFixedClipping(strategy, 0.3, NORM, len(NODES))


def adaptive_at_the_server(strategy: Strategy) -> Strategy:
    return DifferentialPrivacyServerSideAdaptiveClipping(
        strategy, 0.3, len(NODES), initial_clipping_norm=NORM
    )


def alone(strategy: Strategy) -> Strategy:
    return strategy


PRIVACY = [
    (fixed, fixedclipping_mod),
    (adaptive, adaptiveclipping_mod),
    (alone, noising()),
    (at_the_server, message_size_mod),
    (adaptive_at_the_server, message_size_mod),
]


def modded(train, mod) -> ClientApp:
    app = ClientApp()
    app.train(mods=[mod])(train)
    return app


def averaging() -> FedAvg:
    return Watching(fraction_evaluate=0.0)


def both_trained(around, mod, split: Strategy) -> tuple[ArrayRecord, ArrayRecord]:
    """The models of a project with this mod: unsplit, and ``split``."""
    peers = {n: unsplit(n) for n in NODES}
    for peer in peers.values():
        peer.model = start(integers=False)
    plain = Ordered({n: modded(peers[n], mod) for n in NODES})
    clusters = LocalGrid({n: modded(trainer(0.3 * n, 7 * n), mod) for n in NODES})
    expected = trained(around(averaging()), plain, floats())
    return load_into(floats(), expected), load_into(floats(), trained(split, clusters, floats()))


def datas(arrays: ArrayRecord) -> dict[str, bytes]:
    return {key: array.data for key, array in arrays.items()}


@pytest.mark.parametrize(("around", "mod"), PRIVACY)
@pytest.mark.parametrize("inside", [True, False], ids=["inside", "outside"])
def test_privacy_bounds_and_noises_what_it_does_in_the_unsplit_project(around, mod, inside):
    """Every strategy of Flower for it, inside CollaPipe and around it."""
    inner = averaging()
    split = narrow(around(inner), *NAMES) if inside else around(narrow(inner, *NAMES))
    expected, found = both_trained(around, mod, split)
    assert datas(found) == datas(expected)
    for reply in inner.seen:
        moved = update(reply)
        assert (moved[:-1] != 0).all()  # every part moves, besides the counter
        if around is not alone:
            assert moved.norm() == pytest.approx(NORM, rel=2e-3)  # of narrow floats


def test_a_mod_that_compresses_sees_the_whole_update_and_a_strategy_around_restores_it():
    split = Compressed(narrow(averaging(), *NAMES))
    expected, found = both_trained(Compressed, compressing, split)
    assert datas(found) == datas(expected) != datas(floats())


def test_a_compressed_reply_that_nobody_restores_is_refused_with_a_sentence():
    records = []
    strategy = wrapped(FixedPlanner("c1", "c2"), records, keys=start(integers=False))
    grid = LocalGrid({1: trainer(1.0, 7), 2: modded(trainer(2.0, 7), compressing)})
    strategy.start(grid, floats(), num_rounds=1)
    assert "embed.weight as int8 (3, 2), it was sent as float32" in records[0].failures["c2"]


def test_secure_aggregation_is_refused_with_a_sentence():
    """A mod of Flower's legacy API, which no strategy of the message API answers."""
    records = []
    strategy = wrapped(FixedPlanner("c1", "c2"), records, keys=start(integers=False))
    grid = LocalGrid({1: trainer(1.0, 7), 2: modded(trainer(2.0, 7), secaggplus_mod)})
    strategy.start(grid, floats(), num_rounds=1)
    assert records[0].failures["c2"].startswith("its ClientApp asks for secure aggregation")


def test_flowers_secure_aggregation_still_knows_its_legacy_server_alone():
    """Once it does not, it may be had here, and what SECURITY.md says of it is to be changed."""
    context = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config={})
    workflow = SecAggPlusWorkflow(num_shares=3, reconstruction_threshold=2)
    with pytest.raises(TypeError, match="Expect a LegacyContext, but get Context"):
        workflow(LocalGrid({n: trainer(1.0, 7) for n in NODES}), context)


def test_a_cluster_that_asks_for_secure_aggregation_is_refused_before_it_trains():
    app = ClientApp(mods=[secaggplus_mod])
    Cluster(app)

    @app.train()
    def train(*_):
        pytest.fail("it was asked to train")

    planner = DescribedClusters(Planning(), lambda: pytest.fail("it was planned"))
    with pytest.raises(RunError, match=r"none of 1 nodes .* its ClientApp asks for secure"):
        planner.query_unknown(LocalGrid({1: app}), [1])


@pytest.mark.parametrize("options", [{"retries": 1}, {"late": "join"}])
def test_replies_that_a_strategy_around_collapipe_would_not_see_are_refused(options):
    """Those of a repeated round, and late ones, would be neither clipped nor restored by it."""
    strategy = at_the_server(wrapped(FixedPlanner(*NAMES), [], averaging(), **options))
    with pytest.raises(RunError, match=r"put that inside, CollaPipe\(OtherStrategy\(FedAvg\(\)"):
        strategy.start(LocalGrid({n: trainer(1.0, 7) for n in NODES}), floats(), num_rounds=1)


@pytest.mark.parametrize("changed", ["embed.weight", "head.weight"])
def test_a_tied_table_that_a_mod_tears_apart_is_one_again(changed: str) -> None:
    """The value of the key that the split model trains counts, and the other key gets it too.

    A mod treats both keys as two tables: noise differs between them. Their mean would be neither
    what devices trained nor what the mod made of it, so one has to win.
    """
    splitter = SimpleNamespace(
        aliases={"head.weight": "embed.weight"}, constant_keys=frozenset(), prefix=""
    )
    split = SplitTraining(DescribedModel(splitter, SHORT), "", LearningSettings())
    sent = {"embed.weight": torch.ones(3, 2), "head.weight": torch.ones(3, 2)}
    reply = {**sent, changed: torch.full((3, 2), 5.0)}
    found = decode_tensors(split.check_reply("c1", encode_tensors(reply), encode_tensors(sent)))
    assert torch.equal(found["embed.weight"], reply["embed.weight"])
    assert torch.equal(found["head.weight"], found["embed.weight"])

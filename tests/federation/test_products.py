"""Law: clusters of different ranks give what the same strategy gives for whole products."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAdam, FedAvg, FedProx, QFedAvg, Strategy
from peft import (
    LoraConfig,
    get_peft_model,
    get_peft_model_state_dict,
    set_peft_model_state_dict,
)
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from collapipe_flwr import (
    Cluster,
    CollaPipe,
    ConfigError,
    LocalGrid,
    ModelError,
    RunError,
    SplitModel,
)
from collapipe_flwr.cluster.order import LearningSettings
from collapipe_flwr.federation import products
from tests.federation.strategies import AVERAGING, PRIVATE

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
RULE = partial(torch.optim.SGD, lr=1.0)
BATCH, LENGTH, RANK, ALPHA = 4, 6, 6, 8
RANKS = {1: 1, 2: 2, 3: 5, 4: 3, 5: 4}  # none is that of the global adapters, sent as they are
STRATEGIES = {**AVERAGING, **{name: PRIVATE[name] for name in PRIVATE if "ServerSide" in name}}
MANY = tuple(STRATEGIES)
ALONE = {"fraction_evaluate": 0.0}


def new_model(base: str, rank: int = RANK, **choices: Any) -> Any:
    torch.manual_seed(0)
    lora = LoraConfig(
        r=rank,
        lora_alpha=ALPHA,
        target_modules=["q_proj", "down_proj"],
        modules_to_save=["lm_head"],
        **choices,
    )
    return get_peft_model(AutoModelForCausalLM.from_pretrained(base), lora)


def begun(model: Any) -> dict[str, Tensor]:
    """Adapters that are not at their start, where all products are zero."""
    random = torch.Generator().manual_seed(1)
    state = get_peft_model_state_dict(model)
    return {
        key: 0.1 * torch.randn(value.shape, generator=random) if "lora_B" in key else value
        for key, value in state.items()
    }


def loader(node: int) -> DataLoader:
    random = torch.Generator().manual_seed(node)
    ids = torch.randint(0, 40, (8 + 4 * (node % 2), LENGTH), generator=random)
    return DataLoader([{"input_ids": i, "labels": i} for i in ids], batch_size=BATCH)


def scale_of(rank: int) -> float:
    return ALPHA / rank


def as_products(state: dict[str, Tensor], rank: int) -> dict[str, Tensor]:
    """Whole products in the places of B."""
    found = {}
    for key, value in state.items():
        if "lora_B" in key:
            value = scale_of(rank) * value @ state[key.replace("lora_B", "lora_A")]
        if "lora_A" not in key:
            found[key] = value
    return found


def as_factors(shown: dict[str, Tensor], rank: int) -> dict[str, Tensor]:
    """The factors of a rank, by the decomposition of whole products."""
    found = dict(shown)
    for key, product in shown.items():
        if "lora_B" in key:
            u, s, vh = torch.linalg.svd(product.double(), full_matrices=False)
            length = 3**-0.5
            b = (u * s)[:, :rank] / length / scale_of(rank)
            found[key] = b.float()
            found[key.replace("lora_B", "lora_A")] = (length * vh[:rank]).float()
    return found


def train_whole(model: Any, node: int) -> float:
    rule, losses = RULE(p for p in model.train().parameters() if p.requires_grad), []
    for batch in loader(node):
        loss = model(**batch).loss
        loss.backward()
        rule.step()
        rule.zero_grad()
        losses.append(float(loss.detach()))
    return sum(losses) / len(losses)


def plain_client(base: str) -> ClientApp:
    """A client that learns with peft, and speaks of whole products."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        rank = RANKS[context.node_id]
        model = new_model(base, rank)
        shown = message.content["arrays"].to_torch_state_dict()
        set_peft_model_state_dict(model, as_factors(shown, rank))
        loss = train_whole(model, context.node_id)
        arrays = ArrayRecord(as_products(get_peft_model_state_dict(model), rank))
        examples = len(loader(context.node_id).dataset)
        metrics = MetricRecord({"num-examples": examples, "train_loss": loss})
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    return app


def client() -> ClientApp:
    app = ClientApp()
    cluster = Cluster(app)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return cluster.train(message, context, loader(context.node_id))

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        return cluster.evaluate(message, context, loader(context.node_id))

    return app


class Ordered(LocalGrid):
    """Replies in the order of nodes, as a split round sorts them."""

    def send_and_receive(self, messages, *, timeout=None):
        replies = super().send_and_receive(messages, timeout=timeout)
        return sorted(replies, key=lambda reply: reply.metadata.src_node_id)


def grid(
    app: ClientApp, ranks: dict[int, Any] = RANKS, kind: type[LocalGrid] = Ordered
) -> LocalGrid:
    configs = {n: {"partition-id": n - 1, "lora-rank": rank} for n, rank in ranks.items()}
    return kind(dict.fromkeys(ranks, app), node_configs=configs)


def start(model: Any, inner: Strategy, *, rounds: int = 1, ranks: Any = RANKS, **given: Any) -> Any:
    split = SplitModel(
        model, batch_size=BATCH, length=LENGTH, aggregate=given.pop("aggregate", "products")
    )
    clusters = grid(client(), ranks, given.pop("kind", Ordered))
    strategy = CollaPipe(inner, model=split, optimizer=RULE, scheduler="uniform", **given)
    first = ArrayRecord(begun(model))
    return strategy.start(grid=clusters, initial_arrays=first, num_rounds=rounds)


def make(name: str) -> Strategy:
    """A strategy that reads the losses of our replies, and adds none of its own to clients'."""
    if name == "QFedAvg":
        return QFedAvg(client_learning_rate=0.1, q=0.2, train_loss_key="train_loss", **ALONE)
    return FedProx(proximal_mu=0.0, **ALONE) if name == "FedProx" else STRATEGIES[name](**ALONE)


@pytest.mark.parametrize("name", MANY)
def test_every_strategy_gives_what_it_gives_for_whole_products(name: str, base: str) -> None:
    model, rounds = new_model(base), list[Any]()
    np.random.seed(4)  # of the noise that some add
    result = start(model, make(name), on_round=rounds.append)
    found = result.arrays.to_torch_state_dict()
    assert list(found) == list(get_peft_model_state_dict(model))
    first = ArrayRecord(as_products(begun(model), RANK))
    np.random.seed(4)
    plain = make(name).start(grid=grid(plain_client(base)), initial_arrays=first, num_rounds=1)
    wanted = {k: v.float() for k, v in plain.arrays.to_torch_state_dict().items()}
    nearest = as_products(as_factors(wanted, RANK), RANK)
    for key, value in as_products(found, RANK).items():
        assert torch.allclose(value, nearest[key], atol=1e-6), key
    lost = sum(float((wanted[k] - nearest[k]).square().sum()) for k in wanted if "lora_B" in k)
    whole = sum(float(wanted[k].square().sum()) for k in wanted if "lora_B" in k)
    assert rounds[0].failures == {}
    assert rounds[0].adapter_error == pytest.approx((lost / whole) ** 0.5, rel=1e-2, abs=1e-5)
    assert rounds[0].event(1.0).adapter_error == rounds[0].adapter_error


@pytest.mark.parametrize("kind", ["use_rslora", "use_dora"])
def test_other_adapters_are_averaged_as_products_too(
    kind: str, base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{__name__}.new_model", partial(new_model, **{kind: True}))
    if kind == "use_rslora":
        monkeypatch.setattr(f"{__name__}.scale_of", lambda rank: ALPHA / rank**0.5)
    test_every_strategy_gives_what_it_gives_for_whole_products("FedAvg", base)


def test_equal_ranks_give_the_mean_of_products_which_is_not_that_of_factors(base: str) -> None:
    replies, ranks = list[dict[str, Tensor]](), dict.fromkeys(RANKS, RANK)

    class Noting(Ordered):
        def send_and_receive(self, messages, *, timeout=None):
            found = super().send_and_receive(messages, timeout=timeout)
            replies.extend(
                reply.content["arrays"].to_torch_state_dict()
                for reply in found
                if "arrays" in reply.content
            )
            return found

    results = {}
    for aggregate in ("products", "factors"):
        replies.clear()
        inner = FedAvg(**ALONE, weighted_by_key="num-examples")
        result = start(new_model(base), inner, ranks=ranks, aggregate=aggregate, kind=Noting)
        results[aggregate] = as_products(result.arrays.to_torch_state_dict(), RANK)
    sizes = [len(loader(node).dataset) for node in RANKS]
    assert len(replies) == len(RANKS)
    means = {
        key: sum(
            size * as_products(reply, RANK)[key] for size, reply in zip(sizes, replies, strict=True)
        )
        / sum(sizes)
        for key in as_products(replies[0], RANK)
    }
    furthest = 0.0
    for key in (key for key in means if "lora_B" in key):
        nearest = as_products(as_factors({key: means[key]}, RANK), RANK)[key]
        products, factors = (results[name][key] - nearest for name in ("products", "factors"))
        assert float(products.norm()) < 1e-6 * float(nearest.norm())
        furthest = max(furthest, float(factors.norm() / nearest.norm()))
    assert furthest > 1e-5


def test_rounds_go_on_from_the_products_of_those_before(base: str) -> None:
    """A second round continues: its error is small where the first one's is, and it learns."""
    rounds = list[Any]()
    inner = FedAvg()
    result = start(new_model(base), inner, rounds=3, on_round=rounds.append)
    losses = [record.train_metrics["train_loss"] for record in rounds]
    assert losses == sorted(losses, reverse=True)
    assert set(result.evaluate_metrics_clientapp) == {1, 2, 3}
    assert all(0 <= record.adapter_error < 0.5 for record in rounds)


def test_evaluation_is_of_the_global_adapters(base: str) -> None:
    """All clusters, whatever their ranks, evaluate what is aggregated, not their part of it."""
    sent = list[dict[str, Tensor]]()

    class Noting(Ordered):
        def send_and_receive(self, messages, *, timeout=None):
            found = list(messages)
            sent.extend(
                message.content["arrays"].to_torch_state_dict()
                for message in found
                if message.metadata.message_type == "evaluate"
            )
            return super().send_and_receive(found, timeout=timeout)

    result = start(new_model(base), FedAvg(), kind=Noting)
    final = result.arrays.to_torch_state_dict()
    assert len(sent) == len(RANKS)
    for arrays in sent:
        assert all(torch.equal(arrays[key], value) for key, value in final.items())


@pytest.mark.parametrize("codec", ["fp16", "int8"])
def test_coded_updates_come_near_exact_ones(codec: str, base: str) -> None:
    exact, coded = (
        as_products(
            start(
                new_model(base), FedAvg(**ALONE), rounds=2, learning=LearningSettings(updates=name)
            ).arrays.to_torch_state_dict(),
            RANK,
        )
        for name in ("fp32", codec)
    )
    first = as_products(begun(new_model(base)), RANK)
    for key, value in exact.items():
        moved = float((value - first[key]).norm())
        assert 0 < float((value - coded[key]).norm()) < 0.03 * moved


@pytest.mark.parametrize(
    ("rank", "aggregate", "error", "told"),
    [
        (
            7,
            "products",
            ConfigError,
            r"cluster-\d: lora-rank is 7, but the global adapters have ran",
        ),
        (
            2,
            "factors",
            ConfigError,
            r"cluster-\d: lora-rank is 2, and factors of other ranks than 6",
        ),
        (
            0,
            "products",
            RunError,
            r"node-config lora-rank must be .* of at least 1, or left out .*, got 0",
        ),
        (2.5, "products", RunError, r"node-config lora-rank must be a whole number .*, got 2\.5"),
        (True, "products", RunError, "node-config lora-rank must be a whole number .*, got True"),
    ],
)
def test_a_rank_that_cannot_be_aggregated_is_refused(
    rank: Any, aggregate: str, error: type[Exception], told: str, base: str
) -> None:
    ranks = {1: rank, 2: rank}
    with pytest.raises(error, match=told):
        start(new_model(base), FedAvg(min_train_nodes=1), ranks=ranks, aggregate=aggregate)


def test_what_factors_of_their_own_in_every_round_would_spoil_is_refused(
    base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = new_model(base)
    with pytest.raises(RunError, match=r"train\.optimizer-state.*lora\.aggregate=factors"):
        start(model, FedAvg(), learning=LearningSettings(keep_optimizer=True))
    with pytest.raises(RunError, match=r"round-late.*lora\.aggregate=factors"):
        start(model, FedAvg(), late="join")
    with pytest.raises(RunError, match=r"relies on updates that clients clip.*server's side"):
        start(model, PRIVATE["DifferentialPrivacyClientSideFixedClipping"]())
    with pytest.raises(RunError, match=r"updates in top-k need lora\.aggregate=factors"):
        start(model, FedAvg(), learning=LearningSettings(updates="top-k"))
    monkeypatch.setattr(products, "MOST_BYTES", 1000)
    with pytest.raises(RunError, match=r"FedAdam needs the whole products.*use FedAvg or FedProx"):
        start(model, FedAdam())
    with pytest.raises(ModelError, match="personal names adapters"):
        SplitModel(
            model,
            batch_size=BATCH,
            length=LENGTH,
            personal=["model.layers.0"],
            aggregate="products",
        )


def test_a_strategy_that_changes_what_it_sends_is_refused(base: str) -> None:
    class Changing(FedAdam):
        def configure_train(self, server_round, arrays, config, grid):
            doubled = {key: Array(2 * array.numpy()) for key, array in arrays.items()}
            return super().configure_train(server_round, ArrayRecord(doubled), config, grid)

    with pytest.raises(RunError, match="changes the model that it sends"):
        start(new_model(base), Changing(**ALONE))

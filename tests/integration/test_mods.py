"""Flower's mods around a real split model: what they bound and noise is the whole update."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Context, Message
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import (
    LocalDpMod,
    adaptiveclipping_mod,
    fixedclipping_mod,
    message_size_mod,
)
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideFixedClipping,
    FedAvg,
    Strategy,
)
from transformers import BertConfig, BertForSequenceClassification

from collapipe_flwr.federation.arrays import decode_tensors
from collapipe_flwr.federation.client.cluster import Cluster
from collapipe_flwr.federation.local_grid import LocalGrid
from collapipe_flwr.federation.strategy import CollaPipe
from collapipe_flwr.models.split_model import SplitModel
from collapipe_flwr.pipeline.optimizer import OptimizerConfig
from tests.thorough import few

NORM = 0.05
HEAD = "classifier.weight"
Batch = dict[str, torch.Tensor]


class Watching(FedAvg):
    """Keeps the models that it aggregates."""

    def aggregate_train(self, server_round, replies):
        self.failures = [r.error.reason for r in replies if r.has_error()]
        self.seen = [decode_tensors(r.content["arrays"]) for r in replies if r.has_content()]
        return super().aggregate_train(server_round, replies)


@pytest.fixture
def model() -> BertForSequenceClassification:
    torch.manual_seed(3)
    config = BertConfig(
        vocab_size=30,
        hidden_size=8,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=12,
        max_position_embeddings=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return BertForSequenceClassification(config)


def batches(seed: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 30, (3, 4, 6), generator=generator)
    labels = torch.randint(0, 2, (3, 4), generator=generator)
    return [{"input_ids": i, "labels": y} for i, y in zip(ids, labels, strict=True)]


def node(seed: int, *mods: Callable) -> ClientApp:
    app = ClientApp()
    cluster = Cluster(app)

    @app.train(mods=list(mods))
    def train(message: Message, context: Context) -> Message:
        return cluster.train(message, context, batches(seed))

    return app


def trained(model: BertForSequenceClassification, inner: Strategy, *mods: Callable) -> None:
    """One round of two clusters with these mods."""
    places = {n: {"partition-id": n - 1, "num-partitions": 2} for n in (1, 2)}
    grid = LocalGrid({n: node(n, *mods) for n in places}, node_configs=places)
    split = SplitModel(model, batch_size=4, length=6)
    strategy = CollaPipe(inner, model=split, optimizer=OptimizerConfig(learning_rate=0.05))
    strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=1)
    asked = [message for message in grid.sent if message.metadata.message_type == "train"]
    assert [list(message.content["arrays"]) for message in asked] == [list(model.state_dict())] * 2


def updates(model: BertForSequenceClassification, inner: Watching) -> list[dict]:
    assert inner.failures == []
    before = model.state_dict()
    assert [list(new) for new in inner.seen] == [list(before)] * 2
    return [{key: new[key] - before[key] for key in new} for new in inner.seen]


def norm(update: dict[str, torch.Tensor]) -> float:
    return float(torch.cat([t.double().flatten() for t in update.values()]).norm())


@pytest.mark.parametrize("adaptive", few([False, True], 1))
def test_clipping_bounds_what_devices_and_edge_learnt_together(model, adaptive):
    free = Watching(fraction_evaluate=0.0)
    trained(model, free, message_size_mod)
    inner = Watching(fraction_evaluate=0.0)
    if adaptive:
        private: Strategy = DifferentialPrivacyClientSideAdaptiveClipping(
            inner, 0.0, 2, initial_clipping_norm=NORM
        )
    else:
        private = DifferentialPrivacyClientSideFixedClipping(inner, 0.0, NORM, 2)
    trained(model, private, adaptiveclipping_mod if adaptive else fixedclipping_mod)
    for clipped, learnt in zip(updates(model, inner), updates(model, free), strict=True):
        assert norm(clipped) == pytest.approx(NORM, rel=1e-4)
        assert norm(learnt) > 10 * NORM
        factor = NORM / norm(learnt)
        for key, tensor in learnt.items():
            torch.testing.assert_close(clipped[key], factor * tensor, rtol=1e-3, atol=1e-6)
        assert clipped[HEAD].abs().max() > 0


def test_local_noise_reaches_every_parameter(model):
    np.random.seed(4)
    inner = Watching(fraction_evaluate=0.0)
    trained(model, inner, LocalDpMod(NORM, sensitivity=1.0, epsilon=1.0, delta=0.1))
    for update in updates(model, inner):
        assert all((tensor != 0).all() for tensor in update.values())
        assert norm(update) > 1.0


def test_clipping_at_the_server_bounds_the_joined_update(model):
    inner = Watching(fraction_evaluate=0.0)
    trained(model, DifferentialPrivacyServerSideFixedClipping(inner, 0.0, NORM, 2))
    for update in updates(model, inner):
        assert norm(update) == pytest.approx(NORM, rel=1e-4)

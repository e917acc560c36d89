"""The server knows how far each cluster's round is, if the edge tells, and waits for none."""

from __future__ import annotations

import socket

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from transformers import BertConfig, BertForSequenceClassification

from collapipe_flwr.federation import split
from collapipe_flwr.federation.arrays import encode_tensors
from collapipe_flwr.federation.client.cluster import Cluster
from collapipe_flwr.federation.local_grid import LocalGrid
from collapipe_flwr.federation.split import DefaultEdge
from collapipe_flwr.federation.strategy import CollaPipe
from collapipe_flwr.models.split_model import SplitModel
from collapipe_flwr.transport.client import HostClient
from tests.federation.split_clusters import FixedPlanner, model, trainer, wrapped
from tests.ports import free_port

BATCHES = 3


def narrow_bert() -> BertForSequenceClassification:
    torch.manual_seed(3)
    config = BertConfig(
        vocab_size=30,
        hidden_size=8,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=12,
        max_position_embeddings=16,
    )
    return BertForSequenceClassification(config)


def test_the_edge_counts_the_micro_batches_of_the_open_round_alone() -> None:
    """Neither those of the round before, nor those of training while it is evaluated."""
    app, seen = ClientApp(), []
    cluster = Cluster(app)
    batches = [{"input_ids": torch.ones(4, 6).long(), "labels": torch.ones(4).long()}] * BATCHES

    def look() -> tuple[float, float]:
        (found,) = strategy.cluster_progress().values()
        return found.trained / found.per_step, found.tested / found.per_step

    @app.train()
    def train(message: Message, context: Context) -> Message:
        seen.append(look())
        reply = cluster.train(message, context, batches)
        seen.append(look())
        return reply

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        seen.append(look())
        reply = cluster.evaluate(message, context, batches)
        seen.append(look())
        return reply

    whole = narrow_bert()
    inner = FedAvg(min_train_nodes=1, min_evaluate_nodes=1, min_available_nodes=1)
    strategy = CollaPipe(inner, model=SplitModel(whole, batch_size=4, length=6))
    grid = LocalGrid({1: app}, node_configs={1: {"partition-id": 0, "num-partitions": 1}})
    strategy.start(grid, ArrayRecord(whole.state_dict()), num_rounds=2)
    assert seen == [(0, 0), (BATCHES, 0), (0, 0), (0, BATCHES)] * 2
    assert strategy.cluster_progress() == {}  # no round is open


@pytest.mark.parametrize("silent", [True, False])
def test_an_edge_that_does_not_answer_tells_nothing(silent: bool, monkeypatch) -> None:
    monkeypatch.setattr(split, "_PROGRESS_S", 0.1)
    with socket.socket() as there:
        there.bind(("127.0.0.1", 0))
        if silent:
            there.listen()
        address = f"127.0.0.1:{there.getsockname()[1] if silent else free_port()}"
        with HostClient(address) as client:
            assert DefaultEdge(client).progress() == {}


def test_a_round_does_not_wait_for_an_edge_that_the_server_cannot_reach() -> None:
    grid = LocalGrid({1: trainer(1.0, 10)})
    inner = FedAvg(fraction_evaluate=0.0, min_train_nodes=1, min_available_nodes=1)
    strategy = wrapped(FixedPlanner("c1"), [], inner)
    strategy.configure_train(1, encode_tensors(model()), ConfigRecord(), grid)
    told = strategy.cluster_progress()
    assert (told["c1"].trained, told["c1"].of) == (0, 10)  # as planned
    strategy.close()

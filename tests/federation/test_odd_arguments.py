"""Odd and wrong arguments of the library: one sentence that names the argument and the way out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from torch import Tensor, nn
from torch.utils.data import DataLoader

from collapipe_flwr import (
    Cluster,
    CollaPipe,
    CollaPipeError,
    EdgeConfig,
    Execution,
    OptimizerConfig,
    SchedulerConfig,
    SplitModel,
)
from collapipe_flwr.cluster.loader import LoaderBatches
from tests.federation.test_library import grid, loader, new_model, plain_client, split

BATCH = next(iter(loader(1)))


class Net(nn.Module):
    """Two blocks of a kind, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2))
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        for block in self.blocks:
            hidden = block(hidden)
        out: Tensor = self.head(hidden)
        return out


def pair_loss(output: Tensor, batch: dict[str, Tensor]) -> Any:
    mean = nn.functional.cross_entropy(output, batch["labels"])
    return mean, output


def loss_of_every_row(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(output, batch["labels"], reduction="none")


def number_loss(output: Tensor, batch: dict[str, Tensor]) -> Any:
    return float(nn.functional.cross_entropy(output, batch["labels"]))


def no_loss(output: Tensor, batch: dict[str, Tensor]) -> Any:
    del output, batch


ROWS = {"x": torch.randn(4, 3), "labels": torch.tensor([0, 1, 0, 1])}
own = partial(SplitModel, Net, example=ROWS)
bert = partial(SplitModel, new_model(), example=BATCH)


def run_inner(hook: str) -> None:
    inner = FedAvg(fraction_evaluate=0.0)
    setattr(inner, hook, forget)
    _run(CollaPipe(inner, on_total_failure="raise"), plain_client())


def forget(*_: object, **__: object) -> None:
    """Return nothing, where something is wanted."""


def steps_of(batches: Any) -> list[object]:
    """What a cluster trains on, of what a client hands over."""
    return list(LoaderBatches(loader=batches).cut_steps(8, 8))


def _run(strategy: CollaPipe, app: ClientApp) -> None:
    strategy.start(
        grid=grid(app),
        initial_arrays=ArrayRecord(deepcopy(new_model().state_dict())),
        num_rounds=1,
    )


def nothing() -> Iterator[Any]:
    yield from ()


SPLIT: list[tuple[str, Callable[[], object], str]] = [
    (
        "a name for a model",
        lambda: SplitModel("bert-base-uncased", batch_size=2),
        "bert-base-uncased",
    ),
    ("no model", lambda: SplitModel(None, batch_size=2), "nn.Module None"),  # type: ignore[arg-type]
    (
        "a model without weights",
        lambda: SplitModel(new_model().to("meta"), example=BATCH),
        "meta",
    ),
    ("an empty example", lambda: own(example={}), "example"),
    ("a loader for an example", lambda: own(example=DataLoader([1, 2])), "DataLoader batch"),
    ("a loss of two", lambda: own(loss=pair_loss), "loss tuple"),
    ("a loss of every row", lambda: own(loss=loss_of_every_row), "loss"),
    ("a loss that is a float", lambda: own(loss=number_loss), "loss float"),
    ("a loss of None", lambda: own(loss=no_loss), "loss None"),
    ("a loss that is a number", lambda: own(loss=5), "loss int"),
    ("a batch size in words", lambda: bert(batch_size="8"), "batch_size '8'"),
    ("a batch size of 0", lambda: bert(batch_size=0), "batch_size"),
    ("a length below 0", lambda: bert(length=-3), "length -3"),
    ("personal as a text", lambda: bert(personal="classifier"), "personal"),
    ("personal of nothing", lambda: bert(personal=("nosuch",)), "personal nosuch"),
    ("a weight that is not there", lambda: own(weight="nosuch"), "weight nosuch"),
    ("too many edge blocks", lambda: bert(edge_blocks=99), "99"),
    ("edge blocks below 0", lambda: bert(edge_blocks=-1), "edge_blocks -1"),
    ("blocks that are not there", lambda: own(blocks="layers"), "layers"),
]
OTHERS: list[tuple[str, Callable[[], object], str]] = [
    ("no strategy", lambda: CollaPipe(None), "strategy None"),  # type: ignore[arg-type]
    ("a scheduler of 5", lambda: CollaPipe(FedAvg(), scheduler=5), "scheduler 5"),  # type: ignore[arg-type]
    (
        "an unknown scheduler",
        lambda: CollaPipe(FedAvg(), model=split(), scheduler="x"),
        "scheduler 'x' dssda",
    ),
    ("a record taker of 5", lambda: CollaPipe(FedAvg(), on_round=5), "on_round 5"),  # type: ignore[arg-type]
    ("retries below 0", lambda: CollaPipe(FedAvg(), retries=-1), "retries -1"),
    ("retries in words", lambda: CollaPipe(FedAvg(), retries="3"), "retries '3'"),  # type: ignore[arg-type]
    (
        "an unknown optimizer",
        lambda: CollaPipe(FedAvg(), model=split(), optimizer="adamm"),
        "optimizer adamm",
    ),
    ("a rate in words", lambda: OptimizerConfig(learning_rate="fast"), "learning fast"),  # type: ignore[arg-type]
    ("an unknown precision", lambda: Execution(precision="fp64"), "precision fp64"),
    ("no micro-batches", lambda: SchedulerConfig(micro_batches=()), "micro-batches"),
    ("an edge nowhere", lambda: CollaPipe(FedAvg(), model=split(), edge="here"), "edge here"),
    ("an edge of 5", lambda: EdgeConfig(address=5), "address 5"),  # type: ignore[arg-type]
    ("no app", lambda: Cluster(None), "app None"),  # type: ignore[arg-type]
    ("devices of 3", lambda: Cluster(ClientApp(), devices=3), "devices 3"),  # type: ignore[arg-type]
    ("no threads", lambda: Cluster(ClientApp(), threads=0), "threads 0"),
    ("a share of 2", lambda: Cluster(ClientApp(), memory_share=2), "memory-share 2"),
    ("a loader of nothing", lambda: steps_of([]), "no batch"),
    ("a loader that is spent", lambda: steps_of(nothing()), "no batch"),
    ("no loader", lambda: steps_of(None), "None"),
    ("texts for batches", lambda: steps_of(["a", "b"]), "str"),
    ("a strategy without messages", lambda: run_inner("configure_train"), "configure_train None"),
    ("a strategy without a result", lambda: run_inner("aggregate_train"), "aggregate_train None"),
]
ALL = [*SPLIT, *OTHERS]


@pytest.mark.parametrize(("make", "words"), [row[1:] for row in ALL], ids=[row[0] for row in ALL])
def test_an_odd_argument_is_refused_in_one_sentence(make: Callable[[], object], words: str) -> None:
    with pytest.raises(CollaPipeError) as refusal:
        make()
    sentence = str(refusal.value)
    assert all(word in sentence for word in words.split()), sentence
    assert "unexpected" not in sentence and len(sentence) < 600

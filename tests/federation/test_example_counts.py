"""What a cluster says about its examples is believed, unless no round reaches it."""

from __future__ import annotations

import math

import pytest
import torch
from flwr.app import Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg

from collapipe_flwr.federation.arrays import decode_tensors, encode_tensors
from collapipe_flwr.federation.local_grid import LocalGrid
from collapipe_flwr.federation.strategy import CollaPipe
from tests.federation.split_clusters import FixedPlanner, model, trainer, wrapped

ABSURD = 10**18


def averaged(second: int, records: list) -> float:
    """What becomes of a weight to which clusters add 1 and 3; the first has 40 examples."""
    grid = LocalGrid({1: trainer(1.0, 40), 2: trainer(3.0, second)})
    strategy = wrapped(FixedPlanner("c1", "c2"), records)
    final = decode_tensors(strategy.start(grid, encode_tensors(model()), num_rounds=1).arrays)
    return float(final["embed.weight"][0, 0]) - 1.0


def test_only_absurd_claims_are_refused() -> None:
    records: list = []
    assert averaged(4000, records) == pytest.approx((40 + 12000) / 4040)
    assert averaged(ABSURD, records) == 1.0
    assert "claims num-examples = 1e+18, which no round reaches" in records[1].failures["c2"]


@pytest.mark.parametrize("claimed", [ABSURD, -1, math.inf, math.nan])
def test_whole_clients_with_an_absurd_number_of_examples_do_not_enter_the_average(claimed) -> None:
    records: list = []
    final = _whole_round({1: (1.0, 40), 2: (3.0, claimed)}, records)
    assert final.tolist() == [2.0, 2.0]
    assert "which no round reaches" in records[0].failures["node-2"]


def test_whole_clients_with_weights_that_are_not_finite_do_not_enter_the_average() -> None:
    records: list = []
    final = _whole_round({1: (1.0, 40), 2: (math.nan, 40)}, records)
    assert final.tolist() == [2.0, 2.0]
    assert "it returned w with values that are not finite" in records[0].failures["node-2"]


def _whole_round(clients: dict[int, tuple[float, float]], records: list) -> torch.Tensor:
    def client(step: float, examples: float):
        def train(message: Message, context) -> Message:
            del context
            moved = {"w": decode_tensors(message.content.array_records["arrays"])["w"] + step}
            metrics = MetricRecord({"num-examples": examples})
            content = RecordDict({"arrays": encode_tensors(moved), "metrics": metrics})
            return Message(content, reply_to=message)

        return train

    grid = LocalGrid({node: client(*told) for node, told in clients.items()})
    strategy = CollaPipe(FedAvg(fraction_evaluate=0.0), on_round=records.append)
    result = strategy.start(grid, encode_tensors({"w": torch.ones(2)}), num_rounds=1)
    return decode_tensors(result.arrays)["w"]

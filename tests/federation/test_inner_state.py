"""A strategy returns to its state before a round that is repeated or refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAdagrad, FedAdam, FedAvgM, FedYogi

from collapipe_flwr.federation.arrays import decode_tensors, encode_tensors
from collapipe_flwr.federation.checkpoint import encode_state
from collapipe_flwr.federation.inner_state import remember
from collapipe_flwr.federation.local_grid import LocalGrid
from collapipe_flwr.federation.records import ARRAYS, METRICS
from collapipe_flwr.federation.strategy import CollaPipe
from tests.federation.strategies import AVERAGING, Make

NODES = range(1, 6)
HUGE = 3e38  # finite, but not twice


def trained(message: Message, context: Context) -> Message:
    weights = decode_tensors(message.content[ARRAYS])
    moved = {key: tensor + context.node_id for key, tensor in weights.items()}
    metrics = MetricRecord({"loss": 1.0, "num-examples": 10})
    return Message(RecordDict({ARRAYS: encode_tensors(moved), METRICS: metrics}), reply_to=message)


def state(strategy) -> tuple[object, dict[str, list[float]]]:
    arrays: dict = {}
    return encode_state(strategy, arrays), {key: value.tolist() for key, value in arrays.items()}


@pytest.mark.parametrize("name", sorted(AVERAGING))
def test_every_averaging_strategy_returns_to_where_it_was(name: str) -> None:
    make: Make = AVERAGING[name]
    strategy = make(fraction_evaluate=0.0)
    arrays = encode_tensors({"w": torch.ones(3)})
    grid = LocalGrid(dict.fromkeys(NODES, trained))
    for _ in range(2):  # from its beginning, then from the state after a round
        before, undo = state(strategy), remember(strategy)
        arrays = strategy.start(grid, arrays, num_rounds=1).arrays
        after = state(strategy)
        undo()
        assert state(strategy) == before
        strategy.start(grid, arrays, num_rounds=1)
        undo()
        assert state(strategy) == before
        strategy.start(grid, arrays, num_rounds=1)
    assert name in ("FedAdam", "FedAvgM", "FedYogi", "FedAdagrad", "QFedAvg") or after == before


def test_tensors_optimizers_and_views_return_in_place() -> None:
    class Stepping(FedAvgM):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(2, 2)
            self.optimizer = torch.optim.Adam(self.layer.parameters())
            self.generator = torch.Generator().manual_seed(3)
            self.rows: list[int] = []

    strategy = Stepping()
    rows, weight = strategy.rows, strategy.layer.weight
    before, undo = weight.detach().clone(), remember(strategy)
    drawn = torch.rand(1, generator=strategy.generator)
    for _ in range(2):
        strategy.layer(torch.ones(2)).sum().backward()
        strategy.optimizer.step()
        rows.append(1)
        strategy.more = 1
        undo()
        assert strategy.rows is rows and rows == []
        assert strategy.layer.weight is weight and torch.equal(weight, before)
        assert not strategy.optimizer.state and not hasattr(strategy, "more")
        assert torch.equal(torch.rand(1, generator=strategy.generator), drawn)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_refused_aggregate_is_recorded_and_costs_its_round_alone() -> None:
    own = {"server_momentum": 0.9, "server_learning_rate": 3.0}
    records: list = []

    def train(message: Message, context: Context) -> Message:
        reply = trained(message, context)
        if len(records) == 1 and context.node_id == 1:
            reply.content[ARRAYS] = encode_tensors({"w": torch.full((3,), HUGE)})
        return reply

    strategy = CollaPipe(FedAvgM(fraction_evaluate=0.0, **own), on_round=records.append)
    grid = LocalGrid(dict.fromkeys((1, 2), train))
    result = strategy.start(grid, encode_tensors({"w": torch.ones(3)}), num_rounds=4)
    refused = [
        any("infinite or NaN" in said for said in map(str, record.incidents)) for record in records
    ]
    assert refused == [False, True, False, False]
    twin = CollaPipe(FedAvgM(fraction_evaluate=0.0, **own))
    grid = LocalGrid(dict.fromkeys((1, 2), trained))
    wanted = twin.start(grid, encode_tensors({"w": torch.ones(3)}), num_rounds=3)
    found, expected = (decode_tensors(each.arrays)["w"] for each in (result, wanted))
    assert torch.equal(found, expected)  # as if the refused round had not been


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("kind", [FedAdam, FedAdagrad, FedYogi])
def test_a_moment_that_becomes_infinite_is_refused_with_its_aggregate(kind: type) -> None:
    """The second moment is a square: it overflows while the aggregate is finite."""
    records: list = []

    def train(message: Message, context: Context) -> Message:
        reply = trained(message, context)
        if len(records) == 1:
            reply.content[ARRAYS] = encode_tensors({"w": torch.full_like(start["w"], 1e200)})
        return reply

    start = {"w": torch.ones(3, dtype=torch.float64)}
    strategy = CollaPipe(kind(fraction_evaluate=0.0), on_round=records.append)
    grid = LocalGrid(dict.fromkeys((1, 2), train))
    strategy.start(grid, encode_tensors(start), num_rounds=4)
    said = [str(told) for record in records for told in record.incidents]
    assert len(said) == 1 and "v_t infinite or NaN" in said[0]
    assert np.isfinite(strategy.inner_strategy.v_t["w"]).all()


def test_infinities_of_the_model_itself_are_no_fault_of_its_moments() -> None:
    """A mask of -inf has no difference to what it was, so its moments are NaN."""
    start = encode_tensors({"w": torch.ones(3), "mask": torch.full((3,), float("-inf"))})
    records: list = []
    strategy = CollaPipe(FedAdam(fraction_evaluate=0.0), on_round=records.append)
    with np.errstate(invalid="ignore"):
        strategy.start(LocalGrid(dict.fromkeys((1, 2), trained)), start, num_rounds=2)
    assert np.isnan(strategy.inner_strategy.m_t["mask"]).all()
    assert not any(record.incidents for record in records)

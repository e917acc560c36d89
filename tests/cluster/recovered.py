"""Rounds in which devices may die, and those that nothing disturbs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from torch import Tensor

from collapipe_flwr.cluster.control_unit import ClusterResult, train_round
from collapipe_flwr.cluster.fleet import ThreadFleet
from collapipe_flwr.cluster.hosted import ThreadEdge
from collapipe_flwr.cluster.order import TrainingOrder
from collapipe_flwr.core.domain import ClusterPlan
from collapipe_flwr.models.splitter import Splitter
from collapipe_flwr.pipeline.optimizer import OptimizerConfig
from tests.cluster.faults import Fault, failing
from tests.rounds import Cut, make_splitter, micro_batches, order_of, recovery, steps_of

RULE = OptimizerConfig(name="adamw", learning_rate=1e-2)
DROPOUT, SEED, STEPS = 0.1, 3, 3
CUT = Cut(stops=(1, 3, 5), micro_batches=(2, 1), schedule="1f1b")


@pytest.fixture(scope="module")
def splitter() -> Splitter:
    return make_splitter("bert", DROPOUT)


@pytest.fixture(scope="module")
def first(splitter: Splitter) -> dict[str, Tensor]:
    return splitter.initial_weights(seed=1)


def order(
    first: dict[str, Tensor], plan: ClusterPlan | None = None, *, every: int = 0
) -> TrainingOrder:
    asked = order_of(CUT, first, RULE, every=every, dropout_seed=SEED)
    return replace(asked, plan=plan or CUT.plan())


def run(
    splitter: Splitter,
    first: dict[str, Tensor],
    *faults: Fault,
    every: int = 0,
    die: Callable[[], None] | None = None,
) -> tuple[ClusterResult, dict[str, Tensor]]:
    """A round in which devices die; its result, and all weights."""
    fleet = ThreadFleet(ThreadEdge(), failing(*faults, die=die))
    batches = micro_batches(splitter, steps_of(splitter, CUT, STEPS))
    asked = order(first, every=every)
    plans = recovery(splitter)
    result = train_round(splitter, asked, iter(batches), fleet, recovery=plans)
    return result, dict(result.weights)


@pytest.fixture(scope="module")
def undisturbed(splitter: Splitter, first: dict[str, Tensor]):
    """Weights of a round that nothing disturbs, by plan."""
    known: dict[tuple, dict[str, Tensor]] = {}

    def on(plan: ClusterPlan) -> dict[str, Tensor]:
        if plan.segments not in known:
            batches = micro_batches(splitter, steps_of(splitter, CUT, STEPS))
            fleet = ThreadFleet(ThreadEdge())
            result = train_round(splitter, order(first, plan), batches, fleet)
            known[plan.segments] = dict(result.weights)
        return known[plan.segments]

    return on

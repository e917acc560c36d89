"""The guarantees of drift plus penalty with their constants computed, over a sweep of V.

A static world makes the optimum over randomised plans a linear program. It is solved over every
plan that any run here met, which can only be worse than the optimum over all plans.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
from scipy.optimize import linprog

from collapipe_flwr.core.domain import ModelProfile
from collapipe_flwr.costs.tables import tabulate
from collapipe_flwr.scheduler.base import price_energy
from collapipe_flwr.scheduler.policies import make_scheduler
from collapipe_flwr.scheduler.protocol import SchedulerConfig, require_reference
from collapipe_flwr.simulation.episode import run_episode
from collapipe_flwr.simulation.world import World
from tests.computed_once import computed_once
from tests.worlds import QueuesAlone, four_boards

ROUNDS = 26
WEIGHTS = (0.1, 1.0, 10.0)
SETTINGS = SchedulerConfig(
    schedule="gpipe",
    micro_batch_sizes=(4,),
    micro_batches=(4,),
    bound=False,
    hysteresis=0.0,
    energy_advance=0.0,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """One run: what every round cost and took, and the queues before it, energies in budgets."""

    weight: float
    cost: np.ndarray  # (T,) latency over the reference's, plus thrift
    energy: np.ndarray  # (T, members) over the budget
    queue: np.ndarray  # (T + 1, members) over the budget

    def paid(self) -> np.ndarray:
        """The objective of every round."""
        return self.weight * self.cost + (self.queue[:-1] * self.energy).sum(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """What the bounds are made of."""

    drift: float  # C: half the largest sum of squared deviations from the budgets
    optimum: float  # of the linear program
    jump: float  # largest change of the queue vector in a round

    def gap(self, path: Path, plans: Path) -> float:
        """C + A: the drift's constant and how far rounds were from the best plan known."""
        best = (path.weight * plans.cost + path.queue[:-1] @ plans.energy.T).min(1)
        return self.drift + max(float((path.paid() - best).max()), 0.0)


@pytest.fixture(scope="module")
def world() -> tuple[World, ModelProfile]:
    return four_boards(0.4)


def walk(world: World, model: ModelProfile, policy: str, weight: float) -> Path:
    """One episode, in units of the reference's latency and of the budgets."""
    settings = replace(SETTINGS, penalty_weight=weight)
    scheduler = QueuesAlone(settings) if policy == "queues" else make_scheduler(policy, settings)
    snapshot = world.snapshot(1, model)
    first = scheduler.init(snapshot)
    budget = first.budget_j["cluster-0"]
    idle = price_energy(tabulate(snapshot), first, settings)[0] / weight
    done = list(run_episode(world, scheduler, model, ROUNDS, options=settings))
    spent = np.array([[r.outcome.clusters[0].energy_j.get(d, 0.0) for d in budget] for r in done])
    owed = [[r.state.energy_queue_j["cluster-0"][d] for d in budget] for r in done]
    unit = np.array(list(budget.values()))
    latency = np.array([r.latency_s for r in done]) / require_reference(first).latency_s
    return Path(
        weight=weight,
        cost=latency + spent @ idle[: len(unit)],
        energy=spent / unit,
        queue=np.array([[0.0] * len(unit), *owed]) / unit,
    )


@pytest.fixture(scope="module")
def walks(
    world: tuple[World, ModelProfile], tmp_path_factory: pytest.TempPathFactory
) -> list[Path]:
    """With every weight, and one that heeds no queue."""

    def all_of_them() -> list[Path]:
        heeding = [walk(*world, "queues", weight) for weight in WEIGHTS]
        return [*heeding, walk(*world, "latency-only", WEIGHTS[0])]

    return computed_once(tmp_path_factory, "tradeoff", all_of_them)


@pytest.fixture(scope="module")
def paths(walks: list[Path]) -> list[Path]:
    return walks[:-1]


@pytest.fixture(scope="module")
def reckless(walks: list[Path]) -> Path:
    return walks[-1]


@pytest.fixture(scope="module")
def plans(paths: list[Path], reckless: Path) -> Path:
    """Every plan met, as one long path."""
    every = [*paths, reckless]
    return Path(
        weight=1.0,
        cost=np.concatenate([p.cost for p in every]),
        energy=np.concatenate([p.energy for p in every]),
        queue=np.zeros((0, 0)),
    )


def mixed_cost(plans: Path, slack: float) -> float:
    """Least mean cost of a random mix of plans whose mean energies keep ``slack``; else inf."""
    allowed = 1.0 - SETTINGS.budget_margin - slack
    found = linprog(
        plans.cost,
        A_ub=plans.energy.T,
        b_ub=np.full(plans.energy.shape[1], allowed),
        A_eq=np.ones((1, len(plans.cost))),
        b_eq=[1.0],
    )
    return float(found.fun) if found.status == 0 else np.inf


@pytest.fixture(scope="module")
def constants(plans: Path) -> Constants:
    squares = ((plans.energy - (1.0 - SETTINGS.budget_margin)) ** 2).sum(1).max()
    optimum = mixed_cost(plans, 0.0)
    assert np.isfinite(optimum)
    return Constants(drift=float(squares / 2), optimum=optimum, jump=float(squares**0.5))


def test_cost_is_within_c_over_v_of_the_optimum(
    paths: list[Path], plans: Path, constants: Constants
) -> None:
    """O(1/V): mean cost - optimum <= (C + A) / V for every V."""
    for path in paths:
        gap = constants.gap(path, plans)
        assert gap <= constants.drift + 0.02 * path.paid().max()  # each round is nearly optimal
        assert path.cost.mean() - constants.optimum <= gap / path.weight
    thrifty, hasty = paths[0], paths[-1]  # what a small V does breaks the bound of a large one
    allowed = constants.gap(hasty, plans) / hasty.weight
    assert thrifty.cost.mean() - constants.optimum > allowed


def queue_limit(path: Path, plans: Path, constants: Constants) -> float:
    """(C + A + V (cost - least cost)) / slack of the best mix with slack, plus one jump."""
    gap, least = constants.gap(path, plans), plans.cost.min()
    limits = [
        (gap + path.weight * (mixed_cost(plans, slack) - least)) / slack
        for slack in np.linspace(0.02, 0.9, 23)
    ]
    return float(min(limits)) + constants.jump


def test_queues_are_bounded_linearly_in_v(
    paths: list[Path], reckless: Path, plans: Path, constants: Constants
) -> None:
    """O(V): the queue vector never leaves a ball whose radius is affine in V."""
    for path in paths:
        longest = float(np.linalg.norm(path.queue, axis=1).max())
        assert longest <= queue_limit(path, plans, constants)
    grown = float(np.linalg.norm(reckless.queue, axis=1).max())
    assert grown > queue_limit(paths[0], plans, constants)  # queues that nobody heeds do not stay


def test_larger_weights_cost_less_and_owe_more(paths: list[Path]) -> None:
    costs = [path.cost.mean() for path in paths]
    owed = [float(np.linalg.norm(path.queue, axis=1).max()) for path in paths]
    assert costs == sorted(costs, reverse=True)
    assert owed == sorted(owed)

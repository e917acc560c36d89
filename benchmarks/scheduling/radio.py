"""The vectorised radio solver against the cvxpy reference on the same problem."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from benchmarks.scheduling.optimality import queued
from collapipe_flwr.core.errors import ScheduleError
from collapipe_flwr.costs.arrays import Array
from collapipe_flwr.costs.chain import Chain, make_chain, price_rows, solve_powers
from collapipe_flwr.costs.layouts import gather_members, make_plan_rows
from collapipe_flwr.costs.tables import tabulate
from collapipe_flwr.scheduler.base import make_solver
from collapipe_flwr.scheduler.policies import make_scheduler
from collapipe_flwr.scheduler.radio.interior_point import Allocation, allocate
from collapipe_flwr.scheduler.radio.problem import make_radio_problem
from collapipe_flwr.simulation.setting import Setting

if TYPE_CHECKING:
    from benchmarks.oracles.radio_reference import ReferenceOptimum

TIMED = (
    "whole calls from layouts to bandwidth and powers, stating the problem included on both sides, "
    "nothing kept between calls; cvxpy_solver_s is Clarabel's own part of cvxpy_s"
)
REPEATS = 5
SEEDS = 10
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class RadioBench:
    """Medians of what ``timed`` says."""

    clusters: int
    fast_s: float
    cvxpy_s: float
    cvxpy_solver_s: float
    speedup: float
    relative_gap: float  # of the fast objective above the reference's; negative is better
    seed: int  # the first whose instance the reference solves
    timed: str = TIMED


@dataclass(frozen=True, slots=True, kw_only=True)
class RadioInstance:
    """Bandwidth and powers to choose for one row per cluster."""

    chain: Chain
    price_rs: Array
    latency_price: float
    bandwidth_hz: float

    def fast(self) -> Allocation:
        """The default solver."""
        return allocate(
            self.chain,
            self.price_rs,
            latency_price=self.latency_price,
            bandwidth_hz=self.bandwidth_hz,
        )

    def reference(self) -> ReferenceOptimum:
        """The optimum by cvxpy; raises ScheduleError where it does not converge."""
        from benchmarks.oracles.radio_reference import solve_reference  # seconds, for few

        problem = make_radio_problem(
            self.chain,
            self.price_rs,
            latency_price=self.latency_price,
            bandwidth_hz=self.bandwidth_hz,
        )
        return solve_reference(problem)

    def value(self, allocation: Allocation) -> float:
        """Latency plus the transmissions' energy, the part that the radio decides."""
        powers = solve_powers(self.chain, allocation.edge_hz_r, allocation.times)
        priced = price_rows(self.chain, allocation.times, powers)
        radiated = (self.price_rs * (priced.energy_j - self.chain.fixed_j)).sum()
        return float(self.latency_price * priced.latency_s.max() + radiated)


def compare_radio(setting: Setting, repeats: int = REPEATS) -> RadioBench:
    """Solve the radio of a first decision both ways; raises ScheduleError if cvxpy never does."""
    for seed in range(SEEDS):
        case = radio_instance(setting, seed)
        try:
            case.reference()
        except ScheduleError:
            continue
        return _compared(case, setting.clusters, seed, repeats)
    raise ScheduleError(f"the cvxpy reference solves none of {SEEDS} instances: update cvxpy")


def _compared(case: RadioInstance, clusters: int, seed: int, repeats: int) -> RadioBench:
    fast_s, allocation = _timed(case.fast, 4 * repeats)
    cvxpy_s, optimum = _timed(case.reference, repeats)
    return RadioBench(
        clusters=clusters,
        fast_s=fast_s,
        cvxpy_s=cvxpy_s,
        cvxpy_solver_s=optimum.solver_s,
        speedup=cvxpy_s / fast_s,
        relative_gap=case.value(allocation) / optimum.objective - 1.0,
        seed=seed,
    )


def radio_instance(setting: Setting, seed: int) -> RadioInstance:
    """The segments of a first decision and the prices of random queues.

    So every transmission trades time for energy at a price of its own.
    """
    profile = setting.model.profile()
    snapshot = setting.world(seed, profile).snapshot(1, profile)
    scheduler = make_scheduler("dssda", setting.settings)
    state = queued(scheduler.init(snapshot), snapshot, np.random.default_rng([seed, 2509]))
    plan, state = scheduler.step(state, snapshot)
    tables = tabulate(snapshot)
    planner = make_solver(tables, state, setting.settings)
    chain = make_chain(tables, make_plan_rows(tables, plan.clusters), setting.settings)
    return RadioInstance(
        chain=chain,
        price_rs=gather_members(planner.price_mi, chain.rows),
        latency_price=planner.latency_price * plan.rho,
        bandwidth_hz=snapshot.radio.bandwidth_hz,
    )


def _timed(call: Callable[[], T], repeats: int) -> tuple[float, T]:
    """Median seconds of a call after one to warm up, and its result."""
    result, seconds = call(), []
    for _ in range(repeats):
        started = time.perf_counter()
        result = call()
        seconds.append(time.perf_counter() - started)
    return float(np.median(seconds)), result

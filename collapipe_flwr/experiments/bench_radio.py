"""The vectorised radio solver against the cvxpy reference on the same problem."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from collapipe_flwr.costs.chain import Chain, chain_of, powers_for, price_rows
from collapipe_flwr.costs.plan_rows import rows_of_plans
from collapipe_flwr.costs.tables import tabulate
from collapipe_flwr.experiments.setting import Setting
from collapipe_flwr.scheduler.allocation import Allocation, allocate
from collapipe_flwr.scheduler.base import planner_for
from collapipe_flwr.scheduler.market import row_prices
from collapipe_flwr.scheduler.radio_problem import radio_problem
from collapipe_flwr.scheduler.reference import solve_reference
from collapipe_flwr.scheduler.registry import make_scheduler

REPEATS = 5
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class RadioBench:
    """Medians of whole calls, problem set-up included on both sides."""

    clusters: int
    fast_s: float
    cvxpy_s: float
    speedup: float
    relative_gap: float  # of the fast objective above the reference's; negative is better


def compare_radio(setting: Setting, repeats: int = REPEATS) -> RadioBench:
    """Allocate bandwidth and power for the segments of a first decision, both ways."""
    profile = setting.model.profile()
    snapshot = setting.world(0, profile).snapshot(1, profile)
    scheduler = make_scheduler("dssda", setting.settings)
    plan, state = scheduler.step(scheduler.init(snapshot), snapshot)
    tables = tabulate(snapshot)
    planner = planner_for(tables, state, setting.settings)
    chain = chain_of(tables, rows_of_plans(tables, plan.clusters), setting.settings.options)
    price_rs = row_prices(planner.price_mi, chain.rows)
    worth, width = planner.latency_price * plan.rho, snapshot.radio.bandwidth_hz

    def fast() -> Allocation:
        return allocate(chain, price_rs, latency_price=worth, bandwidth_hz=width)

    def reference() -> float:
        problem = radio_problem(chain, price_rs, latency_price=worth, bandwidth_hz=width)
        return solve_reference(problem).objective

    fast_s, allocation = _timed(fast, 4 * repeats)
    cvxpy_s, optimum = _timed(reference, repeats)
    return RadioBench(
        clusters=setting.clusters,
        fast_s=fast_s,
        cvxpy_s=cvxpy_s,
        speedup=cvxpy_s / fast_s,
        relative_gap=_objective(chain, price_rs, worth, allocation) / optimum - 1.0,
    )


def _objective(
    chain: Chain,
    price_rs: np.ndarray[tuple[int, ...], np.dtype[np.float64]],
    worth: float,
    allocation: Allocation,
) -> float:
    """Latency plus the transmissions' energy, the part that the radio decides."""
    powers = powers_for(chain, allocation.edge_hz_r, allocation.times)
    priced = price_rows(chain, allocation.times, powers)
    radiated = (price_rs * (priced.energy_j - chain.fixed_j)).sum()
    return float(worth * priced.latency_s.max() + radiated)


def _timed(call: Callable[[], T], repeats: int) -> tuple[float, T]:
    """Median seconds of a call after one to warm up, and its result."""
    result, seconds = call(), []
    for _ in range(repeats):
        started = time.perf_counter()
        result = call()
        seconds.append(time.perf_counter() - started)
    return float(np.median(seconds)), result

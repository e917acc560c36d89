"""The optimum of tiny instances: every layout and batch of every cluster, with its radio optimum.

Combinations are tried in the order of a lower bound (full power with all bandwidth, energy of
infinitely slow transmissions); the search stops when the bound passes the best, so it is exact.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import numpy as np

from collapipe_flwr.core.domain import Plan, Snapshot
from collapipe_flwr.core.errors import ScheduleError
from collapipe_flwr.costs.arrays import Array
from collapipe_flwr.costs.chain import compute_full_power_times, compute_makespan_s, make_chain
from collapipe_flwr.costs.layouts import Layouts, gather_members, stack_layouts
from collapipe_flwr.costs.radio import LN2
from collapipe_flwr.costs.tables import tabulate
from collapipe_flwr.costs.work import fits, sum_radio_energy_j
from collapipe_flwr.scheduler.base import (
    make_initial_state,
    make_plan,
    make_solver,
)
from collapipe_flwr.scheduler.decision import refine_codecs
from collapipe_flwr.scheduler.initial_layouts import all_layouts, count_layouts, rows_for
from collapipe_flwr.scheduler.model_share import cap_shares, find_least_shares, set_model_shares
from collapipe_flwr.scheduler.planner import PlanSolver, Solution
from collapipe_flwr.scheduler.protocol import SchedulerConfig, SchedulerState

MOST_ROWS = 3000
MOST_COMBINATIONS = 200_000


def exhaustive(planner: PlanSolver) -> Solution:
    """The global optimum; raises ScheduleError for instances that are too large."""
    options = [_feasible(planner, m) for m in range(planner.tables.num_clusters)]
    if np.prod([float(len(rows)) for rows in options]) > MOST_COMBINATIONS:
        raise ScheduleError("brute force is for tiny instances: use dssda")
    limits = [_limits(planner, rows) for rows in options]
    best: Solution | None = None
    for bound, choice in sorted(_bounds(planner, options, limits)):
        if best is not None and bound >= best.objective:
            break
        solution = planner.optimize_radio(_combined(options, choice))
        if best is None or solution.objective < best.objective:
            best = solution
    assert best is not None
    return best


def _combined(options: list[Layouts], choice: tuple[int, ...]) -> Layouts:
    return stack_layouts([o.take(np.array([c])) for o, c in zip(options, choice, strict=True)])


def _feasible(planner: PlanSolver, m: int) -> Layouts:
    devices, blocks = int(planner.count_devices()[m]), planner.tables.num_blocks
    if count_layouts(devices, blocks) * len(planner.list_batches()) > MOST_ROWS:
        raise ScheduleError("brute force is for tiny instances: use dssda")
    rows = rows_for(m, *all_layouts(devices, blocks), planner.list_batches())
    good = rows.take(fits(planner.tables, rows, planner.settings))
    if not len(good):
        planner.refuse(np.array([m]))
    return good


def _limits(planner: PlanSolver, rows: Layouts) -> tuple[Array, Array]:
    """Of every row: latency at full power with all bandwidth, energy of endless sends."""
    chain = make_chain(planner.tables, rows, planner.settings)
    width = np.full(len(rows), planner.tables.snapshot.radio.bandwidth_hz)
    times = compute_full_power_times(chain, width)
    latency = chain.fixed_s + chain.steps_r * compute_makespan_s(chain, times)
    slowest = LN2 * chain.hops.bits * chain.noise_over_gain
    backward = np.where(chain.hops.to_edge, 0.0, slowest)
    sends = chain.steps_r * chain.rows.micro_batches_r
    energy = chain.fixed_j + sum_radio_energy_j(sends, slowest, backward)
    return latency, (gather_members(planner.price_mi, rows) * energy).sum(1)


def _bounds(
    planner: PlanSolver, options: list[Layouts], limits: list[tuple[Array, Array]]
) -> Iterator[tuple[float, tuple[int, ...]]]:
    """A lower bound of every combination, with the combination."""
    for choice in product(*(range(len(rows)) for rows in options)):
        rho = planner.learning.compute_rho(planner.tables, _combined(options, choice))
        latency = max(float(t[c]) for (t, _), c in zip(limits, choice, strict=True))
        energy = sum(float(e[c]) for (_, e), c in zip(limits, choice, strict=True))
        yield planner.latency_price * rho * latency + energy, choice


def optimal_plan(
    snapshot: Snapshot, settings: SchedulerConfig, state: SchedulerState | None = None
) -> Plan:
    """The optimal plan of one round; raises ScheduleError for instances that are too large."""
    before = state or make_initial_state(snapshot, settings)
    tables = tabulate(snapshot, settings.coarsest)
    shares = find_least_shares(tables, settings)
    limited = cap_shares(tables, shares, settings)
    planner = make_solver(limited, before, settings)
    plan = make_plan(refine_codecs(planner, exhaustive(planner)), "brute-force", 1.0)
    return set_model_shares(plan, shares, tables, settings)

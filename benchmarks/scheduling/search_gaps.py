"""How far the scheduler's search is from the best of its rivals at the sizes that users have.

Every seed is two decisions: with empty queues, where the objective is the time to the target, and
with drawn ones, where energy counts too. Rivals search at full power and equal bandwidth; then
every plan gets all that the scheduler does about bandwidth and power, steps of 1F1B are played, and
the best plan of all rivals is compared with.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from benchmarks.scheduling.exact_paths import exact
from benchmarks.scheduling.optimality import queued
from benchmarks.scheduling.plain_costs import PlainCosts
from benchmarks.scheduling.rivals import Budget, Plans, anneal, climb, picked, promising
from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.costs.tables import tabulate
from collapipe_flwr.scheduler.base import make_solver
from collapipe_flwr.scheduler.model_share import cap_shares, find_least_shares
from collapipe_flwr.scheduler.planner import PlanSolver, Solution
from collapipe_flwr.scheduler.policies import make_scheduler
from collapipe_flwr.simulation.setting import ModelShape, Setting
from collapipe_flwr.simulation.simulate import Tick

EXACT_DEVICES = 6  # beyond, shortest paths take minutes
EXACT_PAIRS = 4
WORST = 5  # seeds that are named
BOUND = 0.01  # gaps above this are counted
SMALL = Budget(starts=2, climbs=350, pairs=6, chains=32, cooling=1000)
LARGE = Budget(starts=2, climbs=2500, pairs=3, chains=8, cooling=6000)
LARGE_FROM = 20  # clusters


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSize:
    """Clusters, devices of each, blocks, the seeds to draw, and how a step runs."""

    clusters: int
    devices: int
    blocks: int
    seeds: range
    schedule: str = "gpipe"
    recompute: bool = False

    def __str__(self) -> str:
        shape = f"{self.clusters}x{self.devices}x{self.blocks}"
        mode = f"{self.schedule}{':recompute' if self.recompute else ''}"
        return shape if mode == "gpipe" else f"{shape}:{mode}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchCase:
    """One decision by the scheduler and by its rivals; objectives with radio optimised."""

    seed: int
    queues: bool
    objective: float
    rho_s: float  # rounds to the target over the reference's, times a round's seconds
    seconds: float  # that the scheduler took
    rivals: dict[str, float]  # objectives
    rivals_rho_s: dict[str, float]

    @property
    def gap(self) -> float:
        """Relative distance above the best rival; the larger of both measures without queues."""
        gap = self.objective / min(self.rivals.values()) - 1.0
        return gap if self.queues else max(gap, self.rho_s / min(self.rivals_rho_s.values()) - 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class GapTable:
    """The distribution of gaps of one size."""

    queues: bool
    instances: int
    median: float
    p90: float
    p99: float
    max: float
    above: int  # gaps of more than ``BOUND``
    better: int  # instances in which every rival is worse by more than ``BOUND``
    median_s: float
    max_s: float
    worst: dict[int, float]  # gaps by seed


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchGaps:
    """All cases of one size and what they come to."""

    size: str
    seeds: str
    tables: tuple[GapTable, ...]
    cases: tuple[SearchCase, ...]


def read_sizes(text: str) -> tuple[SearchSize, ...]:
    """``4x6x12=50000-50199``, ``5x4x12:1f1b:recompute=0-19`` and so on; raises ConfigError."""
    found = []
    for word in text.split(","):
        case, _, seeds = word.strip().partition("=")
        shape, *modes = case.split(":")
        numbers, (first, _, last) = shape.split("x"), seeds.partition("-")
        good = len(numbers) == 3 and all(n.isdigit() and int(n) > 0 for n in numbers)
        good &= set(modes) <= {"gpipe", "1f1b", "recompute"} and len(modes) <= 2
        if not (good and first.isdigit() and (last or first).isdigit()):
            raise ConfigError(
                "--search must list clusters x devices x blocks and seeds, for example "
                f'"4x6x12=0-19" or "4x6x12:1f1b:recompute=0-19", got {word!r}'
            )
        clusters, devices, blocks = (int(n) for n in numbers)
        seed_range = range(int(first), int(last or first) + 1)
        found.append(
            SearchSize(
                clusters=clusters,
                devices=devices,
                blocks=blocks,
                seeds=seed_range,
                schedule="1f1b" if "1f1b" in modes else "gpipe",
                recompute="recompute" in modes,
            )
        )
    return tuple(found)


def search_gaps(size: SearchSize, tick: Tick) -> SearchGaps:
    """Decide every case of a size; seconds to minutes each."""
    cases = []
    for seed in size.seeds:
        for queues in (False, True):
            cases.append(search_case(size, seed, queues))
            tick(f"search {size}")
    return SearchGaps(
        size=str(size),
        seeds=f"{size.seeds.start}-{size.seeds.stop - 1}",
        tables=gap_tables(cases),
        cases=tuple(cases),
    )


def gap_tables(cases: Sequence[SearchCase]) -> tuple[GapTable, ...]:
    """One of empty queues and one of drawn ones."""
    return tuple(_table(cases, queues) for queues in (False, True))


def _table(cases: Sequence[SearchCase], queues: bool) -> GapTable:
    chosen = [case for case in cases if case.queues == queues]
    gaps: NDArray[np.float64] = np.array([case.gap for case in chosen])
    seconds = [case.seconds for case in chosen]
    worst = sorted(chosen, key=lambda case: -case.gap)[:WORST]
    return GapTable(
        queues=queues,
        instances=len(chosen),
        median=float(np.median(gaps)),
        p90=float(np.quantile(gaps, 0.9)),
        p99=float(np.quantile(gaps, 0.99)),
        max=float(gaps.max()),
        above=int((gaps > BOUND).sum()),
        better=int((gaps < -BOUND).sum()),
        median_s=float(np.median(seconds)),
        max_s=float(max(seconds)),
        worst={case.seed: case.gap for case in worst},
    )


def search_case(size: SearchSize, seed: int, queues: bool) -> SearchCase:
    """The first decision of a seed's world, from scratch."""
    planner = search_planner(size, seed, queues)
    started = time.perf_counter()
    ours = planner.solve()
    seconds = time.perf_counter() - started
    rivals = {
        name: with_radio(planner, plans) for name, plans in rival_plans(planner, seed, queues)
    }
    return SearchCase(
        seed=seed,
        queues=queues,
        objective=ours.objective,
        rho_s=_rho_s(ours),
        seconds=seconds,
        rivals={name: rival.objective for name, rival in rivals.items()},
        rivals_rho_s={name: _rho_s(rival) for name, rival in rivals.items()},
    )


def with_radio(planner: PlanSolver, plans: Plans) -> Solution:
    """A rival's plan with all that the scheduler does about bandwidth and power."""
    found = planner.optimize_radio(plans.rows.layouts())
    return planner.shift_bandwidth(found) if planner.settings.schedule == "1f1b" else found


def search_planner(size: SearchSize, seed: int, queues: bool) -> PlanSolver:
    """The preset's grid, budgets and cap on a drawn fleet, with or without energy owed."""
    setting = Setting(
        clusters=size.clusters, devices=size.devices, model=ModelShape(blocks=size.blocks)
    )
    profile = setting.model.profile()
    settings = replace(setting.settings, schedule=size.schedule, recompute=size.recompute)
    snapshot = setting.world(seed, profile).snapshot(1, profile)
    state = make_scheduler("dssda", settings).init(snapshot)
    if queues:
        state = queued(state, snapshot, np.random.default_rng([seed, 2509]))
    tables = tabulate(snapshot, settings.coarsest)
    limited = cap_shares(tables, find_least_shares(tables, settings), settings)
    return make_solver(limited, state, settings)


def rival_plans(planner: PlanSolver, seed: int, queues: bool) -> Iterator[tuple[str, Plans]]:
    """The plan of every rival."""
    costs, rng = PlainCosts(planner), np.random.default_rng(seed)
    budget = LARGE if costs.clusters >= LARGE_FROM else SMALL
    climbed = picked(costs, climb(costs, budget, rng))
    yield "climb", climbed
    yield "anneal", anneal(costs, climbed, budget, rng)
    plain = not costs.overlapped and not planner.settings.recompute
    # Where energy counts, one slope is not enough.
    if costs.devices <= EXACT_DEVICES and not queues and plain:
        pairs = promising(costs, budget)[:EXACT_PAIRS]
        yield "exact", picked(costs, exact(costs, pairs))


def _rho_s(solution: Solution) -> float:
    return solution.rho * float(solution.priced.latency_s.max())

"""Baselines behind the same protocol as DSSDA, and all policies by name.

Rules give weights of a cluster's devices, to cut the blocks in proportion to: ``fedavg`` the
fastest single device; ``splitfed`` the device nearest to the edge holds all blocks; ``uniform``
equal segments on all devices; ``memory`` and ``throughput`` segments in proportion; ``random`` any
devices in any proportion. ``static`` is DSSDA's first plan for ever, ``latency-only`` DSSDA without
queues.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from collapipe_flwr.core.domain import Plan, Snapshot
from collapipe_flwr.core.errors import ConfigError, InfeasibleError
from collapipe_flwr.costs.arrays import Array
from collapipe_flwr.costs.chain import chain_of
from collapipe_flwr.costs.layouts import Layouts, stack
from collapipe_flwr.costs.tables import Tables, tabulate
from collapipe_flwr.costs.work import fits
from collapipe_flwr.scheduler.base import (
    USUAL_WEIGHT,
    Policy,
    known_budgets,
    middle_first,
    planner_for,
    solution_plan,
)
from collapipe_flwr.scheduler.dssda import Dssda, usable_plans
from collapipe_flwr.scheduler.initial_layouts import rows_by_weight
from collapipe_flwr.scheduler.planner import Planner, Solution
from collapipe_flwr.scheduler.protocol import Scheduler, SchedulerConfig, SchedulerState
from collapipe_flwr.scheduler.radio.interior_point import equal_shares

Pairs = Sequence[tuple[int, int]]
"""Micro-batch sizes and counts, the preferred one first."""


Rule = Callable[[Tables, int], Array]
"""Candidate weights of the devices of cluster m, (C, N); the first that fits wins."""


def _devices(tables: Tables, m: int, values_i: Array) -> Array:
    """The devices' part of members' values, 0 for padding."""
    return np.where(tables.members.present_mi[m, 1:], values_i[1:], 0.0)


def _singles(key_n: Array) -> Array:
    """One device each, best key first."""
    order = [int(n) for n in np.argsort(-key_n, kind="stable") if key_n[n] > 0]
    return np.eye(len(key_n))[order]


def _uniform(tables: Tables, m: int) -> Array:
    return _devices(tables, m, np.ones_like(tables.members.speed_mi[m]))[None]


def _random(tables: Tables, m: int) -> Array:
    """Random subsets with random proportions, the same for the same cluster and round."""
    rng = np.random.default_rng([tables.snapshot.round_index, m])
    present = tables.members.present_mi[m, 1:]
    shape = (64, len(present))
    weights = rng.uniform(0.05, 1.0, size=shape) * (rng.random(shape) < 0.6)
    weights = np.where(present, weights, 0.0)
    return np.concatenate([weights[weights.sum(1) > 0], _uniform(tables, m)])


RULES: dict[str, Rule] = {
    "fedavg": lambda t, m: _singles(_devices(t, m, t.members.speed_mi[m])),
    "splitfed": lambda t, m: _singles(_devices(t, m, t.gain_mij[m, :, t.edge])),
    "uniform": _uniform,
    "memory": lambda t, m: _devices(t, m, t.members.memory_mi[m])[None],
    "throughput": lambda t, m: _devices(t, m, t.members.speed_mi[m])[None],
    "random": _random,
}


@dataclass(frozen=True, slots=True)
class RuleScheduler(Policy):
    """A fixed rule for segments, equal bandwidth, full power, the coarsest codec allowed.

    Micro-batches are the middle of the grid or the nearest that fit. With ``best_batches`` the
    first round tries the whole grid, and the pair with the least time to target stays.
    """

    @property
    def rule(self) -> Rule:
        """The rule of that name."""
        return RULES[self.name]

    def step(self, state: SchedulerState, snapshot: Snapshot) -> tuple[Plan, SchedulerState]:
        """Apply the rule; raises InfeasibleError where nothing it names fits."""
        planner = planner_for(tabulate(snapshot, self.settings.coarsest), state, self.settings)
        grid = middle_first(self.settings)
        if not self.settings.best_batches:
            solution = self._solution(planner, {}, grid)
        elif state.last_plan is None:
            every = [self._solution(planner, {}, [pair, *grid]) for pair in grid]
            solution = min(every, key=lambda s: s.objective)
        else:
            kept = {
                c.cluster_id: (c.micro_batch_size, c.micro_batches)
                for c in state.last_plan.clusters
            }
            solution = self._solution(planner, kept, grid)
        plan = solution_plan(solution, self.name, 1.0)
        budgets = known_budgets(state.budget_j, snapshot)
        return plan, replace(state, rounds=state.rounds + 1, budget_j=budgets, last_plan=plan)

    def _solution(
        self, planner: Planner, kept: Mapping[str, tuple[int, int]], pairs: Pairs
    ) -> Solution:
        """The rule's rows with each cluster's ``kept`` pair or else the first of ``pairs``."""
        tables = planner.tables
        chosen = []
        for m, cluster in enumerate(tables.snapshot.clusters):
            own = kept.get(cluster.profile.cluster_id)
            chosen.append(self._row(tables, m, pairs if own is None else [own, *pairs]))
        rows = stack(chosen)
        chain = chain_of(tables, rows, self.settings)
        shares = equal_shares(chain, tables.snapshot.radio.bandwidth_hz)
        return planner.priced(chain, shares, planner.learning.rho(tables, rows))

    def _row(self, tables: Tables, m: int, pairs: Pairs) -> Layouts:
        """The first of the rule's candidates, at the first of ``pairs``, that fits."""
        weights, blocks = self.rule(tables, m), tables.num_blocks
        owner = np.full(len(weights), m, dtype=np.int64)
        for pair in pairs:
            rows = rows_by_weight(owner, weights, blocks, blocks, pair)
            good = fits(tables, rows, self.settings)
            if good.any():
                return rows.take(np.flatnonzero(good)[:1])
        name = tables.snapshot.clusters[m].profile.cluster_id
        raise InfeasibleError(
            f"cluster {name!r}: policy {self.name!r} finds "
            "no layout that fits its devices' memories: use another policy, smaller micro-batches "
            "or larger devices"
        )


@dataclass(frozen=True, slots=True)
class Static(Dssda):
    """DSSDA's first plan, repeated while its parties are there."""

    name: str = "static"

    def step(self, state: SchedulerState, snapshot: Snapshot) -> tuple[Plan, SchedulerState]:
        """Plan once, then repeat; plan again when a cluster or device came or went."""
        usable = usable_plans(state.last_plan, snapshot)
        if state.last_plan is None or len(usable) < len(snapshot.clusters):
            return Dssda.step(self, state, snapshot)
        plan = replace(state.last_plan, round_index=snapshot.round_index, clusters=usable)
        return plan, replace(state, rounds=state.rounds + 1, last_plan=plan)


@dataclass(frozen=True, slots=True)
class LatencyOnly(Dssda):
    """DSSDA that keeps its queues for reporting only."""

    name: str = "latency-only"

    def _started(self, state: SchedulerState, snapshot: Snapshot) -> SchedulerState:
        """Queues that nobody heeds start empty."""
        return replace(state, weight=self.settings.penalty_weight or USUAL_WEIGHT)

    def _room(self, tables: Tables, state: SchedulerState) -> Array:
        """No limit."""
        return np.full_like(tables.members.budget_mi, np.inf)

    def step(self, state: SchedulerState, snapshot: Snapshot) -> tuple[Plan, SchedulerState]:
        """Plan as if every queue were empty."""
        blind = replace(state, energy_queue_j={}, participation_queue={})
        plan, after = Dssda.step(self, blind, snapshot)
        energy, participation = state.energy_queue_j, state.participation_queue
        return plan, replace(after, energy_queue_j=energy, participation_queue=participation)


_JOINT: Mapping[str, type[Dssda]] = {
    "dssda": Dssda,
    "static": Static,
    "latency-only": LatencyOnly,
}
POLICIES = ("dssda", *RULES, "static", "latency-only")


def make_scheduler(name: str, settings: SchedulerConfig | None = None) -> Scheduler:
    """The scheduler of that name; raises ConfigError with the list of known names."""
    chosen, known = settings or SchedulerConfig(), ", ".join(POLICIES)
    if name in _JOINT:
        return _JOINT[name](chosen)
    if name in RULES:
        return RuleScheduler(chosen, name)
    if name == "brute-force":
        raise ConfigError(
            "brute-force is an oracle of the benchmarks, not a policy for runs: "
            f"choose one of {known}"
        )
    raise ConfigError(f"unknown scheduler {name!r}: choose one of {known}")

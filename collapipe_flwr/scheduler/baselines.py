"""Baselines behind the same protocol: fixed rules for who works, equal bandwidth, full power.

``fedavg`` the best single device that fits; ``splitfed`` the device nearest to the edge holds all
blocks; ``uniform`` equal segments on all devices; ``memory`` and ``throughput`` segments in
proportion; ``random`` anything that fits; ``static`` DSSDA's first plan for ever; ``latency-only``
DSSDA without queues.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from collapipe_flwr.core.domain import Plan, RoundOutcome, Snapshot
from collapipe_flwr.costs.chain import chain_of
from collapipe_flwr.costs.layouts import Layouts, stack
from collapipe_flwr.costs.memory import fits
from collapipe_flwr.costs.tables import Tables, tabulate
from collapipe_flwr.scheduler.allocation import equal_shares
from collapipe_flwr.scheduler.base import (
    budgets_in,
    infeasible,
    initial_state,
    middle_first,
    observed,
    planner_for,
    solution_plan,
)
from collapipe_flwr.scheduler.dssda import Dssda, usable_plans
from collapipe_flwr.scheduler.protocol import SchedulerSettings
from collapipe_flwr.scheduler.queues import budgets_of
from collapipe_flwr.scheduler.starts import rows_from_weights
from collapipe_flwr.scheduler.state import SchedulerState

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """One cluster of a snapshot."""

    tables: Tables
    cluster: int
    round_index: int

    def present(self, values: Array) -> Array:
        """``values`` of the devices, 0 for padding."""
        return np.where(self.tables.members.present_mi[self.cluster, 1:], values, 0.0)

    @property
    def devices(self) -> int:
        """Width of the device axis."""
        return int(self.tables.members.speed_mi.shape[1]) - 1


Rule = Callable[[Site], Array]
"""Candidate weights of the devices, (C, N); the first that fits wins."""


@dataclass(frozen=True, slots=True)
class RuleScheduler:
    """A fixed rule for segments with the reference micro-batches, or the nearest that fit."""

    settings: SchedulerSettings
    name: str
    rule: Rule

    def init(self, snapshot: Snapshot) -> SchedulerState:
        """Empty queues and the reference plan of ``snapshot``."""
        return initial_state(snapshot, self.settings)

    def step(self, state: SchedulerState, snapshot: Snapshot) -> tuple[Plan, SchedulerState]:
        """Apply the rule; raises InfeasibleError where nothing it names fits."""
        tables = tabulate(snapshot)
        planner = planner_for(tables, state, self.settings)
        rows = stack(
            [self._row(tables, m, snapshot.round_index) for m in range(tables.num_clusters)]
        )
        chain = chain_of(tables, rows, self.settings.options)
        shares = equal_shares(chain, snapshot.radio.bandwidth_hz)
        rho = planner.learning.rho(tables, rows)
        plan = solution_plan(planner, planner.priced(chain, shares, rho), self.name, 1.0)
        budgets = budgets_of(state, budgets_in(snapshot))
        return plan, replace(state, rounds=state.rounds + 1, budget_j=budgets, last_plan=plan)

    def observe(self, state: SchedulerState, plan: Plan, outcome: RoundOutcome) -> SchedulerState:
        """Keep the same books as DSSDA, for reporting."""
        return observed(state, plan, outcome, self.settings)

    def _row(self, tables: Tables, m: int, round_index: int) -> Layouts:
        weights = self.rule(Site(tables=tables, cluster=m, round_index=round_index))
        order = np.argsort(-weights, axis=1, kind="stable")
        order = order[:, : min(order.shape[1], tables.num_blocks)]
        ranked = np.take_along_axis(weights, order, axis=1)
        for size, count in middle_first(self.settings):
            batches = np.tile([size, count], (len(ranked), 1))
            owner = np.full(len(ranked), m, dtype=np.int64)
            rows = rows_from_weights(owner, order + 1, ranked, tables.num_blocks, batches)
            good = fits(tables, rows, self.settings.options)
            if good.any():
                return rows.take(np.flatnonzero(good)[:1])
        raise infeasible(tables.snapshot.clusters[m].profile.cluster_id, self.name)


def _singles(key: Array) -> Array:
    """One device each, best key first."""
    order = [int(n) for n in np.argsort(-key, kind="stable") if key[n] > 0]
    return np.eye(len(key))[order]


def fedavg_rule(site: Site) -> Array:
    """The fastest single device that fits."""
    return _singles(site.present(site.tables.members.speed_mi[site.cluster, 1:]))


def splitfed_rule(site: Site) -> Array:
    """The single device with the best link to the edge that fits."""
    return _singles(site.present(site.tables.gain_mij[site.cluster, 1:, site.tables.edge]))


def uniform_rule(site: Site) -> Array:
    """All devices, as equally as blocks allow."""
    return site.present(np.ones(site.devices))[None, :]


def memory_rule(site: Site) -> Array:
    """All devices in proportion to memory."""
    return site.present(site.tables.members.memory_mi[site.cluster, 1:])[None, :]


def throughput_rule(site: Site) -> Array:
    """All devices in proportion to speed."""
    return site.present(site.tables.members.speed_mi[site.cluster, 1:])[None, :]


def random_rule(site: Site) -> Array:
    """Random subsets with random proportions, the same for the same cluster and round."""
    rng = np.random.default_rng([site.round_index, site.cluster])
    devices = site.devices
    weights = rng.uniform(0.05, 1.0, size=(64, devices)) * (rng.random((64, devices)) < 0.6)
    weights = np.stack([site.present(row) for row in weights])
    usable = weights[weights.sum(1) > 0]
    return np.concatenate([usable, uniform_rule(site)])


RULES: dict[str, Rule] = {
    "fedavg": fedavg_rule,
    "splitfed": splitfed_rule,
    "uniform": uniform_rule,
    "memory": memory_rule,
    "throughput": throughput_rule,
    "random": random_rule,
}


@dataclass(frozen=True, slots=True)
class Static:
    """DSSDA's first plan, repeated while its parties are there."""

    inner: Dssda
    name: str = "static"

    def init(self, snapshot: Snapshot) -> SchedulerState:
        """As DSSDA."""
        return self.inner.init(snapshot)

    def step(self, state: SchedulerState, snapshot: Snapshot) -> tuple[Plan, SchedulerState]:
        """Plan once, then repeat; plan again when a cluster or device came or went."""
        usable = usable_plans(state.last_plan, snapshot)
        if state.last_plan is None or len(usable) < len(snapshot.clusters):
            plan, state = self.inner.step(state, snapshot)
        else:
            plan = replace(state.last_plan, round_index=snapshot.round_index, clusters=usable)
        plan = replace(plan, policy=self.name)
        return plan, replace(state, last_plan=plan)

    def observe(self, state: SchedulerState, plan: Plan, outcome: RoundOutcome) -> SchedulerState:
        """Keep the same books."""
        return self.inner.observe(state, plan, outcome)


@dataclass(frozen=True, slots=True)
class LatencyOnly:
    """DSSDA that never looks at its queues."""

    inner: Dssda
    name: str = "latency-only"

    def init(self, snapshot: Snapshot) -> SchedulerState:
        """As DSSDA."""
        return self.inner.init(snapshot)

    def step(self, state: SchedulerState, snapshot: Snapshot) -> tuple[Plan, SchedulerState]:
        """Plan as if every queue were empty."""
        blind = replace(state, energy_queue_j={}, participation_queue={})
        plan, after = self.inner.step(blind, snapshot)
        plan = replace(plan, policy=self.name)
        return plan, replace(
            after,
            last_plan=plan,
            energy_queue_j=state.energy_queue_j,
            participation_queue=state.participation_queue,
        )

    def observe(self, state: SchedulerState, plan: Plan, outcome: RoundOutcome) -> SchedulerState:
        """Keep the books, for reporting only."""
        return self.inner.observe(state, plan, outcome)

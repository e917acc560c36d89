"""All policies by name: DSSDA, its variants, and rules.

``static`` is DSSDA's first plan for ever, ``latency-only`` DSSDA without queues.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches

import numpy as np

from collapipe_flwr.core.domain import Plan, Snapshot
from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.costs.arrays import Array
from collapipe_flwr.costs.tables import Tables
from collapipe_flwr.scheduler.base import USUAL_WEIGHT
from collapipe_flwr.scheduler.decision import compute_closing_s
from collapipe_flwr.scheduler.dssda import Dssda, select_usable_plans
from collapipe_flwr.scheduler.protocol import Nested, Scheduler, SchedulerConfig, SchedulerState
from collapipe_flwr.scheduler.rules import RULES, RuleScheduler


@dataclass(frozen=True, slots=True)
class Static(Dssda):
    """DSSDA's first plan, repeated while its parties are there."""

    name: str = "static"

    def step(self, state: SchedulerState, snapshot: Snapshot) -> tuple[Plan, SchedulerState]:
        """Plan once, then repeat; plan again when a cluster or device came or went."""
        usable = select_usable_plans(state.last_plan, snapshot)
        if state.last_plan is None or len(usable) < len(snapshot.clusters):
            return Dssda.step(self, state, snapshot)
        plan = replace(state.last_plan, round_index=snapshot.round_index, clusters=usable)
        if 0 < len(usable) < len(state.last_plan.clusters):
            latency_m = np.array([cluster.latency_s for cluster in usable])
            closes_s = compute_closing_s(latency_m, self.settings.late_slack or np.inf)
            plan = replace(plan, latency_s=closes_s)
        return plan, replace(state, rounds=state.rounds + 1, last_plan=plan)


@dataclass(frozen=True, slots=True)
class LatencyOnly(Dssda):
    """DSSDA that keeps its queues for reporting only."""

    name: str = "latency-only"

    def _start(self, state: SchedulerState, snapshot: Snapshot) -> SchedulerState:
        """Start with empty queues, which this policy ignores."""
        del snapshot
        return replace(state, weight=self.settings.penalty_weight or USUAL_WEIGHT)

    def _settle_placeholders(self, state: SchedulerState, accounts_j: Nested) -> Nested:
        """Keep place-holders as they are."""
        del accounts_j
        return state.placeholder_j

    def _compute_room(self, tables: Tables, state: SchedulerState) -> Array:
        """Return infinite room: this policy has no limit."""
        del state
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
    """Make the scheduler of that name; raises ConfigError with the list of known names."""
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
    near = get_close_matches(name.lower(), POLICIES, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise ConfigError(f"unknown scheduler {name!r}: choose one of {known}{hint}")

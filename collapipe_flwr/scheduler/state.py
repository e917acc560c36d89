"""What a scheduler remembers between rounds, and how its virtual queues advance.

The state is plain values that survive a checkpoint. Virtual queues turn long-term constraints into
prices per round: ``Q(t+1) = max(Q(t) + e(t) - budget, 0)``. Summing gives
``Q(T) - Q(0) >= sum (e - budget)``, so on every path the average excess is at most ``Q(T) / T``
(Neely 2010, Stochastic Network Optimization, section 4). Queues advance by what rounds *really*
cost.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from collapipe_flwr.core.domain import Plan, RoundOutcome
from collapipe_flwr.core.errors import ProtocolError, ScheduleError
from collapipe_flwr.core.json_codec import from_json, to_json
from collapipe_flwr.costs.convergence import LearningState
from collapipe_flwr.scheduler.link_estimates import LinkEstimates
from collapipe_flwr.scheduler.profile_estimates import ProfileEstimates
from collapipe_flwr.scheduler.robust_gains import RobustGains

Nested = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """The plan that rho and the latency scale refer to: the first round's plain one."""

    latency_s: float
    micro_batch_size: int
    micro_batches: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerState:
    """Queues, estimates and the last plan.

    ``energy_queue_j[cluster][device]`` is the energy-deficit queue, ``participation_queue``
    the deficit of rounds per cluster, ``budget_j`` the budgets that the queues refer to. Fields are
    named as in checkpoints.
    """

    rounds: int = 0
    reference: Reference | None = None
    energy_queue_j: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    participation_queue: Mapping[str, float] = field(default_factory=dict)
    budget_j: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    learning: LearningState = field(default_factory=LearningState)
    beliefs: ProfileEstimates = field(default_factory=ProfileEstimates)
    doubt: RobustGains = field(default_factory=RobustGains)
    links: LinkEstimates = field(default_factory=dict)
    last_plan: Plan | None = None

    def to_json(self) -> str:
        """One line of JSON."""
        return to_json(self)

    @classmethod
    def from_json(cls, text: str) -> SchedulerState:
        """The state in ``text``; raises ScheduleError where it is none."""
        try:
            return from_json(cls, text, "scheduler state")
        except ProtocolError as error:
            raise ScheduleError(f"no scheduler state in {text[:40]!r}: {error}") from error


def reference_of(state: SchedulerState) -> Reference:
    """The reference plan; raises ScheduleError for a state that no ``init`` made."""
    if state.reference is None:
        raise ScheduleError("the scheduler's state has no reference plan: start it with init()")
    return state.reference


def advance(queue: float, spent: float, budget: float) -> float:
    """One step of a virtual queue."""
    return 0.0 if math.isinf(budget) else max(queue + spent - budget, 0.0)


def advance_energy(
    queues_j: Nested, budgets_j: Nested, spent_j: Nested, *, margin: float
) -> dict[str, dict[str, float]]:
    """All energy queues after a round; members that spent nothing recover their budget."""
    result: dict[str, dict[str, float]] = {}
    for cluster, budgets in budgets_j.items():
        before, spent = queues_j.get(cluster, {}), spent_j.get(cluster, {})
        result[cluster] = {
            device: advance(before.get(device, 0.0), spent.get(device, 0.0), (1 - margin) * budget)
            for device, budget in budgets.items()
        }
    return result


def advance_participation(
    queues: Mapping[str, float], clusters: Mapping[str, bool], *, floor: float
) -> dict[str, float]:
    """Participation deficits after a round over the clusters that were connected."""
    return {
        cluster: max(queues.get(cluster, 0.0) + floor - float(took_part), 0.0)
        for cluster, took_part in clusters.items()
    }


def budgets_of(state: SchedulerState, fresh: Nested) -> dict[str, dict[str, float]]:
    """Known budgets overlaid with those of the connected clusters."""
    return {
        **{c: dict(b) for c, b in state.budget_j.items()},
        **{c: dict(b) for c, b in fresh.items()},
    }


def spent_of(outcome: RoundOutcome) -> dict[str, dict[str, float]]:
    """Realised energy by cluster and device."""
    return {c.cluster_id: dict(c.energy_j) for c in outcome.clusters}


def took_part(state: SchedulerState, plan: Plan, outcome: RoundOutcome) -> dict[str, bool]:
    """Which of the connected clusters finished the round."""
    done = {c.cluster_id for c in outcome.clusters}
    known = set(state.budget_j) | done | {c.cluster_id for c in plan.clusters}
    return {cluster: cluster in done for cluster in sorted(known)}

"""Virtual queues: long-term constraints as per-round prices.

``Q(t+1) = max(Q(t) + e(t) - budget, 0)``. Summing gives ``Q(T) - Q(0) >= sum (e - budget)``, so on
every path the average excess is at most ``Q(T) / T`` (Neely 2010, Stochastic Network
Optimization, section 4). Queues advance by what rounds *really* cost.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from collapipe_flwr.core.domain import Plan, RoundOutcome
from collapipe_flwr.scheduler.state import SchedulerState

Nested = Mapping[str, Mapping[str, float]]


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

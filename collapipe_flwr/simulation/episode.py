"""Episodes: a scheduler planning round after round in a simulated world, without training."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from collapipe_flwr.core.domain import ClusterOutcome, ModelProfile, Plan, RoundOutcome, Snapshot
from collapipe_flwr.costs.price import PricedCluster, PricedRound, price
from collapipe_flwr.costs.tables import members_of
from collapipe_flwr.costs.work import PricingOptions
from collapipe_flwr.scheduler.protocol import Scheduler
from collapipe_flwr.scheduler.state import SchedulerState
from collapipe_flwr.simulation.world import World


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeRound:
    """One simulated round."""

    plan: Plan
    priced: PricedRound
    state: SchedulerState
    decision_s: float


def simulated_outcome(plan: Plan, priced: PricedRound, truth: Snapshot) -> RoundOutcome:
    """What the price says; whoever worked shows its true speed and energy per operation."""
    members = {c.profile.cluster_id: members_of(c) for c in truth.clusters}

    def shown(cluster: PricedCluster, field: str) -> dict[str, float]:
        worked = [m for m in members[cluster.cluster_id] if m.device_id in cluster.memory_bytes]
        return {m.device_id: float(getattr(m, field)) for m in worked}

    clusters = tuple(
        ClusterOutcome(
            cluster_id=c.cluster_id,
            latency_s=c.latency_s,
            energy_j=c.energy_j,
            speed_flop_per_s=shown(c, "speed_flop_per_s"),
            energy_per_flop_j=shown(c, "energy_per_flop_j"),
        )
        for c in priced.clusters
    )
    return RoundOutcome(round_index=plan.round_index, latency_s=priced.latency_s, clusters=clusters)


def run_episode(
    world: World,
    scheduler: Scheduler,
    model: ModelProfile,
    rounds: int,
    *,
    options: PricingOptions | None = None,
    seen: Callable[[Snapshot], Snapshot] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[EpisodeRound]:
    """Plan, price and observe ``rounds`` rounds, each yielded as it ends.

    ``seen`` distorts what the scheduler looks at (stale or wrong profiles); prices use the truth.
    """
    look = seen or (lambda snapshot: snapshot)
    state = scheduler.init(look(world.snapshot(1, model)))
    for index in range(1, rounds + 1):
        truth = world.snapshot(index, model)
        started = clock()
        plan, state = scheduler.step(state, look(truth))
        decision_s = clock() - started
        priced = price(plan, truth, options)
        state = scheduler.observe(state, plan, simulated_outcome(plan, priced, truth))
        yield EpisodeRound(plan=plan, priced=priced, state=state, decision_s=decision_s)

"""Episodes: a scheduler planning round after round in a simulated world, without training.

Schedulers may be shown profiles that are wrong, and snapshots that are old (`Distortion`). The
error is a factor on every member's speed and another on its energy per operation, each uniform in
``[1 - error, 1 + error]``. As ``noise`` both are drawn anew for every round, as a measurement would
be; as ``bias`` once per device for the whole episode, like a benchmark that does not resemble
training. The delay is of everything that a snapshot holds: profiles and channel gains. Memories are
known exactly. What rounds cost, and what devices report after working, is the truth: the world's,
whose devices may differ from their profiles (`World.truth`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from collapipe_flwr.core.domain import (
    ClusterOutcome,
    ClusterPlan,
    ClusterSnapshot,
    DeviceProfile,
    ModelProfile,
    Plan,
    RoundOutcome,
    Snapshot,
    StageSample,
)
from collapipe_flwr.core.keys import Rule, at_least, check_keys, key, one_of
from collapipe_flwr.costs.measured import explained_s, stage_parts, taken_s
from collapipe_flwr.costs.price import PricedRound, price
from collapipe_flwr.costs.replicas import PricedCluster
from collapipe_flwr.costs.work import PricingOptions
from collapipe_flwr.scheduler.edges import edges_in, on_edges
from collapipe_flwr.scheduler.protocol import Scheduler, SchedulerState
from collapipe_flwr.simulation.devices import scaled
from collapipe_flwr.simulation.world import World


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeRound:
    """One simulated round."""

    plan: Plan
    priced: PricedRound
    state: SchedulerState
    decision_s: float


def simulated_outcome(
    plan: Plan, priced: PricedRound, truth: Snapshot, seen: Snapshot, options: PricingOptions
) -> RoundOutcome:
    """Derive the outcome from the price; members with work report true stage times and powers.

    ``seen`` holds the links, and the devices without work, as plans knew them.
    """
    clusters = tuple(
        simulated_cluster(part, found, truth, seen, options)
        for part, found in zip(plan.clusters, priced.clusters, strict=True)
    )
    return RoundOutcome(round_index=plan.round_index, latency_s=priced.latency_s, clusters=clusters)


def simulated_cluster(
    plan: ClusterPlan,
    priced: PricedCluster,
    truth: Snapshot,
    seen: Snapshot,
    options: PricingOptions,
) -> ClusterOutcome:
    """Derive one cluster's part of `simulated_outcome`."""
    profile = next(c.profile for c in truth.clusters if c.profile.cluster_id == plan.cluster_id)
    members = {member.device_id: member for member in profile.members}
    samples = []
    for name, (passes, each) in stage_parts(plan, truth.model, recompute=options.recompute).items():
        member, flop = members.get(name), plan.micro_batch_size * each
        samples.append(
            StageSample(
                device_id=name,
                passes=passes,
                flop=flop,
                busy_s=taken_s(member or truth.edge_of(profile), passes, flop),
                watt=member.speed_flop_per_s * member.energy_per_flop_j if member else None,
                planned_bytes=plan.memory_bytes.get(name, 0),
                peak_bytes=plan.memory_bytes.get(name, 0),
            )
        )
    stages = tuple(samples)
    return ClusterOutcome(
        cluster_id=plan.cluster_id,
        latency_s=priced.latency_s,
        energy_j=priced.energy_j,
        stages=stages,
        explained_s=None if seen is truth else explained_s(plan, stages, seen, options),
    )


def run_episode(
    world: World,
    scheduler: Scheduler,
    model: ModelProfile,
    rounds: int,
    *,
    options: PricingOptions | None = None,
    seen: Callable[[Snapshot], Snapshot] | None = None,
) -> Iterator[EpisodeRound]:
    """Plan, price and observe ``rounds`` rounds, each yielded as it ends.

    ``seen`` distorts what the scheduler looks at (stale or wrong profiles); prices use the truth.
    """
    look, options = seen or (lambda snapshot: snapshot), options or PricingOptions()
    state = scheduler.init(look(world.snapshot(1, model)))
    for index in range(1, rounds + 1):
        believed = look(described := world.snapshot(index, model))
        truth = world.truth(described)
        started = time.perf_counter()
        plan, state = scheduler.step(state, believed)
        decision_s = time.perf_counter() - started
        truth, believed = (
            on_edges(each, edges_in(plan), state.links) for each in (truth, believed)
        )
        priced = price(plan, truth, options)
        outcome = simulated_outcome(plan, priced, truth, believed, options)
        state = scheduler.observe(state, plan, outcome)
        yield EpisodeRound(plan=plan, priced=priced, state=state, decision_s=decision_s)


NOISE, BIAS = "noise", "bias"


@dataclass(frozen=True, slots=True, kw_only=True)
class Distortion:
    """How wrong and how late snapshots are; the default is the truth."""

    error: float = key(0.0, Rule(lambda v: 0 <= v < 1, "must be >= 0 and < 1"))
    kind: str = key(NOISE, one_of(NOISE, BIAS), name="error-kind")
    delay: int = key(0, at_least(0))  # rounds

    def __post_init__(self) -> None:
        check_keys(self, "--profile-")

    def view(self, world: World, model: ModelProfile) -> Callable[[Snapshot], Snapshot]:
        """From the truth of a round to what a scheduler is shown in it."""

        def look(truth: Snapshot) -> Snapshot:
            measured = max(truth.round_index - self.delay, 1)
            old = world.snapshot(measured, model)
            index = 0 if self.kind == BIAS else measured
            clusters = tuple(self._cluster(c, world.seed, index) for c in old.clusters)
            return replace(old, round_index=truth.round_index, clusters=clusters)

        return look if self.error or self.delay else lambda truth: truth

    def _cluster(self, cluster: ClusterSnapshot, seed: int, index: int) -> ClusterSnapshot:
        profile = cluster.profile
        rng = np.random.default_rng([seed, index, 30, *map(ord, profile.cluster_id)])
        shape = (len(profile.members), 2)
        factors = iter(rng.uniform(1.0 - self.error, 1.0 + self.error, size=shape))

        def wrong(device: DeviceProfile) -> DeviceProfile:
            speed, joule = map(float, next(factors))
            return scaled(device, speed=speed, power=speed * joule)

        return replace(cluster, profile=profile.with_members(wrong))

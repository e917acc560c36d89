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
    ClusterSnapshot,
    DeviceProfile,
    ModelProfile,
    Plan,
    Snapshot,
)
from collapipe_flwr.core.keys import Rule, at_least, check_keys, key, one_of
from collapipe_flwr.core.outcome import RoundOutcome
from collapipe_flwr.costs.work import PricingOptions
from collapipe_flwr.scheduler.controller import RoundController
from collapipe_flwr.scheduler.protocol import Scheduler, SchedulerState
from collapipe_flwr.simulation.devices import scaled
from collapipe_flwr.simulation.world import World


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeStep:
    """One simulated round, with the scheduler's state after it."""

    plan: Plan
    outcome: RoundOutcome
    state: SchedulerState
    decision_s: float

    @property
    def latency_s(self) -> float:
        """Seconds of the round, which are those of its slowest cluster."""
        return max(cluster.latency_s for cluster in self.outcome.clusters)


def run_episode(
    world: World,
    scheduler: Scheduler,
    model: ModelProfile,
    rounds: int,
    *,
    options: PricingOptions | None = None,
    seen: Callable[[Snapshot], Snapshot] | None = None,
) -> Iterator[EpisodeStep]:
    """Plan, price and learn from ``rounds`` rounds, each yielded as it ends.

    ``seen`` distorts what the scheduler looks at (stale or wrong profiles); prices use the truth.
    """
    look = seen or (lambda snapshot: snapshot)
    controller = RoundController(scheduler, options or PricingOptions())
    for index in range(1, rounds + 1):
        believed = look(described := world.snapshot(index, model))
        started = time.perf_counter()
        plan = controller.plan(believed)
        decision_s = time.perf_counter() - started
        outcome = controller.learn(plan, plan, believed, world.truth(described))
        yield EpisodeStep(plan=plan, outcome=outcome, state=controller.state, decision_s=decision_s)


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

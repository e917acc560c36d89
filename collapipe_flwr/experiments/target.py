"""Time to the target gradient norm, measured for every policy with one and the same yardstick."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

import numpy as np

from collapipe_flwr.core.domain import ModelProfile, Plan
from collapipe_flwr.costs.convergence import LearningConstants, bound_sums
from collapipe_flwr.costs.tables import tabulate
from collapipe_flwr.experiments.episode import EpisodeRound
from collapipe_flwr.scheduler.base import initial_state, learning_in
from collapipe_flwr.scheduler.problem import NEVER
from collapipe_flwr.scheduler.protocol import SchedulerConfig
from collapipe_flwr.simulation.world import World


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The bound with its prior constants, its target kept reachable for the reference plan."""

    constants: LearningConstants
    reference_rounds: float
    examples: Mapping[str, int]

    def rounds(self, plan: Plan) -> float:
        """Rounds to the target if every round were like this one; infinite if it is not reached."""
        examples = np.array([self.examples[c.cluster_id] for c in plan.clusters], float)
        steps = np.array([c.local_steps for c in plan.clusters], float)
        batches = [c.micro_batch_size * c.micro_batches for c in plan.clusters]
        sums = bound_sums(examples / examples.sum(), steps, np.array(batches, float))
        share = examples.sum() / sum(self.examples.values())
        needed = float(sums.rounds(self.constants))
        return inf if needed >= NEVER * self.reference_rounds else needed / share

    def time_s(self, rounds: Sequence[EpisodeRound]) -> float:
        """Average latency over average progress; a round's progress is 1 over its rounds."""
        progress = sum(1.0 / self.rounds(done.plan) for done in rounds)
        return sum(done.priced.latency_s for done in rounds) / progress if progress else inf


def target_in(world: World, model: ModelProfile, settings: SchedulerConfig) -> Target:
    """The yardstick of one world, the same for all policies."""
    settings = replace(settings, bound=True)
    snapshot = world.snapshot(1, model)
    learning = learning_in(
        tabulate(snapshot, settings.coarsest), initial_state(snapshot, settings), settings
    )
    assert learning.constants is not None
    return Target(
        constants=learning.constants,
        reference_rounds=learning.reference_rounds,
        examples={c.cluster_id: c.examples for c in world.clusters},
    )

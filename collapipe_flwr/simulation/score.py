"""The score of one episode of one policy: the numbers of the tables, defined once.

``compute_efficiency`` is the capacity used: useful FLOPs of the round (one forward and one backward
pass of all blocks over every example; no padding, re-computation or optimiser) divided by what all
devices of the clusters could have computed while the round lasted, so that leaving devices out
does not help. ``busy_share`` divides by the devices that hold a segment instead: how busy, weighted
by speed, those are. Control units and the edge count in neither.

The time to the target gradient norm is measured for every policy with one and the same yardstick.
`Bounds` say how short rounds and how large efficiency can be in a world, whatever plans them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

import numpy as np

from collapipe_flwr.core.domain import ModelProfile, Plan
from collapipe_flwr.costs.bounds import ClusterBound
from collapipe_flwr.costs.convergence import LearningConstants, NoiseScale, sum_bound
from collapipe_flwr.costs.tables import tabulate
from collapipe_flwr.scheduler.base import make_initial_state, price_learning
from collapipe_flwr.scheduler.model_share import cap_shares, find_least_shares
from collapipe_flwr.scheduler.problem import NEVER
from collapipe_flwr.scheduler.protocol import SchedulerConfig
from collapipe_flwr.simulation.episode import EpisodeStep
from collapipe_flwr.simulation.world import World


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Progress by prior constants; the bound's target is kept reachable for the reference plan."""

    constants: LearningConstants | NoiseScale
    reference_rounds: float
    examples: Mapping[str, int]

    def rounds(self, plan: Plan) -> float:
        """Compute rounds to the target if all were like this one; infinite if it is not reached."""
        examples = np.array([self.examples[c.cluster_id] for c in plan.clusters], float)
        steps = np.array([c.local_steps for c in plan.clusters], float)
        batches = [c.micro_batch_size * c.micro_batches for c in plan.clusters]
        sums = sum_bound(examples / examples.sum(), steps, np.array(batches, float))
        share = examples.sum() / sum(self.examples.values())
        needed = float(self.constants.count_rounds(sums))
        return inf if needed >= NEVER * self.reference_rounds else needed / share

    def time_s(self, rounds: Sequence[EpisodeStep]) -> float:
        """Divide average latency by average progress; a round's progress is 1 over its rounds."""
        progress = sum(1.0 / self.rounds(done.plan) for done in rounds)
        return sum(done.latency_s for done in rounds) / progress if progress else inf


def make_target(world: World, model: ModelProfile, settings: SchedulerConfig) -> Target:
    """Make the yardstick of one world, the same for all policies."""
    settings = replace(settings, bound=True)
    snapshot = world.snapshot(1, model)
    learning = price_learning(
        tabulate(snapshot, settings.coarsest), make_initial_state(snapshot, settings), settings
    )
    assert learning.constants is not None
    return Target(
        constants=learning.constants,
        reference_rounds=learning.reference_rounds,
        examples={c.cluster_id: c.examples for c in world.clusters},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """One policy in the world of one seed; series have one entry per round."""

    seed: int
    latency_s: tuple[float, ...]
    decision_s: tuple[float, ...]
    queue_share: tuple[float, ...]  # largest energy queue in units of its device's budget
    compute_efficiency: float
    busy_share: float
    peak_device_memory_bytes: int
    energy_over_budget_max: float  # worst device: average per round over its budget
    time_to_target_s: float
    fallbacks: int  # rounds whose plan was not the policy's own
    last_plan: Plan

    @property
    def latency_mean_s(self) -> float:
        return sum(self.latency_s) / len(self.latency_s)


def score(
    world: World,
    model: ModelProfile,
    seed: int,
    rounds: Sequence[EpisodeStep],
    target: Target,
) -> Score:
    """Condense an episode in which ``model`` was trained."""
    budgets_j = {d.device_id: d.energy_budget_j for c in world.clusters for d in c.members}
    spent_j: defaultdict[str, float] = defaultdict(float)
    for device, joule in (
        e for r in rounds for c in r.outcome.clusters for e in c.energy_j.items()
    ):
        spent_j[device] += joule

    def in_budgets(energy_j: Mapping[str, float]) -> float:
        """Return the largest energy of a device, in units of its budget."""
        return max(energy_j.get(name, 0.0) / budget_j for name, budget_j in budgets_j.items())

    return Score(
        seed=seed,
        latency_s=tuple(r.latency_s for r in rounds),
        decision_s=tuple(r.decision_s for r in rounds),
        queue_share=tuple(
            in_budgets({d: q for c in r.state.energy_queue_j.values() for d, q in c.items()})
            for r in rounds
        ),
        compute_efficiency=_measure_efficiency(world, model, rounds, everyone=True),
        busy_share=_measure_efficiency(world, model, rounds, everyone=False),
        peak_device_memory_bytes=max(
            size for r in rounds for c in r.plan.clusters for size in c.memory_bytes.values()
        ),
        energy_over_budget_max=in_budgets({name: j / len(rounds) for name, j in spent_j.items()}),
        time_to_target_s=target.time_s(rounds),
        fallbacks=sum(r.plan.fallback is not None for r in rounds),
        last_plan=rounds[-1].plan,
    )


def _measure_efficiency(
    world: World, model: ModelProfile, rounds: Sequence[EpisodeStep], *, everyone: bool
) -> float:
    per_example = sum(b.forward_flop + b.backward_flop for b in model.blocks)
    examples = {c.cluster_id: c.examples for c in world.clusters}
    speed = {d.device_id: d.speed_flop_per_s for c in world.clusters for d in c.devices}
    useful, possible = 0.0, 0.0
    for done in rounds:
        useful += sum(examples[c.cluster_id] * per_example for c in done.plan.clusters)
        working = [name for c in done.plan.clusters for name in c.device_ids]
        total = sum(speed[d] for d in (speed if everyone else working))
        possible += total * done.latency_s
    return useful / possible


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Of the mean over the rounds of an episode in the world of one seed, or averages of these.

    They hold for plans of pipelines in which all clusters take part, with micro-batches of the
    grid and every device within its memory and the cap on its share of the model; without replicas.
    """

    latency_s: float  # whatever energy it takes
    latency_in_budget_s: float  # where every device keeps its budget on average
    compute_efficiency: float  # at the latter latency


def compute_bounds(
    world: World, model: ModelProfile, settings: SchedulerConfig, rounds: int
) -> Bounds:
    """Compute the bounds of ``rounds`` rounds.

    The slowest cluster of a round is at least as slow as each: the maximum of averages is below
    the average of maxima.
    """
    first = world.snapshot(1, model)
    tables = [tabulate(world.snapshot(r, model), settings.coarsest) for r in range(1, rounds + 1)]
    shares = find_least_shares(tables[0], settings)
    limited = [cap_shares(each, shares, settings) for each in tables]
    pairs = np.array(settings.batches, dtype=np.int64)
    clusters = [ClusterBound(limited, m, settings, pairs) for m in range(len(first.clusters))]
    slowest_s = float(np.max([c.find_least_s()[0] for c in clusters], axis=0).mean())
    in_budget_s = max(slowest_s, *(c.bound_within_budgets_s() for c in clusters))
    return Bounds(
        latency_s=slowest_s,
        latency_in_budget_s=in_budget_s,
        compute_efficiency=useful_s(world, model) / in_budget_s,
    )


def useful_s(world: World, model: ModelProfile) -> float:
    """Compute the seconds that all devices together need for a round's useful operations.

    One forward and one backward pass of all blocks over every example. Over the length of a round
    in which all clusters take part, it *is* the share of capacity that the round uses.
    """
    per_example = sum(block.forward_flop + block.backward_flop for block in model.blocks)
    examples = sum(cluster.examples for cluster in world.clusters)
    speed = sum(d.speed_flop_per_s for cluster in world.clusters for d in cluster.devices)
    return examples * per_example / speed

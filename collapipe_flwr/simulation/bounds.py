"""How short rounds and how large efficiency can be in a world, whatever plans them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from collapipe_flwr.core.domain import ModelProfile
from collapipe_flwr.costs.bounds import ClusterBound
from collapipe_flwr.costs.tables import tabulate
from collapipe_flwr.scheduler.model_share import capped, least_shares
from collapipe_flwr.scheduler.protocol import SchedulerConfig
from collapipe_flwr.simulation.world import World


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
    shares = least_shares(tables[0], settings)
    limited = [capped(each, shares, settings) for each in tables]
    pairs = np.array(settings.batches, dtype=np.int64)
    clusters = [ClusterBound(limited, m, settings, pairs) for m in range(len(first.clusters))]
    slowest_s = float(np.max([c.least_s()[0] for c in clusters], axis=0).mean())
    in_budget_s = max(slowest_s, *(c.within_budgets_s() for c in clusters))
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

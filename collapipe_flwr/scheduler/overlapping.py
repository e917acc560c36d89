"""Overlap where it wins: after all else is decided, weights travel while other devices compute."""

from __future__ import annotations

from dataclasses import replace

from collapipe_flwr.core.domain import Plan, Snapshot
from collapipe_flwr.costs.price import price
from collapipe_flwr.scheduler.protocol import SchedulerConfig
from collapipe_flwr.scheduler.replicating import MOST_CLUSTERS

WORTH = 1e-6  # of a cluster's round, that overlap must gain: less may be rounding


def with_overlap(plan: Plan, snapshot: Snapshot, settings: SchedulerConfig) -> Plan:
    """``plan`` with overlap in every cluster whose round it makes shorter, if settings allow it.

    Segments, depths, radio and energies stay as they are. Each cluster takes two replays: there is
    no time for more than `MOST_CLUSTERS`, so plans of more have none.
    """
    if not settings.overlap or len(plan.clusters) > MOST_CLUSTERS:
        return plan
    trial = replace(plan, clusters=tuple(replace(each, overlap=True) for each in plan.clusters))
    priced = price(trial, snapshot, settings).clusters
    clusters = tuple(
        replace(each, overlap=True, latency_s=found.latency_s)
        if found.latency_s < (1.0 - WORTH) * each.latency_s
        else each
        for each, found in zip(plan.clusters, priced, strict=True)
    )
    return replace(plan, clusters=clusters, latency_s=max(each.latency_s for each in clusters))

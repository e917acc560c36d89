"""What a round tells about the links of real machines, for the scheduler to learn from.

Wires are measured behind the pace of their senders (`costs/link_rates.py`). What a sender was held
back by counts, too: by a limit in the cluster file. A pace that is the plan's own says nothing
about the link, so a paced sample means "at least as planned" (``LinkSample.paced``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

from collapipe_flwr.core.domain import (
    ClusterOutcome,
    ClusterPlan,
    HopPlan,
    LinkSample,
    RoundOutcome,
    Snapshot,
)
from collapipe_flwr.federation.rounds import ClosedRound
from collapipe_flwr.federation.telemetry import ClusterTelemetry, HopTraffic

KEPT = 0.8  # of a planned pace: who sent more slowly was held back by something else


@dataclass(frozen=True, slots=True, kw_only=True)
class _Way:
    """One direction of a hop."""

    planned_bit_per_s: float
    wire_bit_per_s: float | None
    bytes: int
    sending_s: float

    def reached(self, *, paced: bool) -> float | None:
        """Bits per second that the link gave; None where nobody can tell."""
        if self.wire_bit_per_s is None or not self.planned_bit_per_s > 0:
            return None
        sent = 8.0 * self.bytes / self.sending_s if self.sending_s > 0 else math.inf
        if paced and sent >= KEPT * self.planned_bit_per_s:
            return self.wire_bit_per_s
        return min(self.wire_bit_per_s, sent)


def with_samples(
    outcome: RoundOutcome, closed: ClosedRound, snapshot: Snapshot, *, paced: bool
) -> RoundOutcome:
    """The outcome with what the links of real machines carried."""
    profiles = (cluster.profile for cluster in snapshot.clusters)
    real = {profile.cluster_id for profile in profiles if profile.real_links}
    plans = closed.plan.plan

    def sampled(cluster: ClusterOutcome) -> ClusterOutcome:
        plan = plans.cluster(cluster.cluster_id) if plans else None
        told = closed.telemetry.get(cluster.cluster_id)
        if plan is None or told is None or cluster.cluster_id not in real:
            return cluster
        return replace(cluster, links=tuple(link_samples(plan, told, paced=paced)))

    return replace(outcome, clusters=tuple(map(sampled, outcome.clusters)))


def link_samples(plan: ClusterPlan, told: ClusterTelemetry, *, paced: bool) -> Iterator[LinkSample]:
    """A sample of every hop that was measured; none of a round that lost devices."""
    if told.incidents:
        return
    control_unit = next(name for name in plan.tx_power_w if name not in plan.gradient_power_w)
    names = [control_unit, *(segment.device_id for segment in plan.segments), ""]
    for ends, hop, seen in zip(pairwise(names), plan.hops, told.hops(plan), strict=False):
        ways = [(way.planned_bit_per_s, way.reached(paced=paced)) for way in _ways(hop, seen)]
        known = [(planned, reached) for planned, reached in ways if reached]
        if known:
            yield LinkSample(
                ends=ends,
                planned_bit_per_s=len(known) / sum(1.0 / planned for planned, _ in known),
                measured_bit_per_s=len(known) / sum(1.0 / reached for _, reached in known),
                paced=paced,
            )


def _ways(hop: HopPlan, seen: HopTraffic) -> tuple[_Way, _Way]:
    forward = _Way(
        planned_bit_per_s=hop.forward_bit_per_s,
        wire_bit_per_s=seen.forward_bit_per_s,
        bytes=seen.forward_bytes,
        sending_s=seen.forward_s,
    )
    backward = _Way(
        planned_bit_per_s=hop.backward_bit_per_s,
        wire_bit_per_s=seen.backward_bit_per_s,
        bytes=seen.backward_bytes,
        sending_s=seen.backward_s,
    )
    return forward, backward

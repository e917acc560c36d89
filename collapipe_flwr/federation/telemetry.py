"""Measurements of one cluster in one round, and what is derived from them.

Links are measured beyond their senders' rate limits (`scheduler/link_estimates.py`). A rate limit
in the cluster file counts as the link's; a limit at the planned rate says nothing about the link,
so a paced sample means "at least as planned" (``LinkSample.paced``).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice, pairwise
from typing import Annotated

from collapipe_flwr.core import bounds
from collapipe_flwr.core.domain import (
    MOST_DEVICES,
    ClusterPlan,
    ClusterProfile,
    GradientNoise,
    LinkSample,
)
from collapipe_flwr.core.links import LinkReport, LinkTraffic
from collapipe_flwr.pipeline.meter import Span, StageReport
from collapipe_flwr.scheduler.link_estimates import carried_bit_per_s
from collapipe_flwr.transport.weights import TransferStats

MOST_STEPS = 2**20  # of one round
_FEW = bounds.most_entries(MOST_DEVICES)
D2D, D2E = "d2d", "d2e"
KEPT = 0.8  # of a planned rate: a slower sender was limited by something else


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterTelemetry:
    """``reports`` are in pipeline order: control unit, devices; ``edge`` is the decoder's."""

    cluster_id: bounds.Name
    examples: bounds.Claim
    wall_s: bounds.Seconds
    losses: Annotated[tuple[bounds.MaybeHuge, ...], bounds.most_entries(MOST_STEPS)]  # per step
    reports: Annotated[tuple[StageReport, ...], bounds.most_entries(MOST_DEVICES)] = ()
    edge: StageReport | None = None
    moved: TransferStats = field(default_factory=TransferStats)  # between control unit and devices
    fresh_examples: bounds.Count = 0  # that arrived since the last round
    prequential_loss: bounds.MaybeHuge | None = None  # of fresh examples, before training
    replanned: ClusterPlan | None = None  # the last plan, if devices were lost
    incidents: Annotated[tuple[bounds.Sentence, ...], _FEW] = ()  # and how the round continued
    absent: Annotated[tuple[bounds.Name, ...], _FEW] = ()  # devices, at the end
    quarantined: Annotated[Mapping[bounds.Name, bounds.Sentence], _FEW] = field(
        default_factory=dict
    )  # what each did wrong
    lost: Annotated[tuple[bounds.Name, ...], _FEW] = ()  # devices that died, back or not
    profile: ClusterProfile | None = None  # of machines, at the end: devices join and are removed

    @property
    def cluster_ids(self) -> set[str]:
        """The clusters that it speaks of: one, unless it is wrong."""
        parts = (self, self.replanned, self.profile)
        return {part.cluster_id for part in parts if part is not None}

    @property
    def loss(self) -> float | None:
        """Mean over the steps, None without steps."""
        return math.fsum(self.losses) / len(self.losses) if self.losses else None

    @property
    def link_bytes(self) -> dict[str, int]:
        """Bytes both ways: between members, and between the last of them and the edge.

        If a device was lost, another was the last; the edge knows what all of them sent.
        """
        hops = [report.sent_down.bytes + report.received_down.bytes for report in self.reports]
        edge, beside = self.edge, sum(report.sent_beside_bytes for report in self.reports)
        last = edge.sent_up.bytes + edge.received_up.bytes if edge else sum(hops[-1:])
        return {D2D: sum(hops) - last + beside, D2E: last}

    def links(self, plan: ClusterPlan, *, paced: bool) -> tuple[LinkReport, ...]:
        """Report the hops of ``plan``, with its rates if senders kept to them (``paced``).

        Empty if the round ran over several chains. Where stages have replicas, each connected pair
        has an entry; bytes of one end count by the micro-batches that the pair shares.
        """
        names = tuple(report.name for report in self.reports[1:])
        if self.edge is None or names != plan.device_ids:
            return ()
        left = iter(self.stages)
        stages = [tuple(islice(left, count)) for count in plan.replicas]
        return tuple(
            LinkReport(
                cluster_id=self.cluster_id,
                sender=ahead[i].name,
                receiver=behind[j].name,
                link=hop if paced else hop.unpaced,
                forward=_seen_by_both(ahead[i].sent_down, behind[j].received_up, of_sender),
                backward=_seen_by_both(behind[j].sent_up, ahead[i].received_down, of_receiver),
            )
            for (ahead, behind), hop in zip(pairwise(stages), plan.hops, strict=False)
            for i, j, of_sender, of_receiver in _meetings(plan, len(ahead), len(behind))
        )

    @property
    def stages(self) -> tuple[StageReport, ...]:
        """The reports of all stages in pipeline order."""
        return (*self.reports, self.edge) if self.edge else self.reports

    @property
    def timeline(self) -> dict[str, tuple[Span, ...]]:
        """The spans of every stage in pipeline order; empty unless the run asked for them."""
        return {report.name: report.spans for report in self.stages if report.spans}

    @property
    def peak_memory_bytes(self) -> dict[str, int]:
        """Peak tensor memory by role."""
        return {report.name: report.peak_tensor_bytes for report in self.stages}

    @property
    def gradient_noise(self) -> GradientNoise | None:
        """Squared gradient norms of the whole model for micro-batches and batches, by their sizes.

        Sizes are those of what was trained on, whatever was planned: sum n^2 / sum n over the
        steps, for n labels each, in examples of so many labels as there are on average
        (docs/theory-appendix.md, 4.4). The edge takes part in all steps; other stages count for
        their share.
        """
        edge = self.edge
        if edge is None or not self.reports or not self.examples:
            return None
        told = (edge.small_weight, edge.small_squares, edge.big_weight, edge.big_squares)
        if not min(told) > 0:
            return None
        per_example = edge.big_weight / self.examples
        small, big = 0.0, 0.0
        for r in self.stages:
            small += r.small_square_norm * (r.small_squares / edge.small_squares)
            big += r.big_square_norm * (r.big_squares / edge.big_squares)
        return GradientNoise(
            small_examples=edge.small_squares / edge.small_weight / per_example,
            small_square_norm=small,
            big_examples=edge.big_squares / edge.big_weight / per_example,
            big_square_norm=big,
        )


def link_samples(
    plan: ClusterPlan, measured: ClusterTelemetry, *, paced: bool
) -> Iterator[LinkSample]:
    """Yield a sample of every measured hop, or none if the round lost devices or has replicas.

    The planned rate of a hop between replicas is that of its slowest link.
    """
    if measured.incidents or max(plan.replicas) > 1:
        return
    reports = measured.links(plan, paced=paced)
    stages = (*plan.member_ids, plan.edge)
    for ends, hop, seen in zip(pairwise(stages), plan.hops, reports, strict=False):
        ways = ((hop.forward_bit_per_s, seen.forward), (hop.backward_bit_per_s, seen.backward))
        rates = [
            (planned, reached)
            for planned, traffic in ways
            if planned and (reached := _reached(traffic, planned, paced=paced))
        ]
        if rates:
            yield LinkSample(
                ends=ends,
                planned_bit_per_s=len(rates) / sum(1.0 / planned for planned, _ in rates),
                measured_bit_per_s=len(rates) / sum(1.0 / reached for _, reached in rates),
                paced=paced,
            )


def _meetings(
    plan: ClusterPlan, ahead: int, behind: int
) -> Iterator[tuple[int, int, float, float]]:
    """Pairs of replicas of adjacent stages that exchange data, with each one's share of work."""
    counts = Counter((m % ahead, m % behind) for m in range(plan.micro_batches))
    for (i, j), count in sorted(counts.items()):
        own = (len(range(i, plan.micro_batches, ahead)), len(range(j, plan.micro_batches, behind)))
        yield i, j, count / own[0], count / own[1]


def _seen_by_both(sent: LinkTraffic, received: LinkTraffic, share: float) -> LinkTraffic:
    """One direction of a hop, with the rate that the notes of both ends give."""
    return LinkTraffic(
        bytes=round(share * sent.bytes),
        sending_s=share * sent.sending_s,
        wire_bit_per_s=carried_bit_per_s(sent.notes, received.notes),
    )


def _reached(traffic: LinkTraffic, planned_bit_per_s: float, *, paced: bool) -> float | None:
    """Estimate the link's bit/s; None if it is unknown."""
    if traffic.wire_bit_per_s is None:
        return None
    sent = 8.0 * traffic.bytes / traffic.sending_s if traffic.sending_s > 0 else math.inf
    if paced and sent >= KEPT * planned_bit_per_s:
        return traffic.wire_bit_per_s
    return min(traffic.wire_bit_per_s, sent)

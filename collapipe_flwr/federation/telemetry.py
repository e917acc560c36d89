"""What one cluster measured in one round, and what follows from it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise

from collapipe_flwr.core.domain import ClusterPlan, GradientNoise
from collapipe_flwr.costs.link_rates import carried_bit_per_s
from collapipe_flwr.pipeline.meter import Span, StageReport
from collapipe_flwr.transport.weights import TransferStats

D2D, D2E = "d2d", "d2e"


@dataclass(frozen=True, slots=True, kw_only=True)
class HopTraffic:
    """What one hop carried in a round: forward is towards the edge.

    ``*_s`` is how long its sender was busy with it, held back by a pace or not; ``*_bit_per_s``
    what the wire could carry as both ends saw it (``costs/link_rates.py``), None where nobody can
    tell: in memory, or with too few frames.
    """

    sender: str
    receiver: str
    forward_bytes: int
    forward_s: float
    backward_bytes: int
    backward_s: float
    forward_bit_per_s: float | None = None
    backward_bit_per_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterTelemetry:
    """``reports`` stand in pipeline order: control unit, devices; ``edge`` is the decoder's."""

    cluster_id: str
    examples: int
    wall_s: float
    losses: tuple[float, ...]  # per step
    reports: tuple[StageReport, ...] = ()
    edge: StageReport | None = None
    moved: TransferStats = field(default_factory=TransferStats)  # between control unit and devices
    fresh_examples: int = 0  # that arrived since the last round
    prequential_loss: float | None = None  # on them, by the global model, before any training
    replanned: ClusterPlan | None = None  # what the round ended with, where devices were lost
    incidents: tuple[str, ...] = ()  # what broke, and how the round went on
    absent: tuple[str, ...] = ()  # devices that did not answer at the end

    @property
    def loss(self) -> float | None:
        """Mean over the steps, None without steps."""
        return math.fsum(self.losses) / len(self.losses) if self.losses else None

    @property
    def link_bytes(self) -> dict[str, int]:
        """Bytes both ways: between members, and between the last of them and the edge.

        Where a device was lost, another was the last; the edge knows what all of them sent.
        """
        hops = [report.sent_down_bytes + report.received_down_bytes for report in self.reports]
        edge = self.edge
        last = edge.sent_up_bytes + edge.received_up_bytes if edge else sum(hops[-1:])
        return {D2D: sum(hops) - last, D2E: last}

    def hops(self, plan: ClusterPlan) -> tuple[HopTraffic, ...]:
        """The hops of ``plan``; none where the round ran over several chains."""
        names = [report.name for report in self.reports[1:]]
        if self.edge is None or names != [segment.device_id for segment in plan.segments]:
            return ()
        return tuple(
            HopTraffic(
                sender=here.name,
                receiver=behind.name,
                forward_bytes=here.sent_down_bytes,
                forward_s=here.sending_down_s,
                backward_bytes=behind.sent_up_bytes,
                backward_s=behind.sending_up_s,
                forward_bit_per_s=carried_bit_per_s(here.left_down, behind.arrived_up),
                backward_bit_per_s=carried_bit_per_s(behind.left_up, here.arrived_down),
            )
            for here, behind in pairwise((*self.reports, self.edge))
        )

    @property
    def timeline(self) -> dict[str, tuple[Span, ...]]:
        """What every stage did when, in pipeline order; empty unless the run asked for it."""
        stages = (*self.reports, self.edge) if self.edge else self.reports
        return {report.name: report.spans for report in stages if report.spans}

    @property
    def peak_memory_bytes(self) -> dict[str, int]:
        """Peak tensor memory by role."""
        stages = (*self.reports, self.edge) if self.edge else self.reports
        return {report.name: report.peak_tensor_bytes for report in stages}

    def gradient_noise(self, plan: ClusterPlan) -> GradientNoise | None:
        """Squared gradient norms of the whole model for micro-batches and batches.

        A stage counts for the share of the steps that it took part in.
        """
        if self.edge is None or not self.reports:
            return None
        steps = max(1, *(report.steps for report in self.reports))
        stages = [(report, report.steps / steps) for report in (*self.reports, self.edge)]
        return GradientNoise(
            small_examples=plan.micro_batch_size,
            small_square_norm=math.fsum(r.small_square_norm * share for r, share in stages),
            big_examples=plan.micro_batch_size * plan.micro_batches,
            big_square_norm=math.fsum(r.big_square_norm * share for r, share in stages),
        )

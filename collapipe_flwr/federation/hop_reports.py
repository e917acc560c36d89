"""Plan and telemetry of a round as reports of its hops."""

from __future__ import annotations

from collections.abc import Iterator

from collapipe_flwr.core.domain import ClusterPlan, HopPlan
from collapipe_flwr.federation.rounds import RoundRecord
from collapipe_flwr.federation.telemetry import ClusterTelemetry
from collapipe_flwr.reporting.links import Direction, LinkReport


def link_reports(record: RoundRecord, *, paced: bool) -> tuple[LinkReport, ...]:
    """Every hop of every cluster that replied, with planned rates where senders kept to them."""
    found: list[LinkReport] = []
    for cluster_id, told in record.telemetry.items():
        plan = record.executed(cluster_id)
        if plan is not None:
            found += _of_cluster(plan, told, paced)
    return tuple(found)


def _of_cluster(plan: ClusterPlan, told: ClusterTelemetry, paced: bool) -> Iterator[LinkReport]:
    for hop, seen in zip(plan.hops, told.hops(plan), strict=False):
        ahead, back = _planned(hop, paced)
        yield LinkReport(
            cluster_id=plan.cluster_id,
            sender=seen.sender,
            receiver=seen.receiver,
            codec=hop.codec,
            forward=Direction(
                bytes=seen.forward_bytes,
                sending_s=_busy_s(seen.forward_bytes, seen.forward_s, seen.forward_bit_per_s),
                planned_bit_per_s=ahead,
            ),
            backward=Direction(
                bytes=seen.backward_bytes,
                sending_s=_busy_s(seen.backward_bytes, seen.backward_s, seen.backward_bit_per_s),
                planned_bit_per_s=back,
            ),
        )


def _busy_s(size_bytes: int, sending_s: float, wire_bit_per_s: float | None) -> float:
    """As long as the sender was held back, and no less than the wire needed."""
    return max(sending_s, 8.0 * size_bytes / wire_bit_per_s if wire_bit_per_s else 0.0)


def _planned(hop: HopPlan, paced: bool) -> tuple[float | None, float | None]:
    if not paced:
        return None, None
    return hop.forward_bit_per_s or None, hop.backward_bit_per_s or None

"""A round of the strategy as the event that reports are made of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from collapipe_flwr.core.json_codec import plain
from collapipe_flwr.federation.rounds import RoundRecord
from collapipe_flwr.reporting.events import LinkBytes, RoundEvent, cluster_json, incident_json


def round_event(record: RoundRecord, wall_s: float) -> RoundEvent:
    """The event of a round before its evaluation."""
    links = record.link_bytes
    flower = record.flower_bytes_sent + record.flower_bytes_received
    loss = record.train_metrics.get("loss")
    return RoundEvent(
        round_index=record.server_round,
        plan=None if record.plan is None else plain(record.plan),
        loss=loss if isinstance(loss, float) else None,
        metrics={},
        predicted_latency_s=None if record.plan is None else record.plan.latency_s,
        latency_s=record.outcome.latency_s,
        clusters={
            outcome.cluster_id: cluster_json(record.planned(outcome.cluster_id), outcome)
            for outcome in record.outcome.clusters
        },
        energy_j=_by_device(record.outcome.energy_j),
        queues_j=_by_device(record.outcome.queues_j),
        bytes=LinkBytes(
            d2d=links.get("d2d", 0),
            d2e=links.get("d2e", 0),
            flower=flower,
            weights=record.moved.sent_bytes + record.moved.received_bytes,
            spared=record.moved.spared_bytes,
        ),
        memory_bytes={
            _role(cluster_id, role): size
            for cluster_id, told in record.telemetry.items()
            for role, size in told.peak_memory_bytes.items()
        },
        fresh_examples=record.fresh_examples,
        prequential_loss=record.prequential_loss,
        wall_s=wall_s,
        incidents=tuple(_incidents(record)),
        failures=(
            *record.remarks,
            *(f"{cluster}: {why}" for cluster, why in record.failures.items()),
            *(
                f"{name}: {what}"
                for name, told in record.telemetry.items()
                for what in told.incidents
            ),
        ),
    )


def _incidents(record: RoundRecord) -> Iterator[dict[str, str]]:
    """The entries of ``failures`` by kind and cluster, and the quarantined devices."""
    for text in record.remarks:
        kind = "retry" if text in record.retried else "remark"
        yield incident_json("late" if text in record.joined_late else kind, text)
    for cluster, why in record.failures.items():
        yield incident_json("lost", why, cluster)
    for cluster, told in record.telemetry.items():
        for text in told.incidents:
            yield incident_json("recovered", text, cluster)
        for device, why in told.quarantined.items():
            yield incident_json("quarantined", f"{device}: {why}", cluster)


def _by_device(nested: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Flatten cluster, device to device: the ids of devices contain that of their cluster."""
    return {device: value for devices in nested.values() for device, value in devices.items()}


def _role(cluster_id: str, role: str) -> str:
    """Add the cluster's id where a role lacks it: to the control unit and the edge."""
    return role if role.startswith(f"{cluster_id}/") else f"{cluster_id}/{role}"

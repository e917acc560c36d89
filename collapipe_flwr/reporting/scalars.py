"""A round as named numbers: the one naming scheme of all sinks.

A name is a path such as ``train/loss``. Numbers of a cluster or device also have labels:
``device/energy_joules`` with ``cluster="attic"`` and ``device="pi-1"``. Tools without labels get
them at the end of the path, ``device/energy_joules/attic/pi-1``; docs/monitoring.md lists all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from collapipe_flwr.reporting.events import RoundEvent, holders


@dataclass(frozen=True, slots=True, kw_only=True)
class Scalar:
    """One number of one round."""

    name: str
    value: float
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def path(self) -> str:
        """The name with the labels behind it."""
        return "/".join((self.name, *self.labels.values()))


def scalars(event: RoundEvent) -> list[Scalar]:
    """Return every known number of a round; round 0 has only the untrained model's scores."""
    found = [Scalar(name=f"test/{name}", value=value) for name, value in event.metrics.items()]
    if event.round_index:
        found += _of_training(event)
        found += _of_clusters(event)
        found += _of_devices(event)
    return found


def _of_training(event: RoundEvent) -> Iterator[Scalar]:
    values = {
        "train/loss": event.loss,
        "train/prequential_loss": event.prequential_loss,
        "train/fresh_examples": event.fresh_examples if event.prequential_loss else None,
        "clusters/loss": event.clusters_loss,
        **{f"clusters/{name}": value for name, value in event.clusters_metrics.items()},
        "time/wall_seconds": event.wall_s,
        "time/evaluation_seconds": event.evaluation_s,
        "time/round_seconds": event.latency_s,
        "time/predicted_seconds": event.predicted_latency_s,
        **{f"traffic/{name}_bytes": count for name, count in event.bytes.items()},
        "run/failures": len(event.failures),
        "run/lost_clusters": len(event.lost),
    }
    for name, value in values.items():
        if value is not None:
            yield Scalar(name=name, value=float(value))


def _of_clusters(event: RoundEvent) -> Iterator[Scalar]:
    names = {"round_seconds": "latency_s", "predicted_seconds": "predicted_s"}
    for cluster_id, told in event.clusters.items():
        for name, key in names.items():
            if told.get(key) is not None:
                labels = {"cluster": cluster_id}
                yield Scalar(name=f"cluster/{name}", value=float(told[key]), labels=labels)


def _of_devices(event: RoundEvent) -> Iterator[Scalar]:
    values: dict[str, Mapping[str, float]] = {
        "energy_joules": event.energy_j,
        "queue_joules": event.queues_j,
        "peak_memory_bytes": event.memory_bytes,
        "blocks": _planned_blocks(event.plan or {}),
    }
    for name, by_device in values.items():
        for key, value in by_device.items():
            cluster_id, _, device = key.rpartition("/")
            labels = {"cluster": cluster_id, "device": device}
            yield Scalar(name=f"device/{name}", value=float(value), labels=labels)


def _planned_blocks(plan: Mapping[str, Any]) -> dict[str, float]:
    """Count the blocks that each device of the plan holds."""
    return {
        device: segment["stop_block"] - segment["first_block"]
        for cluster in plan.get("clusters", ())
        for segment in cluster["segments"]
        for device in holders(segment)
    }

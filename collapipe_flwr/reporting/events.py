"""What one round and one run report, as values.

Keys of per-device mappings read ``cluster/device``; keys of ``memory_bytes`` read
``cluster/device`` too, with ``edge/cluster`` for a decoder session and ``server`` absent: only
what was measured is listed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkBytes:
    """Bytes that crossed each class of link in one round, headers included."""

    d2d: int = 0  # control unit <-> devices
    d2e: int = 0  # last device <-> edge
    flower: int = 0  # arrays and records between the server and the control units

    def __add__(self, other: LinkBytes) -> LinkBytes:
        return LinkBytes(
            d2d=self.d2d + other.d2d, d2e=self.d2e + other.d2e, flower=self.flower + other.flower
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundEvent:
    """One line of ``events.jsonl``."""

    round_index: int
    plan: Mapping[str, Any] | None
    loss: float | None  # mean training loss, weighted by examples
    metrics: Mapping[str, float]  # on unseen examples; empty when this round was not evaluated
    predicted_latency_s: float | None
    energy_j: Mapping[str, float]
    queues_j: Mapping[str, float]
    bytes: LinkBytes
    memory_bytes: Mapping[str, int]
    wall_s: float
    failures: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Plain data for the event log."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStory:
    """Everything ``summary.json`` is made from; grows by one event per round."""

    metric_name: str
    initial: Mapping[str, float]
    energy_budget_j: Mapping[str, float]
    events: tuple[RoundEvent, ...] = field(default=())

    def summary(self, *, status: str, wall_s: float, reason: str | None = None) -> dict[str, Any]:
        """The content of ``summary.json``."""
        total = sum((e.bytes for e in self.events), LinkBytes())
        scored = [e.metrics[self.metric_name] for e in self.events if e.metrics]
        return {
            "status": status,
            "reason": reason,
            "rounds": len(self.events),
            "metric": {
                "name": self.metric_name,
                "initial": self.initial.get(self.metric_name),
                "final": scored[-1] if scored else None,
                "curve": scored,
            },
            "loss": [e.loss for e in self.events],
            "wall_s": round(wall_s, 3),
            "predicted_latency_s": [e.predicted_latency_s for e in self.events],
            "energy": {"budget_j": dict(self.energy_budget_j), "mean_j": self._mean_energy_j()},
            "bytes": asdict(total),
            "peak_memory_bytes": self._peak_memory_bytes(),
            "plans": [e.plan for e in self.events],
        }

    def _mean_energy_j(self) -> dict[str, float]:
        """Per device: joules per round, rounds without work counted as zero."""
        sums = dict.fromkeys(self.energy_budget_j, 0.0)
        for event in self.events:
            for device, joules in event.energy_j.items():
                sums[device] = sums.get(device, 0.0) + joules
        return {device: joules / max(len(self.events), 1) for device, joules in sums.items()}

    def _peak_memory_bytes(self) -> dict[str, int]:
        peaks: dict[str, int] = {}
        for event in self.events:
            for role, size in event.memory_bytes.items():
                peaks[role] = max(peaks.get(role, 0), size)
        return peaks

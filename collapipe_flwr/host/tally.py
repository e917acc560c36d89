"""What the stages of a host have done since it began, by cluster: counters for whoever scrapes.

A counter for every name that a peer may send would grow without bound, so only the first
``MOST_CLUSTERS`` clusters have counters of their own; all others share one.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # a host that waits has not loaded torch
    from collapipe_flwr.pipeline.config import SessionRequest
    from collapipe_flwr.pipeline.meter import StageReport

MOST_CLUSTERS = 32
OTHERS = "others"


@dataclass(slots=True)
class Done:
    """Of one cluster; seconds and bytes are of streams that ended in good order."""

    last_round: int = 0
    streams: int = 0
    failures: int = 0
    steps: int = 0
    micro_batches: int = 0
    energy_j: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)  # by kind of work
    sent_bytes: int = 0
    received_bytes: int = 0


class Tally:
    """Counts of a host; may be used from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._clusters: dict[str, Done] = {}

    def by_cluster(self) -> dict[str, Done]:
        """What there is now; the values go on."""
        with self._lock:
            return dict(self._clusters)

    def count(self, request: SessionRequest, report: StageReport) -> None:
        """A stream ended in good order."""
        with self._lock:
            done = self._of(request)
            done.streams += 1
            done.steps += report.steps
            done.micro_batches += report.micro_batches
            done.energy_j += report.energy_j or 0.0
            for work in ("forward", "backward", "optimizer", "wait"):
                spent_s = getattr(report, f"{work}_s")
                done.seconds[work] = done.seconds.get(work, 0.0) + spent_s
            done.sent_bytes += report.sent_up.bytes + report.sent_down.bytes
            done.received_bytes += report.received_up.bytes + report.received_down.bytes

    def fail(self, request: SessionRequest) -> None:
        """A stream ended in another way."""
        with self._lock:
            done = self._of(request)
            done.streams += 1
            done.failures += 1

    def _of(self, request: SessionRequest) -> Done:
        name = request.cluster or "unknown"
        if name not in self._clusters and len(self._clusters) >= MOST_CLUSTERS:
            name = OTHERS
        done = self._clusters.setdefault(name, Done())
        done.last_round = max(done.last_round, request.server_round)
        return done

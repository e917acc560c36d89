"""What a host tells a Prometheus server: its load now, and what its stages have done so far.

A counter for every name that a peer may send would grow without bound, so only the first
``MOST_CLUSTERS`` clusters have counters of their own; all others share one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # a host that waits has not loaded torch
    from collapipe_flwr.pipeline.config import Health, SessionRequest
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


_LOAD = {
    "sessions": "Sessions that are open.",
    "running": "Sessions that are in the middle of a stream.",
    "most_sessions": "Sessions that may be open.",
    "held_bytes": "Bytes that models have reserved.",
    "most_bytes": "Bytes that models may take.",
}
_COUNTERS: dict[str, tuple[str, Callable[[Done], float]]] = {
    "streams": ("Streams of training or testing that have ended.", lambda d: d.streams),
    "stream_failures": ("Streams that ended by an error.", lambda d: d.failures),
    "steps": ("Optimizer steps.", lambda d: d.steps),
    "micro_batches": ("Micro-batches that were trained on.", lambda d: d.micro_batches),
    "energy_joules": ("Metered energy; 0 without a sensor.", lambda d: d.energy_j),
    "sent_bytes": ("Bytes sent to neighbours in the chain.", lambda d: d.sent_bytes),
    "received_bytes": ("Bytes received from them.", lambda d: d.received_bytes),
}


@dataclass(frozen=True, slots=True)
class HostMetrics:
    """A collector of prometheus_client; ``health`` is None as long as nobody needed the host."""

    name: str
    health: Callable[[], Health | None]
    tally: Tally

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily

        yield InfoMetricFamily("collapipe_host", "The host that this is.", {"name": self.name})
        load = self.health()
        for name, words in _LOAD.items():
            value = 0 if load is None else getattr(load, name)
            yield GaugeMetricFamily(f"collapipe_host_{name}", words, value)
        clusters = self.tally.by_cluster()
        words = "Newest round of the cluster that ended here."
        newest = GaugeMetricFamily("collapipe_host_round", words, labels=("cluster",))
        for cluster, done in clusters.items():
            newest.add_metric((cluster,), done.last_round)
        yield newest
        yield from _counters(clusters)


def _counters(clusters: dict[str, Done]) -> Iterator[Any]:
    from prometheus_client.core import CounterMetricFamily

    for name, (words, value) in _COUNTERS.items():
        family = CounterMetricFamily(f"collapipe_host_{name}", words, labels=("cluster",))
        for cluster, done in clusters.items():
            family.add_metric((cluster,), value(done))
        yield family
    words = "Seconds of computing, by kind of work, and of waiting for a neighbour."
    seconds = CounterMetricFamily("collapipe_host_seconds", words, labels=("cluster", "work"))
    for cluster, done in clusters.items():
        for work, spent_s in done.seconds.items():
            seconds.add_metric((cluster, work), spent_s)
    yield seconds

"""What a host tells a Prometheus server: its load now, and what its stages have done so far."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from collapipe_flwr.host.tally import Done, Tally

if TYPE_CHECKING:
    from collapipe_flwr.pipeline.config import Health

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

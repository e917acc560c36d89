"""The numbers of a host for a Prometheus server: its load, and the work of its stages so far.

A counter for every name that a peer may send would grow without bound, so only the first
``MOST_CLUSTERS`` clusters have counters of their own; all others share one.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from collapipe_flwr.core.errors import ConfigError, name_extra, prefix_errors
from collapipe_flwr.core.http import BoundedRequest, FewClientsServer
from collapipe_flwr.core.links import split_address
from collapipe_flwr.core.processes import run_beside
from collapipe_flwr.core.texts import to_one_line

if TYPE_CHECKING:  # a host that waits has not loaded torch
    from collapipe_flwr.core.measurements import StageMeasurement
    from collapipe_flwr.pipeline.config import Health, SessionRequest

MOST_CLUSTERS = 32
OTHERS = "others"
LOOPBACK = "127.0.0.1"
_LOAD = {
    "sessions": "Sessions that are open.",
    "running": "Sessions that are in the middle of a stream.",
    "most_sessions": "Sessions that may be open.",
    "held_bytes": "Bytes that models have reserved.",
    "most_bytes": "Bytes that models may take.",
}
_COUNTERS = {
    "streams": "Streams of training or testing that have ended.",
    "stream_failures": "Streams that ended by an error.",
    "steps": "Optimizer steps.",
    "micro_batches": "Micro-batches that were trained on.",
    "energy_joules": "Metered energy; 0 without a sensor.",
    "sent_bytes": "Bytes sent to neighbours in the chain.",
    "received_bytes": "Bytes received from them.",
}
_WORK = ("forward", "backward", "optimizer", "wait")


@dataclass(slots=True)
class Done:
    """The work of one cluster's stages here, in streams that ended in order; and failures."""

    last_round: int = 0
    counts: dict[str, float] = field(default_factory=dict)  # by the names of `_COUNTERS`
    seconds: dict[str, float] = field(default_factory=dict)  # by kind of work


class Tally:
    """Counts of a host; may be used from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._clusters: dict[str, Done] = {}

    def copy_counts(self) -> dict[str, Done]:
        """Return the counts of each cluster, which change while the host works."""
        with self._lock:
            return dict(self._clusters)

    def count(self, request: SessionRequest, report: StageMeasurement) -> None:
        """Count a stream that ended in good order."""
        with self._lock:
            done = self._find_done(request)
            more = {
                "streams": 1,
                "steps": report.steps,
                "micro_batches": report.micro_batches,
                "energy_joules": report.energy_j or 0.0,
                "sent_bytes": report.sent_up.bytes + report.sent_down.bytes,
                "received_bytes": report.received_up.bytes + report.received_down.bytes,
            }
            _add(done.counts, more)
            _add(done.seconds, {work: getattr(report, f"{work}_s") for work in _WORK})

    def fail(self, request: SessionRequest) -> None:
        """Count a stream that failed."""
        with self._lock:
            _add(self._find_done(request).counts, {"streams": 1, "stream_failures": 1})

    def _find_done(self, request: SessionRequest) -> Done:
        name = to_one_line(request.cluster) or "unknown"  # half a surrogate cannot be encoded
        if name not in self._clusters and len(self._clusters) >= MOST_CLUSTERS:
            name = OTHERS
        done = self._clusters.setdefault(name, Done())
        done.last_round = max(done.last_round, request.server_round)
        return done


def _add(counts: dict[str, float], more: Mapping[str, float]) -> None:
    for name, value in more.items():
        counts[name] = counts.get(name, 0.0) + value


@dataclass(frozen=True, slots=True)
class HostMetrics:
    """A collector of prometheus_client; ``health`` is None until a first caller needs the host."""

    name: str
    health: Callable[[], Health | None]
    tally: Tally

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily

        yield InfoMetricFamily("collapipe_host", "The host that this is.", {"name": self.name})
        load = self.health()
        for name, help_text in _LOAD.items():
            value = 0 if load is None else getattr(load, name)
            yield GaugeMetricFamily(f"collapipe_host_{name}", help_text, value)
        clusters = self.tally.copy_counts()
        help_text = "Newest round of the cluster that ended here."
        newest = GaugeMetricFamily("collapipe_host_round", help_text, labels=("cluster",))
        for cluster, done in clusters.items():
            newest.add_metric((cluster,), done.last_round)
        yield newest
        for name, help_text in _COUNTERS.items():
            family = CounterMetricFamily(f"collapipe_host_{name}", help_text, labels=("cluster",))
            for cluster, done in clusters.items():
                family.add_metric((cluster,), done.counts.get(name, 0.0))
            yield family
        help_text = "Seconds of computing, by kind of work, and of waiting for a neighbour."
        labels = ("cluster", "work")
        seconds = CounterMetricFamily("collapipe_host_seconds", help_text, labels=labels)
        for cluster, done in clusters.items():
            for work, spent_s in done.seconds.items():
                seconds.add_metric((cluster, work), spent_s)
        yield seconds


def parse_address(text: str) -> tuple[str, int]:
    """Read ``HOST:PORT``, or a port on loopback; raises ConfigError."""
    alone = text.removeprefix(":")
    return split_address(f"{LOOPBACK}:{alone}" if alone.isdecimal() else text, least=0)


def check_address(text: str) -> None:
    """Raise ConfigError for an address that is malformed or at which nothing can listen now."""
    host, port = parse_address(text)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, port), family=family).close()
    except OSError as error:
        raise _explain_taken(text, error) from error


def _explain_taken(text: str, error: OSError) -> ConfigError:
    return ConfigError(f"nothing can listen at {text} ({error.strerror}); choose another")


def serve_metrics(address: str, collector: Any) -> AbstractContextManager[object]:
    """Serve a daemon's numbers, if it has an address for them; raises ConfigError."""
    if not address:
        return nullcontext()
    with prefix_errors("--metrics"):
        return closing(MetricsServer(address, collector))


class MetricsServer:
    """Serves ``/metrics`` of ``collector``, which has prometheus_client's ``collect``.

    Raises ConfigError without prometheus_client, or if it cannot listen at the address.
    """

    def __init__(self, address: str, collector: Any) -> None:
        with name_extra("prometheus"):
            from prometheus_client import CollectorRegistry, MetricsHandler, ProcessCollector
        host, port = parse_address(address)
        registry = CollectorRegistry()
        ProcessCollector(registry=registry)  # memory, processor time and open files
        registry.register(collector)
        handler = type("Scrape", (BoundedRequest, MetricsHandler.factory(registry)), {})
        try:
            self._server = FewClientsServer(host, port, handler)
        except OSError as error:
            raise _explain_taken(address, error) from error
        self.address = f"{host}:{self._server.server_port}"
        self._life = ExitStack()
        self._life.enter_context(run_beside(lambda _: self._server.serve_forever(0.1), "metrics"))

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._life.close()

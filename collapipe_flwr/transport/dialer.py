"""How a device reaches other hosts: the next one of its chain, and those that it probes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

from collapipe_flwr.core.links import TlsFiles
from collapipe_flwr.pipeline.config import NextHop
from collapipe_flwr.pipeline.link import Link
from collapipe_flwr.transport.client import EdgeClient
from collapipe_flwr.transport.host_status import ProbeAnswer, ProbeRequest

_ECHOES = 5
_SAMPLE_BYTES = 2**17
_LONG_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialer:
    """Connects with this member's certificate; `name` is how the other host calls it."""

    name: str
    tls: TlsFiles | None = None

    @contextmanager
    def __call__(self, hop: NextHop) -> Iterator[Link]:
        """The link to the next host while the body runs. Raises LinkError when it refuses."""
        with EdgeClient(
            hop.address,
            what=hop.name,
            tls=self.tls,
            certificate_name=hop.certificate_name,
            heartbeat=hop.heartbeat,
        ) as client:
            link = client.session(hop.key).stream(name=self.name, config=hop.link)
            try:
                yield link
            except BaseException as error:  # the next host is not waited for
                link.close(str(error) or type(error).__name__)
                raise
            link.close()

    def probe(self, request: ProbeRequest) -> ProbeAnswer:
        """Measure the way from here; raises LinkError when the other host does not answer."""
        with EdgeClient(
            request.address,
            what=request.name,
            tls=self.tls,
            certificate_name=request.certificate_name,
            deadline_s=request.deadline_s,
        ) as client:
            return measure_way(client, request.payload_bytes)


def measure_way(client: EdgeClient, payload_bytes: int) -> ProbeAnswer:
    """The median of a few echoes, after one that connects; of fewer bytes where they take long."""

    def seconds(size_bytes: int, echoes: int = _ECHOES) -> float:
        payload, took_s = bytes(size_bytes), []
        for _ in range(echoes):
            start_s = time.perf_counter()
            client.echo(payload)
            took_s.append(time.perf_counter() - start_s)
        return median(took_s)

    client.echo()
    empty_s = seconds(0)
    size = min(payload_bytes, _SAMPLE_BYTES)
    if seconds(size, echoes=1) * payload_bytes / size < _LONG_S:
        size = payload_bytes
    full_s = seconds(size)
    rate_bit_per_s = 8 * size / max(full_s - empty_s, 1e-9)
    return ProbeAnswer(rate_bit_per_s=rate_bit_per_s, delay_s=empty_s / 2)

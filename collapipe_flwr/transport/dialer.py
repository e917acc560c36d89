"""How a device connects to other hosts: to the next one of its chain, and to measure the link."""

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
from collapipe_flwr.transport.methods import ProbeAnswer, ProbeRequest

_ECHOES = 5
_SAMPLE_BYTES = 2**17
_LONG_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialer:
    """Connects to hosts with this member's certificate, as `name`."""

    name: str
    tls: TlsFiles | None = None

    @contextmanager
    def __call__(self, hop: NextHop) -> Iterator[Link]:
        """The link to the next host, for the body. Raises LinkError when it refuses."""
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
            except BaseException as error:  # do not wait for the next host
                link.close(str(error) or type(error).__name__)
                raise
            link.close()

    def probe(self, request: ProbeRequest) -> ProbeAnswer:
        """Measure the link to a host; raises LinkError when it does not answer."""
        with EdgeClient(
            request.address,
            what=request.name,
            tls=self.tls,
            certificate_name=request.certificate_name,
            deadline_s=request.deadline_s,
        ) as client:
            return measure_way(client, request.payload_bytes)


def measure_way(client: EdgeClient, payload_bytes: int) -> ProbeAnswer:
    """Rate and delay by the median of a few echoes; with fewer bytes where those take long."""

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

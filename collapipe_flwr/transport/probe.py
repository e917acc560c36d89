"""Rate and delay of the way to a host, by echoes; hosts are asked to try theirs to others."""

from __future__ import annotations

import time
from statistics import median

from collapipe_flwr.core.tls_files import TlsFiles
from collapipe_flwr.transport.client import EdgeClient
from collapipe_flwr.transport.host_status import ProbeAnswer, ProbeRequest

_ECHOES = 5
_SAMPLE_BYTES = 2**17
_LONG_S = 1.0


def probe(request: ProbeRequest, tls: TlsFiles | None) -> ProbeAnswer:
    """Try the way from here; raises LinkError when the other host does not answer."""
    with EdgeClient(
        request.address,
        what=request.name,
        tls=tls,
        certificate_name=request.certificate_name,
        deadline_s=request.deadline_s,
    ) as client:
        return measure_way(client, request.payload_bytes)


def measure_way(client: EdgeClient, payload_bytes: int) -> ProbeAnswer:
    """The median of a few echoes, after one that connects; of fewer bytes where they take long."""
    client.echo()
    empty_s = _seconds(client, b"")
    size = min(payload_bytes, _SAMPLE_BYTES)
    if _once(client, bytes(size)) * payload_bytes / size < _LONG_S:
        size = payload_bytes
    full_s = _seconds(client, bytes(size))
    rate_bit_per_s = 8 * size / max(full_s - empty_s, 1e-9)
    return ProbeAnswer(rate_bit_per_s=rate_bit_per_s, delay_s=empty_s / 2)


def _seconds(client: EdgeClient, payload: bytes) -> float:
    return median(_once(client, payload) for _ in range(_ECHOES))


def _once(client: EdgeClient, payload: bytes) -> float:
    start_s = time.perf_counter()
    client.echo(payload)
    return time.perf_counter() - start_s

"""Rate and delay of the way to a host, by echoes; hosts are asked to try theirs to others."""

from __future__ import annotations

import time
from statistics import median

from collapipe_flwr.core.tls_files import TlsFiles
from collapipe_flwr.rpc.edge_client import EdgeClient
from collapipe_flwr.rpc.host_status import ProbeAnswer, ProbeRequest

_ECHOES = 5


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
    """The median of a few echoes, after one that connects."""
    client.echo()
    empty_s, full_s = _seconds(client, b""), _seconds(client, bytes(payload_bytes))
    return ProbeAnswer(
        rate_bit_per_s=8 * payload_bytes / max(full_s - empty_s, 1e-9), delay_s=empty_s / 2
    )


def _seconds(client: EdgeClient, payload: bytes) -> float:
    times = []
    for _ in range(_ECHOES):
        start_s = time.perf_counter()
        client.echo(payload)
        times.append(time.perf_counter() - start_s)
    return median(times)

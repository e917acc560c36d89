"""Device daemons and an edge server in this process, on loopback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from collapipe_flwr.config.cluster_file import ClusterConfig, parse_cluster
from collapipe_flwr.host.server import HostServer
from collapipe_flwr.host.service import HostService
from collapipe_flwr.transport.client import Dialer


@contextmanager
def daemons(count: int) -> Iterator[tuple[ClusterConfig, str]]:
    """The cluster of ``count`` boards, and the edge's address."""
    with ExitStack() as stack:
        boards = [
            {"name": name, "address": stack.enter_context(_host(name)).address}
            for name in (f"board-{index}" for index in range(count))
        ]
        edge = stack.enter_context(HostServer("127.0.0.1:0", HostService())).address
        yield parse_cluster({"id": "shed", "device": boards}, Path()), edge


def _host(name: str) -> HostServer:
    return HostServer("127.0.0.1:0", HostService(connect=Dialer(name=name)))

"""The edge of clusters that name none: the run's, or one in the server's process.

The clusters open its sessions. The server asks only how far their rounds are.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from collapipe_flwr.config.schema import EdgeConfig
from collapipe_flwr.core.errors import LinkError
from collapipe_flwr.host.server import HostServer
from collapipe_flwr.host.service import HostService
from collapipe_flwr.pipeline.compute import resolve
from collapipe_flwr.pipeline.config import PassesDone
from collapipe_flwr.transport.client import HostClient

log = logging.getLogger("flwr.collapipe")
_PROGRESS_S = 2.0  # the caller polls


class DefaultEdge:
    """An edge as the server sees it, which need not reach it unless it ``is_here``."""

    def __init__(self, client: HostClient, *, is_here: bool = False) -> None:
        self._client = client
        self.is_here = is_here

    @property
    def address(self) -> str:
        """Where clusters find it."""
        return self._client.address

    def progress(self) -> Mapping[str, PassesDone]:
        """Ask for each cluster's micro-batches in this round; empty if the edge does not answer."""
        try:
            return self._client.progress(within_s=_PROGRESS_S)
        except LinkError as error:
            log.debug("the edge does not tell how far the round is: %s", error)
            return {}


@contextmanager
def open_edge(config: EdgeConfig) -> Iterator[DefaultEdge]:
    """Connect to the user's edge, or serve one on loopback during the body."""
    if config.address:
        with HostClient(
            config.address,
            tls=config.tls(),
            certificate_name=config.certificate_name,
            deadline_s=config.timeout_s,
        ) as client:
            yield DefaultEdge(client)
        return
    compute = resolve(config.compute, "edge.compute")
    with (
        HostServer("127.0.0.1:0", HostService(compute=compute)) as server,
        HostClient(server.address, deadline_s=config.timeout_s) as client,
    ):
        log.info("edge server on %s", server.address)
        yield DefaultEdge(client, is_here=True)

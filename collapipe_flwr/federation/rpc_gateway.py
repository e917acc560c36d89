"""The edge gateway over gRPC: decoder replicas as sessions of a running edge server."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

import torch

from collapipe_flwr.config.schema import EdgeConfig
from collapipe_flwr.core.errors import LinkError
from collapipe_flwr.federation.checkpoint import Memory
from collapipe_flwr.federation.split import Weights
from collapipe_flwr.host.server import EdgeServer
from collapipe_flwr.host.service import EdgeService
from collapipe_flwr.pipeline.compute import resolve
from collapipe_flwr.pipeline.config import PassesDone, SessionKey, SessionRequest
from collapipe_flwr.pipeline.meter import StageReport
from collapipe_flwr.pipeline.state import OptimizerState, PartState, between_rounds
from collapipe_flwr.transport.client import EdgeClient

log = logging.getLogger("flwr.collapipe")
_PASSES_S = 2.0  # the caller polls


@contextmanager
def open_edge(config: EdgeConfig) -> Iterator[EdgeClient]:
    """A client of the user's edge, or of one on loopback for this run.

    The user's edge may restart at any time, so it is waited for.
    """
    if config.address:
        with EdgeClient(
            config.address,
            tls=config.tls(),
            certificate_name=config.certificate_name,
            deadline_s=config.timeout_s,
            patience_s=config.timeout_s,
            heartbeat=config.heartbeat,
        ) as client:
            client.patiently(client.status)
            yield client
        return
    compute = resolve(config.compute, "edge.compute")
    with (
        EdgeServer("127.0.0.1:0", EdgeService(compute=compute)) as server,
        EdgeClient(server.address, deadline_s=config.timeout_s) as client,
    ):
        log.info("edge server on %s", server.address)
        yield client


class RpcEdgeGateway:
    """Sessions of one edge through ``client``, whose deadlines bound every call.

    Where clusters keep their optimizer, that of each decoder also continues from the last accepted
    round.
    """

    def __init__(self, client: EdgeClient) -> None:
        self._client = client
        self._slots: dict[str, OptimizerState] = {}  # by cluster, of its last accepted round
        self._fetched: dict[SessionKey, OptimizerState] = {}  # not accepted yet
        self._keepers: dict[SessionKey, str] = {}  # clusters that keep their optimizer

    @property
    def address(self) -> str:
        return self._client.address

    def open(
        self, request: SessionRequest, weights: Weights, *, keep_optimizer: bool
    ) -> SessionKey:
        """Open a session with a fresh token and push the decoder; nothing stays open on error.

        If the edge disconnects, this starts over, for as long as the client has patience.
        """
        broken: list[SessionKey] = []
        key = self._client.patiently(lambda: self._open(request, weights, broken))
        for left in broken:  # a restarted edge may have read it back from disk
            self._let_go(left)
        if keep_optimizer:
            self._keepers[key] = request.cluster_id
        return key

    def fetch(self, session: SessionKey) -> dict[str, torch.Tensor]:
        """The trained decoder."""
        keep = session in self._keepers
        found = self._client.session(session).fetch_weights(with_optimizer=keep)
        state = PartState.of_tensors(found)
        if keep:
            self._fetched[session] = between_rounds(state.optimizer)
        return dict(state.weights)

    def accept(self, session: SessionKey) -> None:
        """Keep the fetched optimizer for the cluster's next session."""
        if session in self._keepers:
            self._slots[self._keepers[session]] = self._fetched.pop(session)

    def report(self, session: SessionKey) -> StageReport | None:
        report = self._client.session(session).report()
        return report if report.steps else None

    def passes(self, session: SessionKey) -> PassesDone:
        return self._client.session(session).passes(within_s=_PASSES_S)

    def dump(self) -> Memory:
        """The decoders' optimizers after the last accepted rounds, by cluster."""
        slots = self._slots.items()
        return Memory.by_name({n: PartState(weights={}, optimizer=s).tensors() for n, s in slots})

    def load(self, memory: Memory) -> None:
        """Restore from a checkpoint; raises ModelError for an incomplete optimizer."""
        found = memory.named_tensors().items()
        self._slots = {name: PartState.of_tensors(held).optimizer for name, held in found}

    def close(self, session: SessionKey) -> None:
        """Free the session, and drop an optimizer that was not accepted."""
        self._fetched.pop(session, None)
        self._keepers.pop(session, None)
        self._client.session(session).close()

    def _open(
        self, request: SessionRequest, weights: Weights, broken: list[SessionKey]
    ) -> SessionKey:
        key = SessionKey.random(f"{request.cluster_id}-{request.server_round}")
        state = PartState(weights=weights, optimizer=self._slots.get(request.cluster_id, {}))
        try:
            opened = self._client.open_session(replace(request, key=key))
            opened.push_weights(state.tensors())
        except LinkError:
            self._let_go(key)
            broken.append(key)
            raise
        return key

    def _let_go(self, key: SessionKey) -> None:
        """Free a session that failed to open; the edge need not know it."""
        with suppress(LinkError):
            self._client.session(key).close()

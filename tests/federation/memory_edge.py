"""An `EdgeGateway` in this process, where a test trains the decoders by hand."""

from __future__ import annotations

import torch

from collapipe_flwr.core.errors import LinkError
from collapipe_flwr.federation.split import DecoderOrder, EdgeSession
from collapipe_flwr.pipeline.config import SessionKey
from collapipe_flwr.pipeline.meter import StageReport


class MemoryEdge:
    """An edge in this process: keeps replicas in a dict, where a test trains them by hand."""

    address = "memory"

    def __init__(self) -> None:
        self.replicas: dict[str, dict[str, torch.Tensor]] = {}
        self.orders: dict[str, DecoderOrder] = {}
        self._count = 0

    def open(self, order: DecoderOrder) -> EdgeSession:
        """Copy the weights in under a new session id."""
        self._count += 1
        key = SessionKey(session_id=f"session-{self._count}", token=f"secret-{self._count}")
        self.replicas[key.session_id] = {k: v.clone() for k, v in order.weights.items()}
        self.orders[key.session_id] = order
        return EdgeSession(address=self.address, key=key)

    def fetch(self, session: EdgeSession) -> dict[str, torch.Tensor]:
        """The replica as the test left it."""
        if session.key.session_id not in self.replicas:
            raise LinkError(f"the edge knows no session {session.key.session_id}")
        return dict(self.replicas[session.key.session_id])

    def accept(self, session: EdgeSession) -> None:
        """Nothing is kept here."""

    def report(self, session: EdgeSession) -> StageReport | None:
        """Nothing ran here."""
        del session
        return None

    def close(self, session: EdgeSession) -> None:
        """Drop the replica."""
        self.replicas.pop(session.key.session_id, None)

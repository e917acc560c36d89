"""An `EdgeGateway` in this process, where a test trains the decoders by hand."""

from __future__ import annotations

import torch

from collapipe_flwr.core.errors import LinkError
from collapipe_flwr.federation.split import Weights
from collapipe_flwr.pipeline.config import PassesDone, SessionKey, SessionRequest
from collapipe_flwr.pipeline.meter import StageReport


class MemoryEdge:
    """An edge in this process: keeps replicas in a dict, where a test trains them by hand."""

    address = "memory"

    def __init__(self) -> None:
        self.replicas: dict[str, dict[str, torch.Tensor]] = {}
        self.requests: dict[str, SessionRequest] = {}
        self._count = 0

    def open(
        self, request: SessionRequest, weights: Weights, *, keep_optimizer: bool
    ) -> SessionKey:
        """Copy the weights in under a new session id."""
        del keep_optimizer
        self._count += 1
        key = SessionKey(session_id=f"session-{self._count}", token=f"secret-{self._count}")
        self.replicas[key.session_id] = {k: v.clone() for k, v in weights.items()}
        self.requests[key.session_id] = request
        return key

    def fetch(self, session: SessionKey) -> dict[str, torch.Tensor]:
        """The replica as the test left it."""
        if session.session_id not in self.replicas:
            raise LinkError(f"the edge knows no session {session.session_id}")
        return dict(self.replicas[session.session_id])

    def accept(self, session: SessionKey) -> None:
        """Nothing is kept here."""

    def report(self, session: SessionKey) -> StageReport | None:
        """Nothing ran here."""
        del session
        return None

    def passes(self, session: SessionKey) -> PassesDone:
        """Nothing is counted here."""
        del session
        return PassesDone()

    def close(self, session: SessionKey) -> None:
        """Drop the replica."""
        self.replicas.pop(session.session_id, None)

"""How the strategy reaches the decoder replicas at the edge: open, fetch, accept, close."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch

from collapipe_flwr.federation.records import LearningSettings
from collapipe_flwr.pipeline.config import SessionKey
from collapipe_flwr.pipeline.meter import StageReport

Weights = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderOrder:
    """The decoder replica that one cluster trains against in one round."""

    cluster_id: str
    server_round: int
    model_spec_json: str
    learning: LearningSettings
    depth: int = 1  # planned micro-batches in flight at the edge
    weights: Weights = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeSession:
    """An open session: what the cluster needs to connect to its replica."""

    address: str
    key: SessionKey


class EdgeGateway(Protocol):
    """Sessions at one edge server; every call ends within the gateway's own deadline."""

    def open(self, order: DecoderOrder) -> EdgeSession:
        """Place a decoder replica; raises LinkError if the edge cannot be reached or refuses."""

    def fetch(self, session: EdgeSession) -> dict[str, torch.Tensor]:
        """The replica's current weights; raises LinkError."""

    def accept(self, session: EdgeSession) -> None:
        """The global model contains what was fetched: later sessions may build on its optimizer."""

    def report(self, session: EdgeSession) -> StageReport | None:
        """What the replica's stage measured, None if it never ran; raises LinkError."""

    def close(self, session: EdgeSession) -> None:
        """Forget the session (twice is fine); raises LinkError if the edge cannot be reached."""

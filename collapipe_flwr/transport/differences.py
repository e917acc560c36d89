"""Weights to and from a session, without those that the other side has already."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from collapipe_flwr.pipeline.digest import digests_of
from collapipe_flwr.transport.client import EdgeClient


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferStats:
    """Bytes of tensors that travelled, and of those that did not have to."""

    sent_bytes: int = 0
    received_bytes: int = 0
    spared_bytes: int = 0

    def __add__(self, other: TransferStats) -> TransferStats:
        return TransferStats(
            sent_bytes=self.sent_bytes + other.sent_bytes,
            received_bytes=self.received_bytes + other.received_bytes,
            spared_bytes=self.spared_bytes + other.spared_bytes,
        )


def push_missing(
    client: EdgeClient, session_id: str, token: str, tensors: Mapping[str, Tensor]
) -> TransferStats:
    """Give a session its weights; those that the host kept from its last session stay here."""
    wanted = client.missing(session_id, token, digests_of(tensors))
    pushed = {key: tensors[key] for key in wanted if key in tensors}
    client.push_weights(session_id, token, pushed)
    sent_bytes = _bytes(pushed)
    return TransferStats(sent_bytes=sent_bytes, spared_bytes=_bytes(tensors) - sent_bytes)


def fetch_changed(
    client: EdgeClient,
    session_id: str,
    token: str,
    known: Mapping[str, Tensor],
    *,
    with_optimizer: bool = False,
) -> tuple[dict[str, Tensor], TransferStats]:
    """A session's weights: those equal to ``known`` are taken from there, the others travel."""
    theirs = client.digests(session_id, token, with_optimizer=with_optimizer)
    ours = digests_of({key: known[key] for key in theirs if key in known})
    changed = tuple(key for key, digest in theirs.items() if ours.get(key) != digest)
    fetched: dict[str, Tensor] = {}
    if changed:
        fetched = client.fetch_weights(
            session_id, token, with_optimizer=with_optimizer, keys=changed
        )
    same = {key: known[key] for key in theirs if key not in fetched}
    moved = TransferStats(received_bytes=_bytes(fetched), spared_bytes=_bytes(same))
    return {key: fetched[key] if key in fetched else same[key] for key in theirs}, moved


def _bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())

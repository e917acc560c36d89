"""Who is there: wait for the expected number of nodes and ask each what its cluster is.

Flower itself waits for nodes without end; here every wait has a deadline and says what is missing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from collapipe_flwr.core.domain import ClusterProfile
from collapipe_flwr.core.errors import ProtocolError, RunError
from collapipe_flwr.federation.records import QUERY_DESCRIBE, read_profile
from collapipe_flwr.federation.replies import sentence

log = logging.getLogger("flwr.collapipe")


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """The clock of a wait; tests pass their own."""

    now: Callable[[], float] = time.monotonic
    pause: Callable[[float], None] = time.sleep
    between_looks_s: float = 0.5


def discover_clusters(
    grid: Grid, *, expected: int, timeout_s: float, patience: Patience | None = None
) -> dict[int, ClusterProfile]:
    """The description of every connected cluster by node id.

    Raises RunError if fewer than ``expected`` nodes connect, if one does not describe itself
    within ``timeout_s``, or if two clusters bear one name.
    """
    if expected < 1:
        raise RunError(f"at least 1 cluster is needed, {expected} expected (run-config `clusters`)")
    nodes = wait_for_nodes(grid, expected=expected, timeout_s=timeout_s, patience=patience)
    asked = [Message(RecordDict(), node, QUERY_DESCRIBE) for node in nodes]
    replies = list(grid.send_and_receive(asked, timeout=timeout_s))
    profiles = {_sender(reply, asked): _profile(reply) for reply in replies}
    silent = [node for node in nodes if node not in profiles]
    if silent:
        raise RunError(
            f"{len(silent)} of {len(nodes)} clusters did not describe themselves within "
            f"{timeout_s:g} s, first node {silent[0]}: check its log"
        )
    _refuse_namesakes(profiles)
    return {node: profiles[node] for node in nodes}


def wait_for_nodes(
    grid: Grid, *, expected: int, timeout_s: float, patience: Patience | None = None
) -> Sequence[int]:
    """The ids of at least ``expected`` nodes, sorted; raises RunError after ``timeout_s``."""
    patience = patience or Patience()
    deadline = patience.now() + timeout_s
    while len(nodes := sorted(grid.get_node_ids())) < expected:
        if patience.now() >= deadline:
            raise RunError(
                f"{expected} clusters expected (run-config `clusters`), {len(nodes)} connected "
                f"after {timeout_s:g} s: start the missing ones (each is one SuperNode), "
                "or expect fewer"
            )
        patience.pause(patience.between_looks_s)
    return nodes


def _sender(reply: Message, asked: Sequence[Message]) -> int:
    """The node that was asked; a lost node answers under another id."""
    asked_id = reply.metadata.reply_to_message_id
    by_id = (m.metadata.dst_node_id for m in asked if m.metadata.message_id == asked_id)
    return next(by_id, reply.metadata.src_node_id)


def _profile(reply: Message) -> ClusterProfile:
    node = reply.metadata.src_node_id
    if reply.has_error():
        raise RunError(f"the cluster of node {node} cannot start: {sentence(reply.error)}")
    try:
        profile = read_profile(reply.content)
    except ProtocolError as error:
        raise RunError(f"the cluster of node {node} gave no usable description: {error}") from error
    log.info(
        "cluster %s: %d devices, %d examples",
        profile.cluster_id,
        len(profile.devices),
        profile.examples,
    )
    return profile


def _refuse_namesakes(profiles: dict[int, ClusterProfile]) -> None:
    seen: dict[str, int] = {}
    for node, profile in profiles.items():
        if profile.cluster_id in seen:
            raise RunError(
                f"nodes {seen[profile.cluster_id]} and {node} both call their cluster "
                f"{profile.cluster_id!r}: give each its own name"
            )
        seen[profile.cluster_id] = node

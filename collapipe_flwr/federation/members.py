"""The clusters of one run: their discovery, and a grid without the other nodes.

A run of N clusters consists of the nodes with partition ids below N; other nodes are spare. Flower
waits for nodes without end; here every wait has a deadline.

A SuperNode that restarts is a new node to Flower, which keeps listing the old one until its
heartbeats have been missing for a minute. The new node is queried for its cluster, which takes part
again as soon as the old node is gone: a node cannot take the name of a cluster that is there.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from collapipe_flwr.core.domain import ClusterProfile
from collapipe_flwr.core.errors import ProtocolError, RunError
from collapipe_flwr.federation.attempts import FIRST_PAUSE_S
from collapipe_flwr.federation.border import described
from collapipe_flwr.federation.checkpoint import Resumable
from collapipe_flwr.federation.late import RoundDeadline
from collapipe_flwr.federation.records import QUERY_DESCRIBE, error_text
from collapipe_flwr.federation.wrapped_grid import WrappedGrid

log = logging.getLogger("flwr.collapipe")
NO_CLUSTER = "make a collapipe_flwr.Cluster from the ClientApp"
NEWCOMER_S = 60.0  # for a new node to describe its cluster
_POLL_S = 0.5
_NODE_UNAVAILABLE = 5  # flwr's error code of a node whose heartbeats are missing


class ClusterGrid(WrappedGrid):
    """``grid`` restricted to the nodes of ``clusters``; a ``clock`` closes its rounds."""

    def __init__(
        self,
        grid: Grid,
        clusters: Mapping[int, str],
        clock: RoundDeadline | None = None,
        *,
        patience_s: float = math.inf,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(grid)
        self._patience_s, self._clock, self._now = patience_s, clock, now
        self._empty_since_s: float | None = None
        self._polls_s: tuple[float, float] | None = None  # the first and last for the same nodes
        self._newcomers = Newcomers(grid, NEWCOMER_S)
        self._clusters = dict(clusters)
        self._strangers: set[int] = set()  # belong to no cluster of this run, or were replaced
        self._heirs: dict[int, str] = {}  # wait for the name of a node that Flower still lists
        self._warned: set[int] = set()  # about these of them
        self._connected: set[int] = set(clusters)  # when nodes were last asked for
        self._lost: frozenset[str] = frozenset()

    @property
    def lost(self) -> frozenset[str]:
        """The clusters that were absent or failed in the last training round."""
        return self._lost - self._clock.late if self._clock else self._lost

    @property
    def clusters(self) -> Mapping[int, str]:
        """Cluster ids by current node id; updated when a cluster reconnects."""
        return MappingProxyType(self._clusters)

    @property
    def resumable(self) -> dict[str, Resumable]:
        return {"clock": self._clock} if self._clock else {}

    def get_node_ids(self) -> list[int]:
        """Return the nodes of connected clusters, after new nodes have been identified.

        Strategies poll this until there are enough nodes: raises RunError if there has been none
        for longer than this grid's patience, or too few for a strategy that goes on polling.
        """
        asked_s, before = self._now(), self._connected
        nodes = list(self._grid.get_node_ids())
        known = {*self._clusters, *self._strangers, *self._heirs}
        if unknown := [node for node in nodes if node not in known]:
            for node, profile in self._newcomers.profiles(unknown).items():
                self._register(node, profile.cluster_id if profile else "")
        for node in [node for node in self._heirs if node in nodes]:
            self._succeed(node, nodes)
        self._connected = self._clusters.keys() & set(nodes)
        self._check_connected()
        self._check_polls(asked_s, joined=not self._connected <= before)
        return [node for node in nodes if node in self._clusters]

    def _check_connected(self) -> None:
        now_s = self._now()
        if self._connected:
            self._empty_since_s = None
        elif self._empty_since_s is None:
            self._empty_since_s = now_s
        elif now_s - self._empty_since_s > self._patience_s:
            raise RunError(
                f"no cluster has been connected for {self._patience_s:g} s (node-timeout-s): start "
                "the SuperNodes"
            )

    def _check_polls(self, asked_s: float, *, joined: bool) -> None:
        """Raise RunError after a long wait for more clusters than there are.

        Polls that are as far apart as two attempts at a round are not of the same wait.
        """
        now_s = self._now()
        if joined or self._polls_s is None or asked_s - self._polls_s[1] >= FIRST_PAUSE_S:
            self._polls_s = now_s, now_s
            return
        self._polls_s = self._polls_s[0], now_s
        if now_s - self._polls_s[0] > self._patience_s:
            raise RunError(
                f"the strategy has waited {self._patience_s:g} s (node-timeout-s) for more clusters"
                f" than are connected ({len(self._connected)} of {len(self._clusters)}): start the "
                "missing SuperNodes, or let it need fewer (min_available_nodes, min_train_nodes)"
            )

    def _register(self, node: int, name: str) -> None:
        if name in self._clusters.values():
            self._heirs[node] = name
        else:
            self._strangers.add(node)

    def _succeed(self, node: int, listed: Collection[int]) -> None:
        """Let a node take its cluster's name once the node that has it is gone."""
        name = self._heirs[node]
        before = next(n for n, known in self._clusters.items() if known == name)
        if before in listed:
            if node not in self._warned:
                self._warned.add(node)
                log.warning(
                    "node %d calls itself cluster %s, which is node %d: it takes part when that "
                    "one is gone",
                    node,
                    name,
                    before,
                )
            return
        log.info("cluster %s is back as node %d", name, node)
        del self._heirs[node], self._clusters[before]
        self._strangers.add(before)
        self._clusters[node] = name

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        sent, self._polls_s = list(messages), None
        if self._clock is None:
            replies = list(self._grid.send_and_receive(sent, timeout=timeout))
        else:
            replies = self._clock.exchange(self._grid, sent, timeout)
        if any(message.metadata.message_type.partition(".")[0] == "train" for message in sent):
            asked = {message.metadata.dst_node_id for message in sent}
            trained = {reply.metadata.src_node_id for reply in replies if reply.has_content()}
            lost = (self._clusters.keys() - self._connected - trained) | (asked - trained)
            self._lost = frozenset(self._clusters[node] for node in lost if node in self._clusters)
        return replies


def discover_clusters(
    grid: Grid,
    *,
    expected: int,
    timeout_s: float,
    now: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
) -> dict[int, ClusterProfile]:
    """Ask every cluster of the run for its description, by node id; spare nodes are left out.

    So is one that fails, does not answer within ``timeout_s``, or has another one's name, if
    there are ``expected`` clusters without it. Raises RunError if there are not.
    """
    if expected < 1:
        raise RunError(f"at least 1 cluster is needed, {expected} expected (run-config `clusters`)")
    deadline = now() + timeout_s
    answers: dict[int, ClusterProfile | None] = {}
    failed: dict[int, RunError] = {}
    gone: set[int] = set()
    while len(clusters := _clusters(answers)) < expected:
        known = answers.keys() | failed.keys() | gone
        strangers = [node for node in sorted(grid.get_node_ids()) if node not in known]
        if len(clusters) + len(strangers) >= expected:
            new, faults = _ask(grid, strangers, timeout_s)
            faults |= find_namesakes(new, {n: p.cluster_id for n, p in clusters.items()})
            answers |= {node: answer for node, answer in new.items() if node not in faults}
            failed |= faults
            gone |= set(strangers) - new.keys() - faults.keys()
            continue
        if failed:
            raise next(iter(failed.values()))
        if now() >= deadline:
            spare = len(answers) - len(clusters)
            also = f" ({spare} more have a partition-id of {expected} or above)" if spare else ""
            raise RunError(
                f"{expected} clusters expected (run-config `clusters`), "
                f"{len(strangers) + len(clusters)} connected after {timeout_s:g} s{also}: start "
                "the missing ones (each is one SuperNode), or expect fewer"
            )
        pause(_POLL_S)
    for error in failed.values():
        log.warning("%s; the run starts without it", error)
    return clusters


def find_namesakes(
    found: Mapping[int, ClusterProfile | None], names: Mapping[int, str]
) -> dict[int, RunError]:
    """Return an error for each node whose cluster is called as that of another node.

    Nodes of ``names``, whose clusters are known, keep theirs; of the others the first one has it.
    """
    owners, errors = {name: node for node, name in names.items()}, dict[int, RunError]()
    for node, profile in sorted(_clusters(found).items()):
        owner = owners.setdefault(profile.cluster_id, node)
        if owner != node:
            errors[node] = RunError(
                f"nodes {owner} and {node} both call their cluster {profile.cluster_id!r}: give "
                "each its own name"
            )
    return errors


def _clusters(answers: Mapping[int, ClusterProfile | None]) -> dict[int, ClusterProfile]:
    return {node: profile for node, profile in sorted(answers.items()) if profile is not None}


def _ask(
    grid: Grid, nodes: Sequence[int], timeout_s: float
) -> tuple[dict[int, ClusterProfile | None], dict[int, RunError]]:
    """Query nodes for their descriptions, None for spare nodes; lost nodes are left out.

    Returns errors of those that fail besides.
    """
    asked = _build_queries(nodes)
    answers: dict[int, ClusterProfile | None] = {}
    failed: dict[int, RunError] = {}
    gone: set[int] = set()
    for reply in grid.send_and_receive(asked, timeout=timeout_s):
        node = _find_asked_node(reply, asked)
        if _is_gone(reply):
            gone.add(node)
            continue
        try:
            answers[node] = _read_profile(reply)
        except RunError as error:
            failed[node] = error
    if gone:
        log.warning("nodes %s are gone, though Flower still lists them", sorted(gone))
    for node in set(nodes) - answers.keys() - failed.keys() - gone:
        failed[node] = RunError(
            f"node {node} did not describe its cluster within {timeout_s:g} s: check its log"
        )
    return answers, failed


def _is_gone(reply: Message) -> bool:
    return reply.has_error() and reply.error.code == _NODE_UNAVAILABLE


class Newcomers:
    """Asks nodes that connect during a run for their descriptions.

    Each node is waited for once; a later answer is read at the next call, without a wait. Every
    wait that times out halves the next one, so unresponsive nodes cost at most twice ``wait_s``.
    """

    def __init__(self, grid: Grid, wait_s: float) -> None:
        self._grid, self._wait_s = grid, wait_s
        self._asked: dict[str, Message] = {}  # that are not answered yet, by id
        self._waited: set[int] = set()
        self.faults: dict[int, RunError] = {}  # of nodes that could not describe themselves

    def profiles(self, nodes: Sequence[int]) -> dict[int, ClusterProfile | None]:
        """Return the descriptions that are known by now, None for spare nodes."""
        pending = {message.metadata.dst_node_id for message in self._asked.values()}
        if again := _build_queries([n for n in nodes if n in self._waited and n not in pending]):
            self._grid.push_messages(again)
            self._note(again)
        found = self._read(self._grid.pull_messages(list(self._asked))) if self._asked else {}
        if new := _build_queries([n for n in nodes if n not in self._waited]):
            replies = list(self._grid.send_and_receive(new, timeout=self._wait_s))
            self._note(new)
            self._waited |= {message.metadata.dst_node_id for message in new}
            found |= self._read(replies)
            if len(replies) < len(new):
                log.warning(
                    "some of nodes %s have not described their clusters within %g s",
                    nodes,
                    self._wait_s,
                )
                self._wait_s /= 2
        return {node: profile for node, profile in found.items() if node in nodes}

    def _note(self, asked: Sequence[Message]) -> None:
        self._asked |= {message.metadata.message_id: message for message in asked}

    def _read(self, replies: Iterable[Message]) -> dict[int, ClusterProfile | None]:
        found: dict[int, ClusterProfile | None] = {}
        for reply in replies:
            node = _find_asked_node(reply, list(self._asked.values()))
            self._asked.pop(reply.metadata.reply_to_message_id, None)
            try:
                found[node] = _read_profile(reply)
            except RunError as error:
                self.faults[node] = error
                log.warning("%s; it is asked again", error)
        return found


def _build_queries(nodes: Sequence[int]) -> list[Message]:
    return [Message(RecordDict(), node, QUERY_DESCRIBE) for node in nodes]


def _find_asked_node(reply: Message, asked: Sequence[Message]) -> int:
    """Return the node that was asked; an error reply for a lost node has another source id."""
    asked_id = reply.metadata.reply_to_message_id
    by_id = (m.metadata.dst_node_id for m in asked if m.metadata.message_id == asked_id)
    return next(by_id, reply.metadata.src_node_id)


def _read_profile(reply: Message) -> ClusterProfile | None:
    node = reply.metadata.src_node_id
    if reply.has_error():
        why = error_text(reply.error)
        way_out = f": {NO_CLUSTER}" if "No query function" in why else ""
        raise RunError(f"the cluster of node {node} cannot start: {why}{way_out}")
    try:
        profile = described(reply.content)
    except ProtocolError as error:
        raise RunError(f"the cluster of node {node} gave no usable description: {error}") from error
    if profile is None:
        log.info("node %d is spare in this run", node)
        return None
    log.info(
        "cluster %s: %d devices, %d examples",
        profile.cluster_id,
        len(profile.devices),
        profile.examples,
    )
    return profile

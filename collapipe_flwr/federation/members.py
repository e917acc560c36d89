"""The grid of one run: only the nodes that are its clusters, whatever else is connected.

A SuperNode that is started again is a new node to Flower. It is asked which cluster it is, and its
cluster takes part again in the same run. Orders of a plain strategy to train a whole model get the
progress of their clusters here, as :class:`CollaPipe` adds it to its own.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from collapipe_flwr.federation.checkpoint import Resumable
from collapipe_flwr.federation.discovery import Newcomers
from collapipe_flwr.federation.records import (
    content_bytes,
    flower_round,
    has_unsplit_task,
    write_progress,
)
from collapipe_flwr.federation.rounds import AcceptedRounds

if TYPE_CHECKING:  # not part of Flower's public names
    from flwr.supercore.run import Run


log = logging.getLogger("flwr.collapipe")


class Members(Grid):
    """``grid`` without the nodes that are none of ``clusters``; counts what training sends."""

    def __init__(self, grid: Grid, clusters: Mapping[int, str]) -> None:
        self._grid = grid
        self._newcomers = Newcomers(grid)
        self._clusters = dict(clusters)
        self._strangers: set[int] = set()  # of no cluster of this run, or not any more
        self._accepted = AcceptedRounds()  # of plain strategies
        self._train_bytes = 0
        self._connected: set[int] = set(clusters)  # when nodes were last asked for
        self._lost: frozenset[str] = frozenset()

    @property
    def lost(self) -> frozenset[str]:
        """The clusters that were absent or failed in the last training round."""
        return self._lost

    @property
    def clusters(self) -> Mapping[int, str]:
        """Cluster ids by current node id; updated when a cluster reconnects."""
        return MappingProxyType(self._clusters)

    @property
    def resumable(self) -> dict[str, Resumable]:
        """What a checkpoint keeps of it, by name."""
        return {"members": self._accepted}

    def take_train_bytes(self) -> int:
        """Bytes of training messages and their replies since the last call."""
        taken, self._train_bytes = self._train_bytes, 0
        return taken

    def set_run(self, run: Run) -> None:
        """Set the run."""
        self._grid.set_run(run)

    @property
    def run(self) -> Run:
        """The run."""
        return self._grid.run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """A message of the grid."""
        return self._grid.create_message(content, message_type, dst_node_id, group_id, ttl)

    def get_node_ids(self) -> list[int]:
        """The connected clusters, after new nodes have been identified."""
        nodes = list(self._grid.get_node_ids())
        late = [n for n in nodes if n not in self._clusters and n not in self._strangers]
        if late:
            for node, name in self._newcomers.names(late).items():
                self._meet(node, name)
        self._connected = self._clusters.keys() & set(nodes)
        return [node for node in nodes if node in self._clusters]

    def _meet(self, node: int, name: str) -> None:
        before = next((n for n, known in self._clusters.items() if known == name), None)
        if before is None:
            self._strangers.add(node)
            return
        log.info("cluster %s is back as node %d", name, node)
        del self._clusters[before]
        self._strangers.add(before)  # Flower lists it for a while longer
        self._clusters[node] = name

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Push through the grid."""
        return self._grid.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Pull through the grid."""
        return self._grid.pull_messages(message_ids)

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        """Push, then pull, through the grid."""
        sent = list(messages)
        for message in filter(_trains_whole, sent):
            cluster_id = self._clusters[message.metadata.dst_node_id]
            progress = self._accepted.progress(cluster_id)
            message.content = write_progress(message.content, progress)  # others share the old one
        replies = list(self._grid.send_and_receive(sent, timeout=timeout))
        if any(map(_trains, sent)):
            self._note(sent, replies)
        return replies

    def _note(self, sent: Iterable[Message], replies: Iterable[Message]) -> None:
        """Record the bytes of a training round and the clusters it lost, not those that sat out."""
        done = [reply for reply in replies if reply.has_content()]
        self._train_bytes += sum(content_bytes(m.content) for m in (*sent, *done))
        asked = {message.metadata.dst_node_id for message in sent}
        trained = {reply.metadata.src_node_id for reply in done}
        for message in filter(_trains_whole, sent):  # plain strategies aggregate every reply
            if (node := message.metadata.dst_node_id) in trained:
                self._accepted.accept(self._clusters[node], flower_round(message.content))
        lost = (self._clusters.keys() - self._connected - trained) | (asked - trained)
        self._lost = frozenset(self._clusters[node] for node in lost if node in self._clusters)


def _trains(message: Message) -> bool:
    kind = message.metadata.message_type.partition(".")[0]
    return kind == "train" and message.has_content()


def _trains_whole(message: Message) -> bool:
    return _trains(message) and has_unsplit_task(message.content)

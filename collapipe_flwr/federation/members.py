"""The grid as a run sees it: only the nodes that are its clusters, whoever else is connected."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from collapipe_flwr.federation.records import content_bytes

if TYPE_CHECKING:  # not part of Flower's public names
    from flwr.supercore.run import Run


class Members(Grid):
    """``grid`` without the nodes that are not in ``nodes``; counts what is trained by messages."""

    def __init__(self, grid: Grid, nodes: Collection[int]) -> None:
        self._grid = grid
        self._nodes = frozenset(nodes)
        self._train_bytes = 0

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
        """The clusters that are connected."""
        return [node for node in self._grid.get_node_ids() if node in self._nodes]

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
        replies = list(self._grid.send_and_receive(sent, timeout=timeout))
        self._train_bytes += sum(map(_train_bytes, (*sent, *replies)))
        return replies


def _train_bytes(message: Message) -> int:
    trains = message.metadata.message_type.partition(".")[0] == "train"
    return content_bytes(message.content) if trains and message.has_content() else 0

"""A grid around another one: what both have in common is passed on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

if TYPE_CHECKING:
    from flwr.supercore.run import Run


class WrappedGrid(Grid):
    """Passes on all calls but `send_and_receive`, which is what subclasses are for."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid

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

    def get_node_ids(self) -> Iterable[int]:
        """The nodes of the grid."""
        return self._grid.get_node_ids()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Push through the grid."""
        return self._grid.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Pull through the grid."""
        return self._grid.pull_messages(message_ids)

"""The cluster's decoder session at an edge server, as the control unit sees it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from collapipe_flwr.core.links import LinkConfig
from collapipe_flwr.pipeline.link import Link
from collapipe_flwr.transport.client import EdgeClient


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeSession:
    """One session of ``client``'s edge."""

    client: EdgeClient
    session_id: str
    token: str = field(repr=False)

    @contextmanager
    def connect(self, config: LinkConfig) -> Iterator[Link]:
        """A new stream to the decoder; raises LinkError when the edge refuses."""
        link = self.client.stream(self.session_id, self.token, name="last device", config=config)
        try:
            yield link
        finally:
            link.close()

    def snapshot(self, step: int) -> None:
        """See `recovery.Replica`."""
        self.client.snapshot(self.session_id, self.token, step)

    def rollback(self, step: int) -> None:
        """See `recovery.Replica`."""
        self.client.rollback(self.session_id, self.token, step)

"""The seam between stages: `Link`, and the pair that joins two threads of one process."""

from __future__ import annotations

from typing import Protocol

from collapipe_flwr.core.errors import LinkError
from collapipe_flwr.core.links import QUEUE_FRAMES, LinkTraffic
from collapipe_flwr.pipeline.frame import Frame
from collapipe_flwr.pipeline.mailbox import Mailbox


class Link(Protocol):
    """An ordered, bounded, two-way path of frames to one neighbour."""

    @property
    def peer(self) -> str:
        """How error sentences name the neighbour."""
        ...

    @property
    def sent(self) -> LinkTraffic:
        """What was sent so far."""
        ...

    @property
    def received(self) -> LinkTraffic:
        """What was received so far."""
        ...

    def send(self, frame: Frame, *, deadline_s: float) -> None:
        """Queue a frame. Raises LinkError at once on a broken link, LinkTimeout when full."""
        ...

    def receive(self, *, deadline_s: float) -> Frame:
        """Take the next frame. Raises LinkError at once when the peer failed or closed."""
        ...

    def close(self, error: str = "") -> None:
        """Close both directions; an error sentence overtakes queued frames and the peer raises it.

        Closing twice is allowed.
        """
        ...


class MemoryLink:
    """One end of `memory_pair`: tensors are handed over, not copied."""

    def __init__(self, name: str, peer: str, inbox: Mailbox[Frame], outbox: Mailbox[Frame]) -> None:
        self.name = name
        self.peer = peer
        self.sent, self.received = LinkTraffic(), LinkTraffic()
        self._inbox = inbox
        self._outbox = outbox

    def send(self, frame: Frame, *, deadline_s: float) -> None:
        """See `Link.send`."""
        self._outbox.put(frame, deadline_s)
        self.sent.bytes += frame.tensor_bytes

    def receive(self, *, deadline_s: float) -> Frame:
        """See `Link.receive`."""
        frame = self._inbox.get(deadline_s)
        self.received.bytes += frame.tensor_bytes
        return frame

    def close(self, error: str = "") -> None:
        """See `Link.close`."""
        if error:
            self._outbox.fail(LinkError(f"{self.name} failed: {error}"))
            self._inbox.fail(LinkError(f"{self.name} failed: {error}"))
        self._outbox.end()
        self._inbox.fail(LinkError(f"{self.name} closed the link"))


def memory_pair(
    left: str, right: str, *, queue_frames: int = QUEUE_FRAMES
) -> tuple[MemoryLink, MemoryLink]:
    """Two joined ends: the first is held by `left`, the second by `right`."""
    to_right: Mailbox[Frame] = Mailbox(queue_frames, peer=left)
    to_left: Mailbox[Frame] = Mailbox(queue_frames, peer=right)
    return (
        MemoryLink(left, right, inbox=to_left, outbox=to_right),
        MemoryLink(right, left, inbox=to_right, outbox=to_left),
    )

"""The seam between stages: `Link`, and the pair that joins two threads of one process."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

from collapipe_flwr.core.errors import LinkError
from collapipe_flwr.costs.link_rates import Note
from collapipe_flwr.pipeline.frame import Frame
from collapipe_flwr.pipeline.mailbox import Mailbox

NOTED_FRAMES = 128  # of one direction: some steps, and a report stays small

Notes = tuple[Note, ...]


@dataclass(slots=True, kw_only=True)
class FrameLog:
    """When the first frame and the last ones of one direction passed this end of a wire.

    Both ends know the stream by the same `stream_id`, which no other stream of a round has.
    """

    stream_id: int = 0
    _frames: int = 0
    _first: Notes = ()
    _last: deque[Note] = field(default_factory=lambda: deque(maxlen=NOTED_FRAMES))

    def note(self, at_s: float, size_bytes: int) -> None:
        """A frame passes."""
        note = (self.stream_id, self._frames, round(at_s, 6), size_bytes)
        if not self._frames:
            self._first = (note,)
        else:
            self._last.append(note)
        self._frames += 1

    @property
    def notes(self) -> Notes:
        """In order; HELLO, the first, may be the only small one."""
        return (*self._first, *self._last)


@dataclass(slots=True, kw_only=True)
class Traffic:
    """What went over one link since it was opened, as seen from one of its ends.

    `sending_s` is the time in which what was sent kept the wire busy, as far as this end can tell:
    until the transport took it, and as long as a pace held it back. 0 where nothing is sent.
    `left` and `arrived` note single frames on links that move bytes: when a pace let them go, and
    when they were there.
    """

    sent_bytes: int = 0
    received_bytes: int = 0
    sending_s: float = 0.0
    left: FrameLog = field(default_factory=FrameLog)
    arrived: FrameLog = field(default_factory=FrameLog)


class Link(Protocol):
    """An ordered, bounded, two-way path of frames to one neighbour."""

    @property
    def peer(self) -> str:
        """How error sentences name the neighbour."""
        ...

    @property
    def traffic(self) -> Traffic:
        """Bytes moved so far."""
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
        self.traffic = Traffic()
        self._inbox = inbox
        self._outbox = outbox

    def send(self, frame: Frame, *, deadline_s: float) -> None:
        """See `Link.send`."""
        self._outbox.put(frame, deadline_s)
        self.traffic.sent_bytes += frame.tensor_bytes

    def receive(self, *, deadline_s: float) -> Frame:
        """See `Link.receive`."""
        frame = self._inbox.get(deadline_s)
        self.traffic.received_bytes += frame.tensor_bytes
        return frame

    def close(self, error: str = "") -> None:
        """See `Link.close`."""
        if error:
            self._outbox.fail(LinkError(f"{self.name} failed: {error}"))
            self._inbox.fail(LinkError(f"{self.name} failed: {error}"))
        self._outbox.end()
        self._inbox.fail(LinkError(f"{self.name} closed the link"))


def memory_pair(left: str, right: str, *, queue_frames: int = 64) -> tuple[MemoryLink, MemoryLink]:
    """Two joined ends: the first is held by `left`, the second by `right`."""
    to_right: Mailbox[Frame] = Mailbox(queue_frames, peer=left)
    to_left: Mailbox[Frame] = Mailbox(queue_frames, peer=right)
    return (
        MemoryLink(left, right, inbox=to_left, outbox=to_right),
        MemoryLink(right, left, inbox=to_right, outbox=to_left),
    )

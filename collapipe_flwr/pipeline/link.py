"""Links between neighbouring stages, and the frames on them: one per micro-batch and direction.

A `ReplicaLinks` is one link to all replicas of a neighbouring stage.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from functools import reduce
from threading import Condition
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from collapipe_flwr.core.errors import Blame, LinkError, LinkTimeout, MemberFailed, ProtocolError
from collapipe_flwr.core.links import QUEUE_FRAMES, LinkTraffic
from collapipe_flwr.core.schedule import ReplicaIndex
from collapipe_flwr.core.texts import make_printable

if TYPE_CHECKING:
    from torch import Tensor

# A batch's own tensors travel in the same frames, by names that do not begin with a slash.
HIDDEN = "/hidden"  # the tensor of an ACTIVATION frame that carries gradients
GRAD = "/grad"  # the tensor of a GRADIENT frame
LEARNS = "learns"  # scalar of an ACTIVATION: 0 where everything ahead is frozen

Item = TypeVar("Item")


class FrameKind(IntEnum):
    """The number is the byte on the wire: never reuse one."""

    HELLO = 0  # the receiver accepts this stream
    BEGIN = 1  # a step starts: how many micro-batches, training or evaluation
    ACTIVATION = 2  # down the chain: hidden state and the context of one micro-batch
    GRADIENT = 3  # up the chain: gradient of the hidden state, loss and weight
    TOTALS = 4  # up the chain: sums over the stages at the end of a step
    COMMIT = 5  # down the chain: sums of gradients, and the factor to scale all by
    END = 6  # no further step
    ERROR = 7  # the sender gave up; `text` says why
    WEIGHTS = 8  # a piece of a state dict
    ROWS = 9  # rows of a tied table up the chain, their gradients down (`gradient_sums`)
    SERVE = 10  # down the chain: from now on generate texts, until END (`generation`)
    TOKENS = 11  # up the chain: new tokens of a text, or those whose hidden states are requested
    STOP = 12  # down the chain: the client wants no more of this text
    SUM = 13  # between replicas of a stage: a piece of their gradients (`gradient_sums`)


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One message; its tensors must not be changed afterwards."""

    kind: FrameKind
    step: int = 0
    micro_batch: int = 0
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    scalars: Mapping[str, float] = field(default_factory=dict)
    text: str = ""

    def carry(self, tensors: Mapping[str, Tensor]) -> Frame:
        """Return this frame with other tensors."""
        return Frame(
            kind=self.kind,
            step=self.step,
            micro_batch=self.micro_batch,
            tensors=tensors,
            scalars=self.scalars,
            text=self.text,
        )

    @property
    def tensor_bytes(self) -> int:
        """Bytes of all tensors as they are in memory."""
        return sum([t.nbytes for t in self.tensors.values()])


# Scalars of an ERROR frame whose first two lines name its witness and whom that accuses.
_BLAME, _SIDE = "blame", "side"
_FAILED = " failed: "  # in an error that was passed on
_MOST_CHARACTERS = 1000  # of an error that is sent


def make_error_frame(error: LinkError) -> Frame:
    """Build the ERROR frame that tells a neighbour."""
    if not isinstance(error, MemberFailed):
        return Frame(kind=FrameKind.ERROR, text=make_printable(str(error))[:_MOST_CHARACTERS])
    return Frame(
        kind=FrameKind.ERROR,
        scalars={_BLAME: float(error.blame), _SIDE: float(error.side)},
        text=make_printable(f"{error.witness}\n{error.accused}\n{error.why}")[:_MOST_CHARACTERS],
    )


def read_error(frame: Frame, peer: str) -> LinkError:
    """Read an ERROR frame of ``peer``, which is named unless it passes the error on."""
    text, scalars = make_printable(frame.text[:_MOST_CHARACTERS]), frame.scalars
    blame, side = scalars.get(_BLAME), scalars.get(_SIDE)
    if blame in tuple(Blame) and side in (-1, 0, 1):
        witness, accused, why = (*text.split("\n", 2), "", "")[:3]
        return MemberFailed(witness, why, Blame(int(blame)), int(side), accused)
    return LinkError(text if _FAILED in text else f"{peer}{_FAILED}{text}")


def needs_gradient(frame: Frame) -> bool:
    """Return whether any stage ahead of this one can use a gradient of the hidden state."""
    return frame.scalars.get(LEARNS, 1.0) != 0.0


def select_context(frame: Frame) -> dict[str, Tensor]:
    """Return all tensors of an ACTIVATION frame but the hidden state."""
    return {name: t for name, t in frame.tensors.items() if name != HIDDEN}


class Link(Protocol):
    """An ordered, bounded, two-way path of frames to one neighbour."""

    @property
    def peer(self) -> str:
        """The neighbour in error messages."""

    @property
    def peer_id(self) -> str:
        """The neighbour's name alone; empty for several."""

    @property
    def sent(self) -> LinkTraffic:
        """The traffic sent so far."""

    @property
    def received(self) -> LinkTraffic:
        """The traffic received so far."""

    def send(self, frame: Frame, *, deadline_s: float) -> None:
        """Queue a frame. Raises LinkError at once on a broken link, LinkTimeout when full."""

    def receive(self, *, deadline_s: float) -> Frame:
        """Take the next frame. Raises LinkError at once when the peer failed or closed."""

    def close(self, error: str | LinkError = "") -> None:
        """Close both directions; an error overtakes queued frames and is raised by the peer.

        Closing twice is allowed.
        """


class LinkClosed(LinkError):
    """The peer ended the link in good order."""


class Mailbox(Generic[Item]):
    """A queue of at most `capacity` items between two threads; `peer` names the other side.

    With `most_bytes` the total size of the items is bounded too; one item always fits. With None
    for a deadline, a call waits until the mailbox ends.

    `end` delivers the queued items and then raises `LinkClosed`; `fail` drops them and raises the
    given error in every waiting thread at once.
    """

    def __init__(self, capacity: int, peer: str, *, most_bytes: float = math.inf) -> None:
        self._items: deque[tuple[Item, int]] = deque()
        self._bytes = 0
        self._most_bytes = most_bytes
        self._capacity = capacity
        self._peer = peer
        self._end: LinkError | None = None
        self._changed = Condition()

    def put(self, item: Item, deadline_s: float | None, *, size_bytes: int = 0) -> None:
        """Queue one item. Raises LinkError when ended, LinkTimeout when full until the deadline."""
        with self._changed:
            if not self._has_room(size_bytes):
                self._wait(lambda: self._has_room(size_bytes), deadline_s, "took nothing")
            if self._end is not None:
                raise _copy_error(self._end)
            self._append(item, size_bytes)

    def get(self, deadline_s: float | None) -> Item:
        """Take the oldest item. Raises LinkClosed, LinkError or, at the deadline, LinkTimeout."""
        with self._changed:
            if not self._items:
                self._wait(lambda: bool(self._items), deadline_s, "sent nothing")
            if not self._items:
                assert self._end is not None
                raise _copy_error(self._end)
            item, size_bytes = self._items.popleft()
            self._bytes -= size_bytes
            self._changed.notify_all()
            return item

    def end(self) -> None:
        """Refuse further items; the queued ones are still delivered."""
        with self._changed:
            if self._end is None:
                self._end = LinkClosed(f"{self._peer} closed the link")
                self._changed.notify_all()

    def end_with(self, last: Item, error: LinkError) -> None:
        """Deliver `last` instead of the queued items, and raise `error` afterwards."""
        with self._changed:
            if self._end is None:
                self._end = error
                self._items.clear()
                self._bytes = 0
                self._append(last, 0)

    def fail(self, error: LinkError) -> None:
        """Drop the queued items and raise `error` from now on; the first failure stays."""
        with self._changed:
            if self._end is None or isinstance(self._end, LinkClosed):
                self._end = error
                self._items.clear()
                self._bytes = 0
                self._changed.notify_all()

    def _has_room(self, size_bytes: int) -> bool:
        fits = not self._items or self._bytes + size_bytes <= self._most_bytes
        return fits and len(self._items) < self._capacity

    def _append(self, item: Item, size_bytes: int) -> None:
        self._items.append((item, size_bytes))
        self._bytes += size_bytes
        self._changed.notify_all()

    def _wait(self, ready: Callable[[], bool], deadline_s: float | None, what: str) -> None:
        if not self._changed.wait_for(lambda: ready() or self._end is not None, deadline_s):
            raise LinkTimeout(f"{self._peer} {what} within {deadline_s:g} s")


def _copy_error(error: LinkError) -> LinkError:
    """Copy an exception: one instance must not be raised in two threads."""
    fresh = type(error)(*error.args)
    fresh.__cause__ = error.__cause__
    return fresh


class MemoryLink:
    """One end of `make_memory_pair`: tensors are handed over, not copied."""

    def __init__(self, name: str, peer: str, inbox: Mailbox[Any], outbox: Mailbox[Any]) -> None:
        self.name = name
        self.peer = self.peer_id = peer
        self.sent, self.received = LinkTraffic(), LinkTraffic()
        self._inbox = inbox
        self._outbox = outbox

    def send(self, frame: Frame, *, deadline_s: float) -> None:
        self._outbox.put(frame, deadline_s)
        self.sent.bytes += frame.tensor_bytes

    def receive(self, *, deadline_s: float) -> Frame:
        frame: Frame = self._inbox.get(deadline_s)
        self.received.bytes += frame.tensor_bytes
        return frame

    def close(self, error: str | LinkError = "") -> None:
        if error:
            sent = error if isinstance(error, LinkError) else LinkError(error)
            received = read_error(make_error_frame(sent), self.name)
            self._outbox.fail(received)
            self._inbox.fail(received)
        self._outbox.end()
        self._inbox.fail(LinkError(f"{self.name} closed the link"))


def make_memory_pair(
    left: str, right: str, *, queue_frames: int = QUEUE_FRAMES
) -> tuple[MemoryLink, MemoryLink]:
    """Make two joined ends: the first is held by `left`, the second by `right`."""
    to_right: Mailbox[Frame] = Mailbox(queue_frames, peer=left)
    to_left: Mailbox[Frame] = Mailbox(queue_frames, peer=right)
    return (
        MemoryLink(left, right, inbox=to_left, outbox=to_right),
        MemoryLink(right, left, inbox=to_right, outbox=to_left),
    )


_OF_MICRO_BATCHES = (FrameKind.ACTIVATION, FrameKind.GRADIENT)


class ReplicaLinks:
    """Links to the replicas of a stage, in the order in which micro-batches of `turn` take them.

    Frames of micro-batches alternate; all others are sent to each replica, and come from each. An
    error names the replica on whose link it happened.
    """

    peer_id = ""

    def __init__(self, links: Sequence[Link], turn: ReplicaIndex) -> None:
        self.peer = " and ".join(link.peer for link in links)
        self._links = tuple(links)
        self._turn = turn

    @property
    def sent(self) -> LinkTraffic:
        return reduce(LinkTraffic.__add__, (link.sent for link in self._links))

    @property
    def received(self) -> LinkTraffic:
        return reduce(LinkTraffic.__add__, (link.received for link in self._links))

    def choose_link(self, micro_batch: int) -> Link:
        """Return the link that a micro-batch takes."""
        return self._links[self._turn.find_lane(micro_batch, len(self._links))]

    def send(self, frame: Frame, *, deadline_s: float) -> None:
        among = frame.kind in _OF_MICRO_BATCHES
        for link in (self.choose_link(frame.micro_batch),) if among else self._links:
            with _name_peer(link):
                link.send(frame, deadline_s=deadline_s)

    def receive(self, *, deadline_s: float) -> Frame:
        """Take the frame that all replicas sent. Raises ProtocolError where they differ."""
        until_s = time.monotonic() + deadline_s
        taken = []
        for link in self._links:
            with _name_peer(link):
                taken.append(link.receive(deadline_s=max(until_s - time.monotonic(), 0.0)))
        first, *others = taken
        for link, frame in zip(self._links[1:], others, strict=True):
            if (frame.kind, frame.step) != (first.kind, first.step):
                raise ProtocolError(
                    f"{link.peer} sent {frame.kind.name} of step {frame.step}, but "
                    f"{self._links[0].peer} {first.kind.name} of step {first.step}"
                )
        return first

    def close(self, error: str | LinkError = "") -> None:
        for link in self._links:
            link.close(error)


@contextmanager
def _name_peer(link: Link) -> Iterator[None]:
    """Note in a LinkError of the body whose link it is."""
    try:
        yield
    except LinkError as error:
        error.peer_id = link.peer_id
        raise


def join_links(links: Sequence[Link], turn: ReplicaIndex) -> Link:
    """Join links into one; a single link is returned as it is."""
    return links[0] if len(links) == 1 else ReplicaLinks(links, turn)


def choose_lane(link: Link, kind: FrameKind, micro_batch: int) -> Link:
    """Return the link that brings this frame."""
    if kind in _OF_MICRO_BATCHES and isinstance(link, ReplicaLinks):
        return link.choose_link(micro_batch)
    return link

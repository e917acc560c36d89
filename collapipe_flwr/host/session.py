"""One cluster's part on a host, and its current use.

A session is at rest, in use by one call, or in use by one stream. A stream begins when all its
links are there; a stream that is broken off before never runs. All changes happen under one lock. A
use that is over cannot end or disturb a later one. A closed session begins no new use, and its last
use frees its tensors.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor, nn

from collapipe_flwr.core.errors import LinkError
from collapipe_flwr.core.measurements import StageMeasurement
from collapipe_flwr.core.schedule import ReplicaIndex
from collapipe_flwr.host.ledger import Account
from collapipe_flwr.pipeline.config import PassesDone, SessionRequest
from collapipe_flwr.pipeline.link import Link, join_links
from collapipe_flwr.pipeline.meter import Recorder
from collapipe_flwr.pipeline.optimizer import Optimizer

BUSY_S = 60.0  # for the current use of a part to end
LEAVING_S = 1.0  # for a call to end that has been answered


class SessionRefused(LinkError):
    """No such session, a wrong token, or no room for one more."""


class Lane(NamedTuple):
    """One of the links from the replicas of the stage ahead; 0 of 0 is from the next replica."""

    number: int = 0
    of: int = 1


ONLY, SIBLING = Lane(), Lane(0, 0)


@dataclass(slots=True)
class Lanes:
    """The lanes that were claimed, with their links once they are there; `turn` is the stage's."""

    turn: ReplicaIndex
    links: dict[Lane, Link | None] = field(default_factory=dict)

    def accepts(self, lane: Lane) -> bool:
        """Return whether this lane is missing; all must give the same number of lanes."""
        if lane == SIBLING:
            return self._has_next and lane not in self.links
        fits = 0 <= lane.number < lane.of
        return fits and lane not in self.links and all(lane.of == known.of for known in self._ahead)

    @property
    def complete(self) -> bool:
        """Whether all links are there."""
        there = {lane for lane, link in self.links.items() if link is not None}
        ahead = there - {SIBLING}
        has_all = bool(ahead) and len(ahead) == next(iter(ahead)).of
        return has_all and (SIBLING in there or not self._has_next)

    @property
    def are_several(self) -> bool:
        """Whether more than one link is needed."""
        return self._has_next or any(lane.of > 1 for lane in self._ahead)

    @property
    def upstream(self) -> Link:
        """All links from the stage ahead as one."""
        found = (self.links[lane] for lane in sorted(self._ahead))
        return join_links([link for link in found if link is not None], self.turn)

    @property
    def behind(self) -> Link | None:
        return self.links.get(SIBLING)

    @property
    def _ahead(self) -> set[Lane]:
        return self.links.keys() - {SIBLING}

    @property
    def _has_next(self) -> bool:
        return self.turn.replica < self.turn.replicas - 1


@dataclass(slots=True, eq=False)
class SessionStream:
    """One stream of one session, from its claim to its end."""

    session: HostSession
    lanes: Lanes
    links: list[Link] = field(default_factory=list)
    runs: bool = False  # else it is broken off at once
    broken: str = ""  # why it must not go on
    over: threading.Event = field(default_factory=threading.Event)


@dataclass(slots=True, eq=False)
class HostSession:
    """A part with its optimizer, and its life.

    `drop` makes the host forget the session; its last use calls it, once.
    """

    request: SessionRequest
    account: Account
    drop: Callable[[HostSession], None]
    used_s: float  # when it was last asked for
    part: nn.Module | None = None
    optimizer: Optimizer | None = None
    report: StageMeasurement | None = None  # of all that was done since the weights were set
    steps: int = 0  # done since then
    tested: int = 0  # micro-batches
    recorder: Recorder | None = None  # of the stream that runs
    lacks_checkpoint: bool = False  # its frozen weights come from its control unit
    found: dict[str, Tensor] = field(default_factory=dict)  # here, for the next push, by digest
    wanted: Mapping[str, str] = field(
        default_factory=dict
    )  # digests that `find_missing` was asked for
    claiming: threading.Lock = field(default_factory=threading.Lock)  # one lane at a time
    closed: str = ""  # why no use begins any more; the last one may not have ended yet
    _use: object = None  # of the part now: a stream, or a token of one call; None at rest
    _turn: threading.Condition = field(default_factory=threading.Condition)
    _dropped: threading.Event = field(default_factory=threading.Event)

    @property
    def stream(self) -> SessionStream | None:
        """The stream that has the part."""
        return self._use if isinstance(self._use, SessionStream) else None

    @contextmanager
    def keep_at_rest(self) -> Iterator[None]:
        """Keep the part from changing. Raises SessionRefused while a stream has it."""
        with self._turn:
            if not self._turn.wait_for(self._has_no_call, BUSY_S):
                raise SessionRefused(f"the session has been busy for {BUSY_S:g} s")
            self._refuse_if_closed()
            if self._use is not None:
                raise SessionRefused("the session is in the middle of a stream")
            use = self._use = object()
        try:
            yield
        finally:
            self._leave(use)

    def claim(self, lane: Lane) -> SessionStream:
        """Give the part to a stream; the caller has it at rest.

        Raises SessionRefused for a lane that the stage does not have.
        """
        with self._turn:
            self._refuse_if_closed()
            lanes = Lanes(self.request.stage.turn)
            if not lanes.accepts(lane):
                raise SessionRefused(f"the session's stage has no lane {lane.number} of {lane.of}")
            lanes.links[lane] = None
            self._use = stream = SessionStream(self, lanes)
            return stream

    def join(self, lane: Lane) -> SessionStream | None:
        """Reserve this lane of a claimed stream that waits for it; None if there is none."""
        with self._turn:
            stream = self.stream
            if stream is None or stream.runs or not stream.lanes.accepts(lane):
                return None
            stream.lanes.links[lane] = None
            return stream

    def enter(self, stream: SessionStream, lane: Lane, link: Link) -> bool:
        """Add a lane's link; return whether it was the last one.

        Raises SessionRefused when the stream was broken off.
        """
        with self._turn:
            self.add_link(stream, link)
            stream.lanes.links[lane] = link
            return stream.lanes.complete

    def begin(self, stream: SessionStream, upstream: Link) -> None:
        """Begin a claimed stream. Raises SessionRefused when it was broken off before."""
        with self._turn:
            self.add_link(stream, upstream)
            stream.runs = True

    def add_link(self, stream: SessionStream, link: Link) -> None:
        """Add a link that is closed when the stream is broken off.

        Raises SessionRefused when it is broken off already.
        """
        with self._turn:
            if stream.broken:
                raise SessionRefused(stream.broken)
            stream.links.append(link)

    def end(self, stream: SessionStream) -> None:
        """End a stream; may be called twice."""
        self._leave(stream)
        stream.over.set()

    def fail(self, why: str) -> None:
        """Close the session from within its stream, at whose end it is dropped."""
        with self._turn:
            self.closed = self.closed or why

    def cut(self, why: str, only: SessionStream | None = None) -> None:
        """Close the links of the stream that has the part, so that it ends; do not wait for it.

        A step in progress is not applied. With `only`, no other stream is ended.
        """
        with self._turn:
            links = self._end_stream(why) if only in (None, self.stream) else ()
        for link in links:
            link.close(why)

    def close(self, why: str) -> bool:
        """Refuse further uses, end a stream, and drop the session.

        Returns whether the part was at rest: then its weights are those after a whole step, and
        still here, see `empty`. Raises SessionRefused when it is closed already, and when the use
        of the part does not end in time; the session is dropped at that end.
        """
        with self._turn:
            # The caller may see the end of its last call before this host has left that call.
            self._turn.wait_for(self._has_no_call, LEAVING_S)
            self._refuse_if_closed()
            self.closed = why
            whole = self._use is None or (self.stream is not None and not self.stream.runs)
            links = self._end_stream(why) if whole else ()
        if whole:
            for link in links:
                link.close(why)
            self._drop()
            return True
        self.cut(why)
        if not self._dropped.wait(BUSY_S):
            raise SessionRefused(
                f"the session is closed ({why}), but what uses it has not ended for {BUSY_S:g} s"
            )
        return False

    def leave_room(self) -> None:
        """Wait, if the session is closed, for the end of its last use, which keeps its memory."""
        if self.closed:
            self._dropped.wait(BUSY_S)

    def retire(self) -> bool:
        """Close the session without `drop` unless it is in use; return whether it was closed."""
        with self._turn:
            if self._use is not None or self.closed:
                return False
            self.closed = "it was not in use"
            self.empty()
            self._dropped.set()
            return True

    @property
    def passes(self) -> PassesDone:
        """Its work since the weights were set, also in a stream that still runs."""
        with self._turn:
            report, running = self.report, self.recorder
            return PassesDone(
                attempt=self.request.attempt,
                trained=(report.micro_batches if report else 0)
                + (running.count("backward") if running else 0),
                tested=self.tested + (running.count("test") if running else 0),
            )

    def count(self, stream: StageMeasurement, tested: int = 0) -> None:
        """Add the report of a stream that ended in good order and ``tested`` micro-batches."""
        with self._turn:
            self.tested += tested
            self.report = stream if self.report is None else self.report + stream
            self.steps += stream.steps
            self.recorder = None

    def empty(self) -> None:
        """Free the session's tensors, even if others still refer to the session."""
        self.part = self.optimizer = None
        self.found, self.wanted = {}, {}

    def _has_no_call(self) -> bool:
        return self._use is None or self.stream is not None

    def _end_stream(self, why: str) -> tuple[Link, ...]:
        """Break off the stream, if any, and return its links; a waiting one is over at once."""
        stream = self.stream
        if stream is None:
            return ()
        stream.broken = stream.broken or why
        if not stream.runs:
            stream.over.set()
            self._use = None
            self._turn.notify_all()
        return tuple(stream.links)

    def _leave(self, use: object) -> None:
        """End a use, unless it has ended already; the last one frees the session's tensors."""
        with self._turn:
            if self._use is not use:
                return
            self._use = None
            self._turn.notify_all()
            last = bool(self.closed)
        if last:
            self.empty()
            self._drop()

    def _drop(self) -> None:
        try:
            self.drop(self)
        finally:
            self._dropped.set()

    def _refuse_if_closed(self) -> None:
        if self.closed:
            raise SessionRefused(f"the session ended: {self.closed}")

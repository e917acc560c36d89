"""One cluster's part on a host, and what may use it now.

A session is at rest, in use by one call, claimed by a stream, running one, or gone:

    REST -> BUSY -> REST                        a call reads or changes the part
    BUSY -> CLAIMED -> RUNNING -> REST          a stream; it begins when all its links are there
    CLAIMED -> REST                               one that is broken off before never runs
    any but GONE -> GONE                        closed; where the part is in use, at the end of that

All changes happen under one lock. Every use has a number, its epoch, so that a use that is over
cannot end or disturb a later one. A closed session begins no new use, and its last use frees what
it held.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum, auto

from torch import Tensor, nn

from collapipe_flwr.core.errors import LinkError
from collapipe_flwr.host.lanes import Lane, Lanes
from collapipe_flwr.host.ledger import Account
from collapipe_flwr.pipeline.config import PassesDone, SessionRequest
from collapipe_flwr.pipeline.link import Link
from collapipe_flwr.pipeline.meter import Recorder, StageReport
from collapipe_flwr.pipeline.optimizer import Optimizer
from collapipe_flwr.pipeline.state import PartState

BUSY_S = 60.0  # for the current use of a part to end
LEAVING_S = 1.0  # for a call to end that has been answered


class SessionRefused(LinkError):
    """No such session, a wrong token, or no room for one more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A session after `step` steps, with the report on them."""

    request: SessionRequest
    step: int
    state: PartState
    report: StageReport | None


class Life(Enum):
    """The state of a session; see above."""

    REST = auto()
    BUSY = auto()
    CLAIMED = auto()
    RUNNING = auto()
    GONE = auto()


@dataclass(slots=True, eq=False)
class Stream:
    """One stream of one session, from its claim to its end."""

    session: Session
    epoch: int
    lanes: Lanes
    links: list[Link] = field(default_factory=list)
    broken: str = ""  # why it must not go on
    over: threading.Event = field(default_factory=threading.Event)


@dataclass(slots=True, eq=False)
class Session:
    """A part, what trains it, and its life.

    `drop` makes the host forget the session; its last use calls it, once.
    """

    request: SessionRequest
    account: Account
    drop: Callable[[Session], None]
    used_s: float  # when it was last asked for
    part: nn.Module | None = None
    optimizer: Optimizer | None = None
    report: StageReport | None = None  # of all that was done since the weights were set
    steps: int = 0  # done since then
    recorder: Recorder | None = None  # of the stream that runs
    lacks_checkpoint: bool = False  # its frozen weights come from its control unit
    saved: Snapshot | None = None  # to which a recoverable session returns
    found: dict[str, Tensor] = field(default_factory=dict)  # here, for the next push, by digest
    wanted: Mapping[str, str] = field(default_factory=dict)  # digests that `missing` was asked for
    claiming: threading.Lock = field(default_factory=threading.Lock)  # one lane at a time
    closed: str = ""  # why no use begins any more; the last one may not have ended yet
    _life: Life = Life.REST
    _epoch: int = 0
    _stream: Stream | None = None
    _turn: threading.Condition = field(default_factory=threading.Condition)
    _dropped: threading.Event = field(default_factory=threading.Event)

    @property
    def running(self) -> bool:
        """Whether a stream has the part."""
        return self._life in (Life.CLAIMED, Life.RUNNING)

    @contextmanager
    def at_rest(self) -> Iterator[None]:
        """Keep the part from changing. Raises SessionRefused while a stream has it."""
        with self._turn:
            if not self._turn.wait_for(lambda: self._life is not Life.BUSY, BUSY_S):
                raise SessionRefused(f"the session has been busy for {BUSY_S:g} s")
            self._refuse_if_closed()
            if self._life is not Life.REST:
                raise SessionRefused("the session is in the middle of a stream")
            epoch = self._begin(Life.BUSY)
        try:
            yield
        finally:
            self._leave(epoch)

    def claim(self, lane: Lane) -> Stream:
        """Give the part to a stream; the caller has it at rest.

        Raises SessionRefused for a lane that the stage does not have.
        """
        with self._turn:
            self._refuse_if_closed()
            assert self._life is Life.BUSY
            lanes = Lanes(self.request.stage.turn)
            if not lanes.accepts(lane):
                raise SessionRefused(f"the session's stage has no lane {lane.number} of {lane.of}")
            lanes.links[lane] = None
            self._stream = Stream(self, self._begin(Life.CLAIMED), lanes)
            return self._stream

    def joined(self, lane: Lane) -> Stream | None:
        """Reserve this lane of a claimed stream that waits for it; None if there is none."""
        with self._turn:
            stream = self._stream
            if stream is None or self._life is not Life.CLAIMED or not stream.lanes.accepts(lane):
                return None
            stream.lanes.links[lane] = None
            return stream

    def enter(self, stream: Stream, lane: Lane, link: Link) -> bool:
        """Add a lane's link; return whether it was the last one.

        Raises SessionRefused when the stream was broken off.
        """
        with self._turn:
            self.add_link(stream, link)
            stream.lanes.links[lane] = link
            return stream.lanes.complete

    def begin(self, stream: Stream, upstream: Link) -> None:
        """Begin a claimed stream. Raises SessionRefused when it was broken off before."""
        with self._turn:
            self.add_link(stream, upstream)
            assert (self._life, self._epoch) == (Life.CLAIMED, stream.epoch)
            self._life = Life.RUNNING

    def add_link(self, stream: Stream, link: Link) -> None:
        """Add a link that is closed when the stream is broken off.

        Raises SessionRefused when it is broken off already.
        """
        with self._turn:
            if stream.broken:
                raise SessionRefused(stream.broken)
            stream.links.append(link)

    def give_up(self, stream: Stream, why: str) -> None:
        """Close the links of a stream, unless it is over, so that it ends."""
        with self._turn:
            links = self._end_stream(why) if self._stream is stream else ()
        for link in links:
            link.close(why)

    def end(self, stream: Stream) -> None:
        """The stream is over; may be called twice."""
        self._leave(stream.epoch)
        stream.over.set()

    def fail(self, why: str) -> None:
        """Close the session from within its stream, at whose end it is dropped."""
        with self._turn:
            self.closed = self.closed or why

    def break_off(self, why: str) -> None:
        """End a stream that has the part, and wait for it; a step in progress is not applied.

        Raises SessionRefused when the step does not end in time.
        """
        stream = self.cut(why)
        with self._turn:
            if not self._turn.wait_for(lambda: not stream or self._stream is not stream, BUSY_S):
                raise SessionRefused(
                    f"the stream was told to end ({why}), but its step has not for {BUSY_S:g} s"
                )

    def cut(self, why: str) -> Stream | None:
        """Close the links of a stream that has the part, so that it ends; do not wait for it."""
        with self._turn:
            stream, links = self._stream, self._end_stream(why)
        for link in links:
            link.close(why)
        return stream

    def close(self, why: str) -> bool:
        """Begin no use any more, end a stream, and drop the session.

        Returns whether the part was at rest: then its weights are those after a whole step, and
        still here, see `empty`. Raises SessionRefused when it is closed already, and when the use
        of the part does not end in time; the session is dropped at that end.
        """
        with self._turn:
            # The caller may see the end of its last call before this host has left that call.
            self._turn.wait_for(lambda: self._life is not Life.BUSY, LEAVING_S)
            self._refuse_if_closed()
            self.closed = why
            whole = self._life in (Life.REST, Life.CLAIMED)
            links = self._end_stream(why) if whole else ()
            if whole:
                self._life = Life.GONE
        if whole:
            for link in links:
                link.close(why)
            self._drop()
            return True
        self.break_off(why)
        if not self._dropped.wait(BUSY_S):
            raise SessionRefused(
                f"the session is closed ({why}), but what uses it has not ended for {BUSY_S:g} s"
            )
        return False

    def retire(self) -> bool:
        """Close a session that is not in use, without `drop`; return whether it was not."""
        with self._turn:
            if self._life is not Life.REST or self.closed:
                return False
            self.closed, self._life = "it was not in use", Life.GONE
            self.empty()
            return True

    @property
    def passes(self) -> PassesDone:
        """Its work since the weights were set, also in a stream that still runs."""
        report, running = self.report, self.recorder
        return PassesDone(
            trained=(report.micro_batches if report else 0)
            + (running.count("backward") if running else 0),
            tested=running.count("test") if running else 0,
        )

    def count(self, stream: StageReport) -> None:
        """Add the report of a stream that ended in good order."""
        self.report = stream if self.report is None else self.report + stream
        self.steps += stream.steps

    def empty(self) -> None:
        """Free what it held, even if others still refer to it."""
        self.part = self.optimizer = self.saved = None
        self.found, self.wanted = {}, {}

    def go_back(self) -> None:
        """Return to the last snapshot; the part is built again when it is needed."""
        assert self.saved is not None
        self.part = self.optimizer = None
        self.steps, self.report = self.saved.step, self.saved.report

    def _end_stream(self, why: str) -> tuple[Link, ...]:
        """Break off the stream, if any; one that has not begun is over at once. Its links."""
        if self._stream is None:
            return ()
        self._stream.broken = self._stream.broken or why
        links = tuple(self._stream.links)
        if self._life is Life.CLAIMED:
            self._stream.over.set()
            self._life, self._stream = Life.REST, None
            self._turn.notify_all()
        return links

    def _begin(self, life: Life) -> int:
        self._life = life
        self._epoch += 1
        return self._epoch

    def _leave(self, epoch: int) -> None:
        """End a use, unless it has ended already or another one has begun since."""
        with self._turn:
            if epoch != self._epoch or self._life in (Life.REST, Life.GONE):
                return
            self._life = Life.GONE if self.closed else Life.REST
            self._stream = None
            self._turn.notify_all()
            last = self._life is Life.GONE
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

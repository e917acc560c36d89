"""The sessions of a host: who may use which part, and whether it is in use."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from secrets import compare_digest
from typing import Protocol

from torch import Tensor, nn

from collapipe_flwr.core.errors import LinkError
from collapipe_flwr.pipeline.link import Link
from collapipe_flwr.pipeline.meter import StageReport
from collapipe_flwr.pipeline.optimizer import Optimizer
from collapipe_flwr.pipeline.session import Health, SessionRequest
from collapipe_flwr.pipeline.state import PartState

_BUSY_S = 60.0  # for whoever reads or changes a part before us


class SessionRefused(LinkError):
    """No such session, a wrong token, or no room for one more."""


class HostedPart(Protocol):
    """What a host needs of a part: an `nn.Module` that can also load weights in place."""

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Overwrite the weights. Raises ModelError when they do not fit."""
        ...

    def state_dict(self) -> dict[str, Tensor]:
        """The weights."""
        ...

    def parameters(self) -> Iterable[nn.Parameter]:
        """What may train."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A snapshot: the part after `step` steps, and what those measured."""

    step: int
    state: PartState
    report: StageReport | None


@dataclass(slots=True)
class Session:
    """One cluster's part on this host."""

    request: SessionRequest
    used_s: float  # when somebody last asked for it
    part: HostedPart | None = None
    optimizer: Optimizer | None = None
    report: StageReport | None = None  # of all that was done since the weights were set
    steps: int = 0  # done since then
    pushed_bytes: int = 0  # of the weights that it was given
    lacks_checkpoint: bool = False  # its frozen weights come from its control unit
    saved: Saved | None = None  # where a recoverable session goes back to
    running: bool = False
    kept: dict[str, Tensor] = field(default_factory=dict)  # found here, for the next push
    links: list[Link] = field(default_factory=list)  # of the stream that runs
    over: threading.Event = field(default_factory=threading.Event)  # set when a stream has ended
    lock: threading.Lock = field(default_factory=threading.Lock)

    @contextmanager
    def at_rest(self) -> Iterator[None]:
        """Keep the part from changing. Raises SessionRefused while a stream runs."""
        if not self.lock.acquire(timeout=_BUSY_S):
            raise SessionRefused(f"the session has been busy for {_BUSY_S:g} s")
        try:
            if self.running:
                raise SessionRefused("the session is in the middle of a stream")
            yield
        finally:
            self.lock.release()

    def begin(self) -> None:
        """A stream claims the session; the caller holds it at rest."""
        self.over.clear()
        self.running = True

    def end(self) -> None:
        """The stream is over."""
        self.running = False
        self.links.clear()
        self.over.set()

    def count(self, stream: StageReport) -> None:
        """A stream ended in good order."""
        self.report = stream if self.report is None else self.report + stream
        self.steps += stream.steps

    def break_off(self, why: str) -> None:
        """End a stream that runs, however its peers are; a step in progress is not applied."""
        links = tuple(self.links)
        for link in links:
            link.close(why)
        if links:
            self.over.wait(_BUSY_S)

    def go_back(self) -> None:
        """Stand where the last snapshot was taken; the part is built again when it is needed."""
        assert self.saved is not None
        self.part = self.optimizer = None
        self.steps, self.report = self.saved.step, self.saved.report


class SessionTable:
    """Up to `most_sessions` sessions by id; every method may be called from any thread.

    When it is full, sessions that nobody used for `forget_after_s` make room: their cluster or
    server is gone.
    """

    def __init__(
        self, most_sessions: int, forget_after_s: float, clock: Callable[[], float]
    ) -> None:
        self._most_sessions = most_sessions
        self._forget_after_s = forget_after_s
        self._clock = clock
        self._sessions: dict[str, Session] = {}
        self._lock = threading.Lock()

    def add(self, request: SessionRequest, *, most_of_opener: int | None = None) -> Session:
        """Make a session. Raises SessionRefused when the id is taken or the table is full.

        With `most_of_opener` its opener's longest unused session goes when it has that many.
        """
        if not request.session_id or len(request.token) < 16:
            raise SessionRefused("a session needs an id and a token of 16 characters or more")
        with self._lock:
            if request.session_id in self._sessions:
                raise SessionRefused(f"session {request.session_id} is open already")
            self._drop_left_by(request)
            if most_of_opener is not None:
                self._make_room_for(request.opener, most_of_opener)
            self._make_room()
            session = Session(request, used_s=self._clock())
            self._sessions[request.session_id] = session
            return session

    def request(self, session_id: str) -> SessionRequest | None:
        """What a session was opened with, for whoever decides who may use it."""
        with self._lock:
            session = self._sessions.get(session_id)
        return session.request if session else None

    def held_bytes(self, *, opener: str | None = None) -> int:
        """What was pushed into all sessions, or those of one opener."""
        with self._lock:
            sessions = tuple(self._sessions.values())
        return sum(s.pushed_bytes for s in sessions if opener in (None, s.request.opener))

    def ids(self) -> tuple[str, ...]:
        """All sessions by id."""
        with self._lock:
            return tuple(self._sessions)

    def find(self, session_id: str, token: str) -> Session:
        """The session; the same refusal whether the id or the token is wrong."""
        with self._lock:
            session = self._sessions.get(session_id)
        known = session.request.token if session else ""
        if session is None or not compare_digest(known.encode(), token.encode()):
            raise SessionRefused(f"no session {session_id[:80]} with this token")
        session.used_s = self._clock()
        return session

    def forget(self, session: Session) -> None:
        """Drop this very session, not one that was opened under its id since."""
        with self._lock:
            if self._sessions.get(session.request.session_id) is session:
                del self._sessions[session.request.session_id]

    def health(self) -> Health:
        """How many sessions there are."""
        with self._lock:
            running = sum(s.running for s in self._sessions.values())
            return Health(
                sessions=len(self._sessions), running=running, most_sessions=self._most_sessions
            )

    def _make_room_for(self, opener: str, most: int) -> None:
        theirs = [s for s in self._sessions.values() if s.request.opener == opener]
        if len(theirs) < most:
            return
        idle = [session for session in theirs if not session.running]
        if not idle:
            raise SessionRefused(f"{opener} runs {most} sessions, its limit here")
        del self._sessions[min(idle, key=lambda s: s.used_s).request.session_id]

    def _drop_left_by(self, request: SessionRequest) -> None:
        """A device has one segment of a cluster: what an earlier round left here is of no use.

        That is so when the device, or its control unit, was away when the round ended.
        """
        for key, session in tuple(self._sessions.items()):
            before = session.request
            same = (before.name, before.opener) == (request.name, request.opener)
            segments = before.blocks is not None and request.blocks is not None
            if same and segments and not session.running:
                del self._sessions[key]

    def _make_room(self) -> None:
        if len(self._sessions) < self._most_sessions:
            return
        oldest_s = self._clock() - self._forget_after_s
        for key, session in tuple(self._sessions.items()):
            if not session.running and session.used_s < oldest_s:
                del self._sessions[key]
        if len(self._sessions) >= self._most_sessions:
            raise SessionRefused(f"the host holds {self._most_sessions} sessions, its limit")

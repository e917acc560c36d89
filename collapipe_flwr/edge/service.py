"""Sessions of the edge: one replica of the last part per cluster. Knows no transport.

A session is opened with a model and a token, gets weights, and then runs streams: each is one
round of steps of one cluster. A stream that fails takes its session with it, because the replica
may stand in the middle of a step; the round's first weights are still where they came from.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from secrets import compare_digest
from typing import Protocol, cast

from torch import Tensor, nn

from collapipe_flwr.core.errors import LinkError
from collapipe_flwr.pipeline.link import Link
from collapipe_flwr.pipeline.meter import StageReport
from collapipe_flwr.pipeline.optimizer import Optimizer
from collapipe_flwr.pipeline.roles import LastStage
from collapipe_flwr.pipeline.schedule import stage_actions
from collapipe_flwr.pipeline.session import Health, SessionRequest, Timeline
from collapipe_flwr.pipeline.stage import StageSettings


class LastPart(Protocol):
    """What the edge needs of a part: an `nn.Module` that can also do these."""

    def weight_of(self, context: Mapping[str, Tensor]) -> int:
        """How many examples or tokens the loss is a mean over."""
        ...

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Overwrite the weights in place. Raises ModelError when they do not fit."""
        ...

    def state_dict(self) -> dict[str, Tensor]:
        """The weights."""
        ...

    def parameters(self) -> Iterable[nn.Parameter]:
        """What may train."""
        ...


BuildPart = Callable[[str, Mapping[str, Tensor]], LastPart]


class SessionRefused(LinkError):
    """No such session, a wrong token, or no room for one more."""


@dataclass(slots=True)
class Session:
    """One cluster's replica; `lock` guards the part while it is changed or read."""

    request: SessionRequest
    part: LastPart | None = None
    optimizer: Optimizer | None = None
    report: StageReport | None = None
    timeline: Timeline = field(default_factory=Timeline)
    running: bool = False
    used_s: float = 0.0  # when somebody last asked for it
    lock: threading.Lock = field(default_factory=threading.Lock)


def build_edge_part(spec_json: str, weights: Mapping[str, Tensor]) -> LastPart:
    """The last part of a transformers model."""
    from collapipe_flwr.models.spec import ModelSpec  # slow imports: only when needed
    from collapipe_flwr.models.splitter import Splitter

    return Splitter(ModelSpec.from_json(spec_json)).build_edge(weights)


class EdgeService:
    """Holds up to `most_sessions` sessions; every method may be called from any thread.

    When it is full, sessions that nobody used for `forget_after_s` make room: their cluster or
    server is gone.
    """

    def __init__(
        self,
        build_part: BuildPart = build_edge_part,
        *,
        most_sessions: int = 64,
        forget_after_s: float = 6 * 3600.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._build_part = build_part
        self._most_sessions = most_sessions
        self._forget_after_s = forget_after_s
        self._clock = clock
        self._sessions: dict[str, Session] = {}
        self._lock = threading.Lock()

    def open(self, request: SessionRequest) -> None:
        """Make a session. Raises SessionRefused when the id is taken or the edge is full."""
        if not request.session_id or len(request.token) < 16:
            raise SessionRefused("a session needs an id and a token of 16 characters or more")
        stage_actions(request.schedule, request.depth, 1)
        with self._lock:
            if request.session_id in self._sessions:
                raise SessionRefused(f"session {request.session_id} is open already")
            self._make_room()
            self._sessions[request.session_id] = Session(request, used_s=self._clock())

    def push_weights(
        self,
        session_id: str,
        token: str,
        weights: Mapping[str, Tensor],
        *,
        keep_optimizer: bool = False,
    ) -> None:
        """Set the weights of a session's part, which the first call builds.

        Raises ModelError when the keys or shapes are not those of the part.
        """
        session = self.find(session_id, token)
        with _idle(session):
            if session.part is None:
                session.part = self._build_part(session.request.spec_json, weights)
            else:
                session.part.load_weights(weights)
            if session.optimizer is None or not keep_optimizer:
                session.optimizer = Optimizer(session.request.optimizer, session.part.parameters())

    def weights(self, session_id: str, token: str) -> dict[str, Tensor]:
        """A copy of the weights of a session's part."""
        session = self.find(session_id, token)
        with _idle(session):
            return {k: t.detach().clone() for k, t in _part(session).state_dict().items()}

    def report(self, session_id: str, token: str) -> StageReport:
        """What the last stream of a session measured."""
        report = self.find(session_id, token).report
        if report is None:
            raise SessionRefused(f"session {session_id} has not run yet")
        return report

    def timeline(self, session_id: str, token: str) -> Timeline:
        """What the last stream of a session did when."""
        return self.find(session_id, token).timeline

    def close(self, session_id: str, token: str) -> None:
        """Forget a session."""
        self.find(session_id, token)
        self._forget(session_id)

    def health(self) -> Health:
        """How many sessions there are."""
        with self._lock:
            running = sum(s.running for s in self._sessions.values())
            return Health(
                sessions=len(self._sessions), running=running, most_sessions=self._most_sessions
            )

    def run(self, session_id: str, token: str, upstream: Link) -> None:
        """Run the last stage over one link until its END frame."""
        self.serve(self.claim(session_id, token), upstream)

    def claim(self, session_id: str, token: str) -> Session:
        """Reserve a session for one stream, which `serve` then runs."""
        session = self.find(session_id, token)
        with _idle(session):
            _part(session)
            session.running = True
        return session

    def serve(self, session: Session, upstream: Link) -> None:
        """Run a claimed session. When it fails the session is gone; the error is raised."""
        assert session.part is not None and session.optimizer is not None
        stage = LastStage(
            cast(nn.Module, session.part),
            session.optimizer,
            _settings(session.request),
            upstream=upstream,
        )
        try:
            stage.serve()
        except BaseException:
            self._forget(session.request.session_id)
            raise
        finally:
            session.report = stage.report()
            session.timeline = Timeline(spans=tuple(stage.recorder.spans))
            session.running = False

    def find(self, session_id: str, token: str) -> Session:
        """The session; the same refusal whether the id or the token is wrong."""
        with self._lock:
            session = self._sessions.get(session_id)
        known = session.request.token if session else ""
        if session is None or not compare_digest(known.encode(), token.encode()):
            raise SessionRefused(f"no session {session_id[:80]} with this token")
        session.used_s = self._clock()
        return session

    def _make_room(self) -> None:
        """Drop forgotten sessions. Raises SessionRefused when the edge is full all the same."""
        if len(self._sessions) < self._most_sessions:
            return
        oldest_s = self._clock() - self._forget_after_s
        for key, session in tuple(self._sessions.items()):
            if not session.running and session.used_s < oldest_s:
                del self._sessions[key]
        if len(self._sessions) >= self._most_sessions:
            raise SessionRefused(f"the edge holds {self._most_sessions} sessions, its limit")

    def _forget(self, session_id: str) -> None:
        with self._lock:
            self._sessions.pop(session_id, None)


class _idle:  # noqa: N801 - reads as a keyword
    """Holds a session's lock. Raises SessionRefused while a stream runs."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def __enter__(self) -> None:
        if not self._session.lock.acquire(timeout=60):
            raise SessionRefused("the session has been busy for a minute")
        if self._session.running:
            self._session.lock.release()
            raise SessionRefused("the session is in the middle of a stream")

    def __exit__(self, *_: object) -> None:
        self._session.lock.release()


def _part(session: Session) -> LastPart:
    if session.part is None:
        raise SessionRefused("the session has no weights yet: push them first")
    return session.part


def _settings(request: SessionRequest) -> StageSettings:
    return StageSettings(
        name="edge",
        schedule=request.schedule,
        depth=request.depth,
        deadline_s=request.deadline_s,
        idle_s=request.idle_s,
        recompute=request.recompute,
        keep_spans=request.keep_spans,
    )

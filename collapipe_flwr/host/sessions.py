"""The sessions of a host by id, and which of them make room for a new one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import reduce
from secrets import compare_digest

from collapipe_flwr.host.ledger import Account
from collapipe_flwr.host.session import HostSession, SessionRefused
from collapipe_flwr.pipeline.config import PassesDone, SessionKey, SessionRequest

Passes = Mapping[str, PassesDone]  # by cluster


class SessionTable:
    """Up to `most_sessions` sessions by id; every method may be called from any thread.

    When it is full, sessions unused for `forget_after_s` make room, as their cluster or server is
    gone. A session in use leaves the table only when its last use has ended: `let_go` is called
    then, before its id can be taken again.
    """

    def __init__(
        self,
        most_sessions: int,
        forget_after_s: float,
        clock: Callable[[], float],
        let_go: Callable[[HostSession], None],
    ) -> None:
        self.most_sessions = most_sessions
        self._forget_after_s = forget_after_s
        self._clock = clock
        self._let_go = let_go
        self._sessions: dict[str, HostSession] = {}
        self._closed: Passes = {}
        self._lock = threading.Lock()

    def add(
        self, request: SessionRequest, account: Account, *, most_of_opener: int | None = None
    ) -> HostSession:
        """Add a session. Raises SessionRefused when the id is taken or the table is full.

        An opener with `most_of_opener` sessions loses the one that was unused for longest. If the
        stage's earlier part was closed in the middle of a pass, this waits for the end of the pass.
        """
        if not request.key.session_id or len(request.key.token) < 16:
            raise SessionRefused("a session needs an id and a token of 16 characters or more")
        for session in self.list_sessions():
            if _replaces(request, session.request):
                session.leave_room()
        with self._lock:
            if request.key.session_id in self._sessions:
                raise SessionRefused(f"session {request.key.session_id} is open already")
            self._drop_left_by(request)
            if most_of_opener is not None:
                self._make_room_for(request.opener, most_of_opener)
            self._make_room()
            session = HostSession(request, account, self.drop, used_s=self._clock())
            self._sessions[request.key.session_id] = session
            return session

    def find_request(self, session_id: str) -> SessionRequest | None:
        with self._lock:
            session = self._sessions.get(session_id)
        return session.request if session else None

    def list_sessions(self) -> tuple[HostSession, ...]:
        with self._lock:
            return tuple(self._sessions.values())

    def find(self, key: SessionKey) -> HostSession:
        """Find a session; raises the same SessionRefused for a wrong id and a wrong token."""
        with self._lock:
            session = self._sessions.get(key.session_id)
        known = session.request.key.token if session else ""
        same = compare_digest(known.encode(), key.token.encode())
        if session is None or session.closed or not same:
            raise SessionRefused(f"no session {key.session_id[:80]} with this token")
        session.used_s = self._clock()
        return session

    def count_passes(self) -> dict[str, PassesDone]:
        """Return the micro-batches of every cluster's newest order here.

        They are those of all sessions of the last stage, open ones included. A stream that fails
        is not counted: its steps are replayed.
        """
        with self._lock:
            found = reduce(_add_passes, self._sessions.values(), self._closed)
        return dict(found)

    def drop(self, session: HostSession) -> None:
        """Forget a session whose last use has ended."""
        with self._lock:
            self._remove(session)

    def _remove(self, session: HostSession) -> None:
        del self._sessions[session.request.key.session_id]
        self._closed = _add_passes(self._closed, session)
        self._let_go(session)

    def _retire(self, session: HostSession) -> bool:
        """Remove a session unless it is in use; return whether it was removed."""
        retired = session.retire()
        if retired:
            self._remove(session)
        return retired

    def _make_room_for(self, opener: str, most: int) -> None:
        theirs = [s for s in self._sessions.values() if s.request.opener == opener]
        if len(theirs) < most:
            return
        if not any(self._retire(session) for session in sorted(theirs, key=lambda s: s.used_s)):
            raise SessionRefused(f"{opener} runs {most} sessions, its limit here")

    def _drop_left_by(self, request: SessionRequest) -> None:
        """Remove the part that this stage of the cluster had before.

        It is still here if this host, or the control unit, was away when its round ended.
        """
        for session in tuple(self._sessions.values()):
            if _replaces(request, session.request):
                self._retire(session)

    def _make_room(self) -> None:
        if len(self._sessions) < self.most_sessions:
            return
        oldest_s = self._clock() - self._forget_after_s
        for session in tuple(self._sessions.values()):
            if session.used_s < oldest_s:
                self._retire(session)
        if len(self._sessions) >= self.most_sessions:
            raise SessionRefused(f"the host holds {self.most_sessions} sessions, its limit")


def _replaces(request: SessionRequest, before: SessionRequest) -> bool:
    """Return whether both are for the same stage of the same cluster in the same run."""
    if (before.stage.name, before.opener) != (request.stage.name, request.opener):
        return False
    if request.placement is not None:
        return before.placement is not None
    place, place_before = (r.cluster_id and (r.cluster_id, r.run_id) for r in (request, before))
    return before.placement is None and bool(place) and place == place_before


def _add_passes(passes: Passes, session: HostSession) -> Passes:
    """Add a session's passes for the newest order of its cluster."""
    request = session.request
    if request.placement is not None or not (request.cluster_id and request.attempt):
        return passes
    before = passes.get(request.cluster_id, PassesDone())
    return {**passes, request.cluster_id: before + session.passes}

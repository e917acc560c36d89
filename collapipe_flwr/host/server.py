"""The gRPC server of a host: authenticates the caller, checks its role, dispatches to the servicer.

The servicer, and torch with it, is created with the first call of a member that needs it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import grpc

from collapipe_flwr.config.access_control import AccessControl, Caller
from collapipe_flwr.core.errors import ConfigError, LinkError, ProtocolError
from collapipe_flwr.core.links import TlsFiles
from collapipe_flwr.core.version import read_own_version
from collapipe_flwr.host.energy import EnergyMeter
from collapipe_flwr.host.rosters import Rosters
from collapipe_flwr.transport import methods
from collapipe_flwr.transport.authorizer import Authorizer
from collapipe_flwr.transport.methods import (
    METHODS,
    HostStatus,
    Method,
    decode_message,
    encode_message,
)
from collapipe_flwr.transport.roster import Roster
from collapipe_flwr.transport.server import Server, take_message

if TYPE_CHECKING:
    from collapipe_flwr.host.service import HostService
    from collapipe_flwr.host.servicer import Servicer
    from collapipe_flwr.pipeline.config import Health

CONTROL_THREADS = 8
_STREAMS = 4  # of a session, all of them together: replicas ahead have one each
_Messages = Iterator[bytes]
_NOT_WHILE_DRAINING = (methods.OPEN_SESSION, methods.HEALTH)


class Listener(Server):
    """A host; see `Server` for how it listens.

    `make_servicer` is called once; a member that hosts nothing (None) answers only echoes, status
    and rosters. `rosters`, which may be replaced while it listens, say who may call what (None: all
    whom the CA signed may call everything). Raises ConfigError when they are given without TLS that
    asks callers for a certificate.
    """

    def __init__(
        self,
        listen: str,
        make_servicer: Callable[[], Servicer] | None,
        *,
        tls: TlsFiles | None = None,
        meter: EnergyMeter | None = None,
        rosters: Rosters | None = None,
        on_edge: bool = False,
        most_sessions: int = 64,
    ) -> None:
        if rosters is not None and (tls is None or tls.ca is None):
            raise ConfigError(
                "only a peer with a certificate can be identified: give TLS with a CA"
            )
        self._make_servicer = make_servicer
        self._authorizer = Authorizer(rosters.access if rosters else None, on_edge=on_edge)
        self._rosters = rosters
        if rosters is not None:
            rosters.on_change = self._apply
        self._servicer: Servicer | None = None
        self._meter = meter or EnergyMeter()
        self._lock = threading.Lock()
        self._draining = False
        self._answered = threading.Condition()
        self._own: Mapping[Method, Callable[[], bytes]] = {
            methods.ECHO: bytes,  # to a payload of any size, so that callers can measure the link
            methods.STATUS: self._encode_status,
        }
        answers = {
            method: partial(self._yield_answers if method.downloads else self._answer, method)
            for method in (METHODS if make_servicer else self._own)
        }
        threads = (_STREAMS * most_sessions if make_servicer else 0) + CONTROL_THREADS
        super().__init__(
            listen,
            {**answers, methods.ROSTER: self._take_roster},
            threads=threads,
            most_calls=2 * threads,
            tls=tls,
        )

    def measure_load(self) -> Health | None:
        """Return the load of the host; None before a first call needs the servicer."""
        return None if self._servicer is None else self._servicer.service.measure_load()

    def drain(self, grace_s: float) -> None:
        """Refuse new sessions and give open ones ``grace_s`` to be closed."""
        self._draining = True
        with self._answered:
            self._answered.wait_for(
                lambda: (load := self.measure_load()) is None or not load.sessions, timeout=grace_s
            )

    def _let_go(self) -> None:
        if self._servicer is not None:
            self._servicer.close()

    def _answer(self, method: Method, messages: _Messages, context: grpc.ServicerContext) -> bytes:
        (answer,) = self._yield_answers(method, messages, context)
        return answer

    def _yield_answers(
        self, method: Method, messages: _Messages, context: grpc.ServicerContext
    ) -> _Messages:
        with self._admit(context, method) as caller:
            if method in self._own:
                take_message(messages, context)
                yield self._own[method]()
                return
            servicer = self._get_servicer(caller, method, context)
            message = messages if method.uploads else take_message(messages, context)
            yield from servicer.answer(method, message, context, caller)

    def _encode_status(self) -> bytes:
        """Answer without a servicer, so that torch need not be loaded."""
        status = HostStatus(
            resident_bytes=_read_resident_bytes(),
            awake=self._servicer is not None,
            stopping=self._draining,
            at_work=self._servicer is not None and self._servicer.service.is_at_work(),
            unix_s=time.time(),
            version=read_own_version(),
            energy_sensor=self._meter.name,
            power_w=self._meter.measure_power_w(),
            rosters=self._rosters.versions if self._rosters else {},
        )
        return encode_message(status)

    def _take_roster(self, messages: _Messages, context: grpc.ServicerContext) -> bytes:
        """Take a roster that the CA has signed; a stranger's is not read."""
        if self._rosters is None:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "this host has no cluster file")
        assert self._rosters is not None
        try:
            with self._admit(context, methods.ROSTER):
                roster = decode_message(Roster, take_message(messages, context))
                return encode_message(self._rosters.accept(roster))
        except ProtocolError as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except LinkError as error:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        raise AssertionError("abort raises")

    def _apply(self, access: AccessControl) -> None:
        """Cut the connections and calls of callers that are not members any more."""
        calls = self._authorizer.replace(access)
        self.intake.drop(calls)
        for context in calls:
            context.cancel()

    @contextmanager
    def _admit(self, context: grpc.ServicerContext, method: Method) -> Iterator[Caller | None]:
        try:
            with (
                self._authorizer.admit(context, method) as caller,
                self.intake.expect(context, method),
            ):
                yield caller
        finally:
            if self._draining:
                with self._answered:
                    self._answered.notify_all()

    def _get_servicer(
        self, caller: Caller | None, method: Method, context: grpc.ServicerContext
    ) -> Servicer:
        """Return the servicer if the caller may do this to the session that it names, if any."""
        if self._draining and method in _NOT_WHILE_DRAINING:
            # As if nothing listened: the caller counts this host as lost and goes on without it.
            context.abort(grpc.StatusCode.UNAVAILABLE, "the host is stopping")
        with self._lock:
            if self._servicer is None:
                assert self._make_servicer is not None
                self._servicer = self._make_servicer()
        session_id = dict(context.invocation_metadata()).get(methods.SESSION_KEY, "")
        if caller is not None and not self._servicer.may_use(caller, method, session_id):
            refusal = f"no session {session_id[:80]} with this token"  # as if there were none
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, refusal)
        return self._servicer


class HostServer(Listener):
    """A host whose `HostService` exists from the beginning."""

    def __init__(
        self,
        listen: str,
        service: HostService,
        *,
        tls: TlsFiles | None = None,
        rosters: Rosters | None = None,
    ) -> None:
        from collapipe_flwr.host.servicer import Servicer

        servicer = Servicer(service)
        super().__init__(
            listen,
            lambda: servicer,
            tls=tls,
            rosters=rosters,
            on_edge=True,
            most_sessions=service.measure_load().most_sessions,
        )


def _read_resident_bytes() -> int:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next((1024 * int(li.split()[1]) for li in lines if li.startswith("VmRSS:")), 0)

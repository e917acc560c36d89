"""Authenticates the caller of an RPC, checks its role, then dispatches to the servicer.

The servicer, and torch with it, is created with the first call of a member that needs it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import grpc

from collapipe_flwr.config.access_control import Caller
from collapipe_flwr.transport import methods
from collapipe_flwr.transport.authorizer import Authorizer
from collapipe_flwr.transport.host_status import status_here
from collapipe_flwr.transport.methods import METHODS, Method, encode_message
from collapipe_flwr.transport.server import only_message

if TYPE_CHECKING:
    from collapipe_flwr.host.servicer import Servicer

_Messages = Iterator[bytes]
_NOT_WHILE_DRAINING = (methods.OPEN_SESSION, methods.HEALTH)


class AuthInterceptor:
    """All methods of a host behind its authorizer; `make_servicer` is called once."""

    def __init__(self, make_servicer: Callable[[], Servicer], authorizer: Authorizer) -> None:
        self._make_servicer = make_servicer
        self._authorizer = authorizer
        self._servicer: Servicer | None = None
        self._lock = threading.Lock()
        self._draining = False
        self._answered = threading.Condition()

    def answers(self) -> Mapping[Method, Callable[..., Any]]:
        """What the server calls."""
        alone = {methods.ECHO: self._echo, methods.STATUS: self._status}
        return {
            method: partial(self._download if method.downloads else self._answer, method)
            for method in METHODS
        } | alone

    def drain(self, grace_s: float) -> None:
        """Open no session any more, and wait for those that there are to be closed."""
        self._draining = True
        with self._answered:
            self._answered.wait_for(lambda: not self._busy(), timeout=grace_s)

    def close(self) -> None:
        """Wait for the stages that run, if there ever were any."""
        with self._lock:
            if self._servicer is not None:
                self._servicer.close()

    def _busy(self) -> bool:
        return self._servicer is not None and self._servicer.sessions() > 0

    def _answer(self, method: Method, messages: _Messages, context: grpc.ServicerContext) -> bytes:
        with self._admitted(context, method) as caller:
            servicer = self._servicer_for(caller, method, context)
            message = messages if method.uploads else only_message(messages, context)
            return servicer.answer(method, message, context, caller)

    def _download(
        self, method: Method, messages: _Messages, context: grpc.ServicerContext
    ) -> _Messages:
        with self._admitted(context, method) as caller:
            servicer = self._servicer_for(caller, method, context)
            message = messages if method.uploads else only_message(messages, context)
            yield from servicer.download(method, message, context, caller)

    def _echo(self, messages: _Messages, context: grpc.ServicerContext) -> bytes:
        """Answer a payload of any size with nothing: for the rate and delay of the way here."""
        with self._admitted(context, methods.ECHO):
            only_message(messages, context)
            return b""

    def _status(self, messages: _Messages, context: grpc.ServicerContext) -> bytes:
        """What a check wants to know of a host that may not have loaded torch yet."""
        with self._admitted(context, methods.STATUS):
            only_message(messages, context)
            awake = self._servicer is not None
            return encode_message(status_here(awake=awake, stopping=self._draining))

    @contextmanager
    def _admitted(self, context: grpc.ServicerContext, method: Method) -> Iterator[Caller | None]:
        try:
            with self._authorizer.admitted(context, method) as caller:
                yield caller
        finally:
            if self._draining:
                with self._answered:
                    self._answered.notify_all()

    def _servicer_for(
        self, caller: Caller | None, method: Method, context: grpc.ServicerContext
    ) -> Servicer:
        """The servicer, for a caller that may do this to the session that it names, if any."""
        if self._draining and method in _NOT_WHILE_DRAINING:
            # As if nobody listened: whoever asks takes this host for lost and does without.
            context.abort(grpc.StatusCode.UNAVAILABLE, "the host is stopping")
        with self._lock:
            if self._servicer is None:
                self._servicer = self._make_servicer()
        session_id = dict(context.invocation_metadata()).get(methods.SESSION_KEY, "")
        if caller is not None and not self._servicer.may_use(caller, method, session_id):
            refusal = f"no session {session_id[:80]} with this token"  # as if there were none
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, refusal)
        return self._servicer

"""What a host does with a call: see who it is and what it may, then let the skin answer.

The skin, and torch with it, comes into being with the first call of a member that needs it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import grpc

from collapipe_flwr.config.access_control import Caller
from collapipe_flwr.transport import methods
from collapipe_flwr.transport.authorizer import Authorizer, PeerBusy, PeerRefused
from collapipe_flwr.transport.bounded import only_message
from collapipe_flwr.transport.host_status import status_here
from collapipe_flwr.transport.messages import encode_message

if TYPE_CHECKING:
    from collapipe_flwr.host.servicer import Servicer

_UNARY = {
    "Report": "report",
    "Timeline": "timeline",
    "Snapshot": "snapshot",
    "Rollback": "rollback",
    "CloseSession": "close_session",
    "Missing": "missing",
    "Digests": "digests",
    "Benchmark": "benchmark",
    "Probe": "probe",
}
_Messages = Iterator[bytes]


class AuthInterceptor:
    """All methods of a host behind its gate; `make_skin` is called once.

    On the wire every method takes a stream, so that a stranger's message is never read; those of
    one message take the first.
    """

    def __init__(self, make_skin: Callable[[], Servicer], gate: Authorizer) -> None:
        self._make_skin = make_skin
        self._gate = gate
        self._skin: Servicer | None = None
        self._lock = threading.Lock()
        self._draining = False
        self._answered = threading.Condition()

    def grpc_handler(self) -> grpc.GenericRpcHandler:
        """What the server calls, by method name; bytes in, bytes out."""
        answering: dict[str, Callable[[_Messages, grpc.ServicerContext], bytes]] = {
            **{name: self._unary(name, method) for name, method in _UNARY.items()},
            "OpenSession": self._open_session,
            "Health": self._health,
            "PushWeights": self._push_weights,
            "Echo": self._echo,
            "Status": self._status,
        }
        streaming = {
            "FetchWeights": self._fetch_weights,
            "Stream": self._stream,
        }
        return grpc.method_handlers_generic_handler(
            methods.SERVICE,
            {
                **{n: grpc.stream_unary_rpc_method_handler(call) for n, call in answering.items()},
                **{n: grpc.stream_stream_rpc_method_handler(c) for n, c in streaming.items()},
            },
        )

    def drain(self, grace_s: float) -> None:
        """Open no session any more, and wait for those that there are to be closed."""
        self._draining = True
        with self._answered:
            self._answered.wait_for(lambda: not self._busy(), timeout=grace_s)

    def _busy(self) -> bool:
        return self._skin is not None and self._skin.sessions() > 0

    def close(self) -> None:
        """Wait for the stages that run, if there ever were any."""
        with self._lock:
            if self._skin is not None:
                self._skin.close()

    def _unary(self, name: str, method: str) -> Callable[[_Messages, grpc.ServicerContext], bytes]:
        def answer(messages: _Messages, context: grpc.ServicerContext) -> bytes:
            with self._entered(context, name) as skin:
                answered: bytes = getattr(skin, method)(only_message(messages, context), context)
                return answered

        return answer

    def _open_session(self, messages: _Messages, context: grpc.ServicerContext) -> bytes:
        with self._admitted(context, "OpenSession") as caller:
            self._refuse_while_draining(context)
            return self._built().open_session(only_message(messages, context), context, caller)

    def _health(self, messages: _Messages, context: grpc.ServicerContext) -> bytes:
        with self._entered(context, "Health") as skin:
            self._refuse_while_draining(context)
            return skin.health(only_message(messages, context), context)

    def _push_weights(self, messages: _Messages, context: grpc.ServicerContext) -> bytes:
        with self._entered(context, "PushWeights") as skin:
            return skin.push_weights(messages, context)

    def _fetch_weights(self, messages: _Messages, context: grpc.ServicerContext) -> _Messages:
        with self._entered(context, "FetchWeights") as skin:
            yield from skin.fetch_weights(only_message(messages, context), context)

    def _stream(self, messages: _Messages, context: grpc.ServicerContext) -> _Messages:
        with self._entered(context, "Stream") as skin:
            yield from skin.stream(messages, context)

    def _echo(self, messages: _Messages, context: grpc.ServicerContext) -> bytes:
        """Answer a payload of any size with nothing: for the rate and delay of the way here."""
        with self._admitted(context, "Echo"):
            only_message(messages, context)
            return b""

    def _status(self, messages: _Messages, context: grpc.ServicerContext) -> bytes:
        """What a check wants to know of a host that may not have loaded torch yet."""
        with self._admitted(context, "Status"):
            only_message(messages, context)
            awake = self._skin is not None
            return encode_message(status_here(awake=awake, stopping=self._draining))

    @contextmanager
    def _entered(self, context: grpc.ServicerContext, name: str) -> Iterator[Servicer]:
        """The skin, for a caller that may do this to the session that it names, if it names one."""
        with self._admitted(context, name) as caller:
            skin = self._built()
            metadata = dict(context.invocation_metadata())
            session_id = metadata.get(methods.SESSION_KEY, "")
            if caller is not None and not skin.may_use(caller, name, session_id):
                refusal = f"no session {session_id[:80]} with this token"  # as if there were none
                context.abort(grpc.StatusCode.FAILED_PRECONDITION, refusal)
            yield skin

    @contextmanager
    def _admitted(self, context: grpc.ServicerContext, name: str) -> Iterator[Caller | None]:
        try:
            with self._gate.entered(context, name) as caller:
                yield caller
        except PeerRefused as error:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, str(error))
        except PeerBusy as error:
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
        finally:
            if self._draining:
                with self._answered:
                    self._answered.notify_all()

    def _refuse_while_draining(self, context: grpc.ServicerContext) -> None:
        """As if nobody listened: whoever asks takes this host for lost and does without."""
        if self._draining:
            context.abort(grpc.StatusCode.UNAVAILABLE, "the host is stopping")

    def _built(self) -> Servicer:
        with self._lock:
            if self._skin is None:
                self._skin = self._make_skin()
            return self._skin

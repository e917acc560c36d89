"""Where newcomers ask to be let in: one call, over TLS that they can check, for bearers of tokens.

Who calls is nobody yet, so little is done for them: few calls at once, short messages, and after a
few refusals an address waits.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

import grpc

from collapipe_flwr.core.errors import CollaPipeError, ProtocolError
from collapipe_flwr.membership.admission import admit
from collapipe_flwr.membership.registry import Registry
from collapipe_flwr.membership.tokens import JoinRefused
from collapipe_flwr.transport.joining import JOIN, JoinRequest
from collapipe_flwr.transport.methods import decode_message, encode_message
from collapipe_flwr.transport.server import Server, only_message

_log = logging.getLogger(__name__)
_AT_ONCE = 8
MOST_REFUSALS, MOST_OF_ALL, WITHIN_S = 5, 50, 60.0
MESSAGE_BYTES = 16 * 2**10


class Attempts:
    """How often callers were refused lately: by address, and all of them together."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._refused: deque[tuple[float, str]] = deque()
        self._lock = threading.Lock()

    def too_many(self, host: str) -> bool:
        """Whether this caller has to wait."""
        with self._lock:
            while self._refused and self._refused[0][0] <= self._clock() - WITHIN_S:
                self._refused.popleft()
            own = sum(who == host for _, who in self._refused)
            return own >= MOST_REFUSALS or len(self._refused) >= MOST_OF_ALL

    def note(self, host: str) -> None:
        """One more that was refused."""
        with self._lock:
            self._refused.append((self._clock(), host))


class JoiningService(Server):
    """Listens for newcomers of the clusters of a registry; ``on_joined`` is told their names.

    Raises ConfigError where it cannot listen, or the folder has no CA.
    """

    def __init__(
        self,
        registry: Registry,
        listen: str,
        *,
        on_joined: Callable[[str], object] = lambda _: None,
        attempts: Attempts | None = None,
    ) -> None:
        self._registry, self._on_joined = registry, on_joined
        self._attempts = attempts or Attempts()
        super().__init__(
            listen,
            {JOIN: self._join},
            threads=_AT_ONCE,
            most_calls=2 * _AT_ONCE,
            tls=registry.service_files(),
        )

    def _join(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        host = _host(context.peer())
        if self._attempts.too_many(host):
            context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"too many attempts were refused: try again in {WITHIN_S:g} s",
            )
        try:
            data = only_message(messages, context)
            if len(data) > MESSAGE_BYTES:
                raise ProtocolError(f"a request of {len(data)} bytes is too long")
            request = decode_message(JoinRequest, data)
            answer = admit(self._registry, request)
        except JoinRefused as error:
            self._refuse(context, host, grpc.StatusCode.FAILED_PRECONDITION, str(error))
        except ProtocolError as error:
            self._refuse(context, host, grpc.StatusCode.INVALID_ARGUMENT, _without_values(error))
        except CollaPipeError as error:
            _log.error("nobody can join: %s", error)
            context.abort(grpc.StatusCode.INTERNAL, "the control unit cannot do it: see its log")
        _log.info("%s joined %s as %s", request.name, answer.cluster_id, answer.role)
        self._on_joined(request.name)
        return encode_message(answer)

    def _refuse(
        self, context: grpc.ServicerContext, host: str, code: grpc.StatusCode, why: str
    ) -> None:
        self._attempts.note(host)
        _log.warning("a newcomer at %s was refused: %s", host, why)
        context.abort(code, why)


def _host(peer: str) -> str:
    """Of ``ipv4:10.0.0.11:4711``."""
    return peer.partition(":")[2].rpartition(":")[0]


def _without_values(error: ProtocolError) -> str:
    """The sentence up to what was got, which may be a secret in the wrong place."""
    return str(error).partition(", got ")[0]

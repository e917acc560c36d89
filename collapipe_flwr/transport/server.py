"""The base of all gRPC servers: listening, stopping, and deadlines of calls."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Self

import grpc

from collapipe_flwr.core.links import TlsFiles, split_address
from collapipe_flwr.core.processes import run_beside
from collapipe_flwr.transport.intake import STRANGERS_BYTES, Intake
from collapipe_flwr.transport.keepalive import make_server_keepalive_options
from collapipe_flwr.transport.methods import (
    METADATA_BYTES,
    MOST_CONNECTIONS,
    Method,
    make_channel_options,
)
from collapipe_flwr.transport.tls import bind

_log = logging.getLogger(__name__)
_MESSAGE_S = 60.0
_END_S = 10.0


class Server:
    """Listens on HOST:PORT; port 0 takes a free one, which `address` then names.

    Use as a context manager. `answers`, by the methods of one service, are called in one of
    `threads` with the stream of a call's messages and its context. Calls beyond `most_calls` are
    refused at once, and messages above `most_bytes` (None: as frames) before they are read. Its
    `intake` bounds the bytes that come without an admitted call. Raises ConfigError when the
    address cannot be bound.
    """

    def __init__(
        self,
        listen: str,
        answers: Mapping[Method, Callable[..., Any]],
        *,
        threads: int,
        most_calls: int,
        most_bytes: int | None = None,
        strangers_bytes: int = STRANGERS_BYTES,
        tls: TlsFiles | None = None,
    ) -> None:
        self._callers = ThreadPoolExecutor(threads, thread_name_prefix="rpc")
        self._server = grpc.server(
            self._callers,
            options=[
                *make_channel_options(most_bytes),
                *make_server_keepalive_options(),
                ("grpc.so_reuseport", 0),
                # One peer, or many that send nothing, must not fill this server's memory.
                ("grpc.server_handshake_timeout_ms", 10_000),
                ("grpc.http2.settings_timeout", 10_000),  # limits count once the peer agrees
                ("grpc.max_allowed_incoming_connections", MOST_CONNECTIONS),
                ("grpc.max_concurrent_streams", most_calls),  # of one connection
                ("grpc.max_metadata_size", METADATA_BYTES),
            ],
            maximum_concurrent_rpcs=most_calls,
        )
        (service,) = {method.service for method in answers}
        handlers = {
            method.name: method.make_handler(partial(self._count_messages, answer))
            for method, answer in answers.items()
        }
        generic = grpc.method_handlers_generic_handler(service, handlers)
        self._server.add_generic_rpc_handlers((generic,))
        self.address = bind(self._server, listen, tls)
        self.intake = Intake(split_address(self.address)[1], strangers_bytes)
        self._life = ExitStack()

    def __enter__(self) -> Self:
        self._server.start()
        self._life.enter_context(run_beside(self.intake.watch, "intake"))
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self, grace_s: float = 1.0) -> None:
        """Refuse new calls, give running ones `grace_s`, then break them off."""
        self._server.stop(grace_s).wait(grace_s + 5.0)
        self._life.close()
        self._let_go()
        end_threads(self._callers, "calls")

    def _let_go(self) -> None:
        """End the work that broken-off calls may wait for."""

    def _count_messages(
        self, answer: Callable[..., Any], messages: Iterator[bytes], context: grpc.ServicerContext
    ) -> Any:
        return answer(self.intake.count(messages, context), context)


def end_threads(pool: ThreadPoolExecutor, what: str) -> None:
    """Wait for the threads of a pool; log those that do not end in time."""
    waiting = threading.Thread(target=pool.shutdown, name="end-threads", daemon=True)
    waiting.start()
    waiting.join(_END_S)
    if waiting.is_alive():
        _log.error("%s did not end within %g s of the request: left behind", what, _END_S)


@contextmanager
def limit_call(context: grpc.ServicerContext, seconds: float) -> Iterator[None]:
    """Cancel the call if the body has not ended in time."""
    timer = threading.Timer(seconds, context.cancel)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def take_message(messages: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
    """Take the message of a call that has one; cut off a peer that does not send it."""
    with limit_call(context, _MESSAGE_S):
        message = next(messages, None)
    if message is None:
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a call without its message")
    assert message is not None
    return message

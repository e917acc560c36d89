"""A gRPC server that knows no tensor, so that a board that waits for work holds little memory."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

import grpc

from collapipe_flwr.config.access_control import Roster
from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.core.tls_files import TlsFiles
from collapipe_flwr.host.auth_interceptor import AuthInterceptor
from collapipe_flwr.transport import methods
from collapipe_flwr.transport.authorizer import Authorizer
from collapipe_flwr.transport.keepalive import server_keepalive_options
from collapipe_flwr.transport.limits import FrameLimits
from collapipe_flwr.transport.tls import bind

if TYPE_CHECKING:
    from collections.abc import Callable

    from collapipe_flwr.host.servicer import Servicer

CONTROL_THREADS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenerSettings:
    """How a server listens; `roster` says who may call what (None: all that the CA signed)."""

    tls: TlsFiles | None = None
    limits: FrameLimits = field(default_factory=FrameLimits)
    roster: Roster | None = None
    on_edge: bool = False
    most_streams: int = 64

    def __post_init__(self) -> None:
        if self.roster is not None and (self.tls is None or self.tls.ca is None):
            raise ConfigError(
                "only a peer with a certificate can be told apart: give TLS with a CA"
            )


class Listener:
    """Listens on HOST:PORT; port 0 takes a free one, which `address` then names.

    Use as a context manager; `make_skin` is called with the first call from a peer. Raises
    ConfigError when it cannot be bound.
    """

    def __init__(
        self, listen: str, make_skin: Callable[[], Servicer], settings: ListenerSettings
    ) -> None:
        threads = settings.most_streams + CONTROL_THREADS
        self._callers = ThreadPoolExecutor(threads, thread_name_prefix="edge-rpc")
        self._server = grpc.server(
            self._callers,
            options=[
                *methods.channel_options(settings.limits),
                *methods.server_options(2 * threads),
                *server_keepalive_options(),
                ("grpc.so_reuseport", 0),
            ],
            maximum_concurrent_rpcs=2 * threads,
        )
        gate = Authorizer(settings.roster, on_edge=settings.on_edge)
        self._handlers = AuthInterceptor(make_skin, gate)
        self._server.add_generic_rpc_handlers((self._handlers.grpc_handler(),))
        self.address = bind(self._server, listen, settings.tls)

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def drain(self, grace_s: float) -> None:
        """Refuse new sessions and give those that there are ``grace_s`` to be closed."""
        self._handlers.drain(grace_s)

    def stop(self, grace_s: float = 1.0) -> None:
        """Refuse new calls, give running ones `grace_s`, then break them off."""
        self._server.stop(grace_s).wait(grace_s + 5.0)
        self._callers.shutdown(wait=True)
        self._handlers.close()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until the server is stopped; whether it was."""
        return not self._server.wait_for_termination(timeout_s)

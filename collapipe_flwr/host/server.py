"""The gRPC servers of hosts. While it waits, a `Listener` has not loaded torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from collapipe_flwr.config.access_control import AccessControl
from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.core.links import TlsFiles
from collapipe_flwr.host.auth_interceptor import AuthInterceptor
from collapipe_flwr.transport.authorizer import Authorizer
from collapipe_flwr.transport.methods import FrameLimits
from collapipe_flwr.transport.server import Server

if TYPE_CHECKING:
    from collapipe_flwr.host.service import EdgeService
    from collapipe_flwr.host.servicer import Servicer

CONTROL_THREADS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenerConfig:
    """How a host listens; `access` says who may call what (None: all that the CA signed)."""

    tls: TlsFiles | None = None
    limits: FrameLimits = field(default_factory=FrameLimits)
    access: AccessControl | None = None
    on_edge: bool = False
    most_streams: int = 64

    def __post_init__(self) -> None:
        if self.access is not None and (self.tls is None or self.tls.ca is None):
            raise ConfigError(
                "only a peer with a certificate can be told apart: give TLS with a CA"
            )


class Listener(Server):
    """A host whose servicer is made with the first call from a peer; see `Server`."""

    def __init__(
        self, listen: str, make_servicer: Callable[[], Servicer], config: ListenerConfig
    ) -> None:
        authorizer = Authorizer(config.access, on_edge=config.on_edge)
        self._interceptor = AuthInterceptor(make_servicer, authorizer)
        threads = config.most_streams + CONTROL_THREADS
        super().__init__(
            listen,
            self._interceptor.answers(),
            threads=threads,
            most_calls=2 * threads,
            tls=config.tls,
            limits=config.limits,
        )

    def drain(self, grace_s: float) -> None:
        """Refuse new sessions and give those that there are ``grace_s`` to be closed."""
        self._interceptor.drain(grace_s)

    def stop(self, grace_s: float = 1.0) -> None:
        """See `Server.stop`; waits for the stages that run as well."""
        super().stop(grace_s)
        self._interceptor.close()


class EdgeServer(Listener):
    """A host that serves at once: an `EdgeService` to which whoever the CA signed may talk."""

    def __init__(
        self,
        listen: str,
        service: EdgeService,
        *,
        tls: TlsFiles | None = None,
        limits: FrameLimits | None = None,
    ) -> None:
        from collapipe_flwr.host.servicer import Servicer, ServicerConfig

        limits = limits or FrameLimits()
        servicer = Servicer(service, ServicerConfig(limits=limits))
        most_streams = service.health().most_sessions
        config = ListenerConfig(tls=tls, limits=limits, most_streams=most_streams)
        super().__init__(listen, lambda: servicer, config)

"""A host that serves at once: an `EdgeService` behind a `Listener`."""

from __future__ import annotations

from collapipe_flwr.core.tls_files import TlsFiles
from collapipe_flwr.host.listener import Listener, ListenerSettings
from collapipe_flwr.host.service import EdgeService
from collapipe_flwr.host.servicer import Servicer, ServicerConfig
from collapipe_flwr.transport.limits import FrameLimits


class EdgeServer(Listener):
    """A running gRPC server around an `EdgeService`; use as a context manager.

    See `Listener`; whoever the CA signed may call.
    """

    def __init__(
        self,
        listen: str,
        service: EdgeService,
        *,
        tls: TlsFiles | None = None,
        limits: FrameLimits | None = None,
    ) -> None:
        limits = limits or FrameLimits()
        skin = Servicer(service, ServicerConfig(limits=limits))
        settings = ListenerSettings(
            tls=tls,
            limits=limits,
            most_streams=service.health().most_sessions,
        )
        super().__init__(listen, lambda: skin, settings)

"""A host that serves at once: an `EdgeService` behind a `Listener`."""

from __future__ import annotations

from collapipe_flwr.core.tls_files import TlsFiles
from collapipe_flwr.edge.listener import Listener, ListenerSettings
from collapipe_flwr.edge.service import EdgeService
from collapipe_flwr.edge.skin import Skin, SkinSettings
from collapipe_flwr.rpc.limits import FrameLimits


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
        skin = Skin(service, SkinSettings(limits=limits))
        settings = ListenerSettings(
            tls=tls,
            limits=limits,
            most_streams=service.health().most_sessions,
        )
        super().__init__(listen, lambda: skin, settings)

"""How a device reaches the next host of its chain."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from collapipe_flwr.pipeline.link import Link
from collapipe_flwr.pipeline.session import NextHop
from collapipe_flwr.transport.client import EdgeClient
from collapipe_flwr.transport.tls import TlsFiles


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialer:
    """Connects with this member's certificate; `name` is how the next host calls it."""

    name: str
    tls: TlsFiles | None = None
    deadline_s: float = 20.0

    @contextmanager
    def __call__(self, hop: NextHop) -> Iterator[Link]:
        """The link to the next host while the body runs. Raises LinkError when it refuses."""
        with EdgeClient(
            hop.address,
            what=hop.name,
            tls=self.tls,
            certificate_name=hop.certificate_name,
            deadline_s=self.deadline_s,
            heartbeat=hop.heartbeat,
        ) as client:
            link = client.stream(hop.session_id, hop.token, name=self.name, config=hop.link)
            try:
                yield link
            finally:
                link.close()

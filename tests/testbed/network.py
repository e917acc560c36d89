"""A small network of hosts on one machine, with links of a chosen rate.

Two kinds behind one seam: network namespaces with a token bucket on every host's interface, where
the kernel and our rights allow them, and else loopback with a pacing proxy before every service.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """A service of a host: it listens on ``listen``, others dial ``dial`` (both HOST:PORT)."""

    listen: str
    dial: str

    @property
    def dialled_host(self) -> str:
        """What the service's certificate must name."""
        return self.dial.rpartition(":")[0]


class Network(ABC):
    """Hosts that reach one another."""

    kind: str

    @abstractmethod
    def endpoint(self, host: str) -> Endpoint:
        """A port of ``host`` that nothing else uses."""

    @abstractmethod
    def command(self, host: str, command: Sequence[str]) -> list[str]:
        """``command`` as it runs on ``host``."""

    @abstractmethod
    def sent_bytes(self, host: str) -> int:
        """What the services of ``host`` have sent so far."""


@contextmanager
def network_of(hosts: Sequence[str], *, rate_bit_per_s: int) -> Iterator[Network]:
    """The best network that this machine can make; it is gone when the body ends."""
    from tests.testbed.namespaces import namespaces, namespaces_allowed
    from tests.testbed.proxies import proxies

    make = namespaces if namespaces_allowed() else proxies
    with make(hosts, rate_bit_per_s=rate_bit_per_s) as network:
        yield network

"""Control units on the local network by mDNS (RFC 6762, 6763), where it is asked for.

An announcement is neither secret nor trusted: a board trusts the CA that its token names.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from typing import Any

from collapipe_flwr.config.cluster_file import ClusterConfig
from collapipe_flwr.core.errors import LinkError, name_extra
from collapipe_flwr.core.links import is_address

_TYPE = "_collapipe._tcp.local."
_PIN_DIGITS = 16
FIND_S = 10.0
_ASK_MS = 1000  # for the address of a service that was announced


@contextmanager
def announce(config: ClusterConfig, address: str, pin: bytes) -> Iterator[None]:
    """Announce a joining service during the body; raises ConfigError without zeroconf."""
    host, _, port = address.rpartition(":")
    with _open_zeroconf(host) as network:
        from zeroconf import ServiceInfo

        network.register_service(
            ServiceInfo(
                _TYPE,
                f"{config.id}-{pin.hex()[:_PIN_DIGITS]}.{_TYPE}",
                parsed_addresses=[str(socket.getaddrinfo(host.strip("[]"), port)[0][4][0])],
                port=int(port),
                properties={"pin": pin.hex()[:_PIN_DIGITS]},
                server=f"collapipe-{pin.hex()[:_PIN_DIGITS]}.local.",
            )
        )
        yield


def find_control_unit(pin: bytes, *, interface: str = "", deadline_s: float = FIND_S) -> str:
    """Find HOST:PORT of the joining service of that CA; raises LinkError if none is announced."""
    heard: SimpleQueue[str] = SimpleQueue()

    def look(zeroconf: Any, service_type: str, name: str, state_change: Any) -> None:
        del state_change
        for place in _look_up(zeroconf, service_type, name, pin):
            heard.put(place)

    with _open_zeroconf(interface) as network:
        from zeroconf import ServiceBrowser

        ServiceBrowser(network, _TYPE, handlers=[look])
        try:
            return heard.get(timeout=deadline_s)
        except Empty as error:
            raise LinkError(
                f"no control unit of this token is announced on the network within {deadline_s:g} "
                "s: start `collapipe cluster serve --announce` there, or join without --discover"
            ) from error


def _look_up(network: Any, service_type: str, name: str, pin: bytes) -> list[str]:
    """Look up where a service of this CA is; others are not looked up, which would take time.

    Anybody may announce anything, and an error here would end the search.
    """
    from zeroconf import Error

    if not name.endswith(f"-{pin.hex()[:_PIN_DIGITS]}.{_TYPE}"):
        return []
    with suppress(Error, ValueError):
        return _read_addresses(network.get_service_info(service_type, name, timeout=_ASK_MS), pin)
    return []


def _read_addresses(info: Any, pin: bytes) -> list[str]:
    """Read the addresses in an announcement, which anybody may make; none for another CA's."""
    if info is None or info.properties.get(b"pin") != pin.hex()[:_PIN_DIGITS].encode():
        return []
    hosts = (f"[{host}]" if ":" in host else host for host in info.parsed_addresses())
    return [place for host in hosts if is_address(place := f"{host}:{info.port}")]


@contextmanager
def _open_zeroconf(host: str) -> Iterator[Any]:
    """Open zeroconf on loopback if ``host`` is there, else on all interfaces."""
    with name_extra("discovery"):
        from zeroconf import InterfaceChoice, Zeroconf
    plain = host.strip("[]")
    choice = [plain] if plain.startswith("127.") else InterfaceChoice.All
    network = Zeroconf(interfaces=choice)
    try:
        yield network
    finally:
        network.close()

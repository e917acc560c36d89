"""Addresses of daemons and services: ``HOST:PORT``, ``[HOST]:PORT`` for IPv6."""

from __future__ import annotations

import ipaddress

from collapipe_flwr.core.errors import ConfigError

HIGHEST_PORT = 65535


def host_and_port(address: str, *, least: int = 1) -> tuple[str, int]:
    """The host, without brackets, and the port; raises ConfigError.

    A port of 0, where ``least`` allows it, is chosen by the system. gRPC itself refuses neither
    ``host`` (it takes port 443 of all interfaces) nor ``host:99999`` (it takes the port modulo
    65536).
    """
    host, _, port = address.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    known = bool(bare) and (":" not in bare or host != bare)
    number = int(port) if port.isascii() and port.isdigit() else -1
    if not known or not least <= number <= HIGHEST_PORT:
        raise ConfigError(
            f'must read like "10.0.0.2:50061" or "[fd00::2]:50061", with a port from {least} to '
            f"{HIGHEST_PORT}, got {address!r}"
        )
    return bare, number


def is_address(text: str) -> bool:
    """Whether others can connect to it."""
    try:
        host_and_port(text)
    except ConfigError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Whether a host, without brackets, reaches this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return host == "localhost"

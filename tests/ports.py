"""Ports for what must know its own address before it listens."""

from __future__ import annotations

from collapipe_flwr.core.links import find_free_ports


def free_port() -> int:
    """A port of loopback that nobody uses."""
    return find_free_ports(1)[0]

"""Addresses: what gRPC would take for something else is refused."""

from __future__ import annotations

import socket

import pytest

from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.core.links import find_free_ports, is_address, is_loopback, split_address


@pytest.mark.parametrize(
    ("address", "place"),
    [
        ("10.0.0.2:50061", ("10.0.0.2", 50061)),
        ("pi.local:1", ("pi.local", 1)),
        ("[::]:9", ("::", 9)),
    ],
)
def test_an_address_has_a_host_and_a_port(address: str, place: tuple[str, int]) -> None:
    assert split_address(address) == place and is_address(address)


@pytest.mark.parametrize(
    "address",
    [
        "",
        "pi",
        "pi:",
        ":50061",
        "pi:http",
        "pi:0",
        "pi:65536",
        "pi:99999",
        "pi:-1",
        "::1:50061",
        "10.0.0..2:1",
        f"{'a' * 64}.local:1",
    ],
)
def test_anything_else_is_refused(address: str) -> None:
    assert not is_address(address)
    with pytest.raises(ConfigError, match="must read like"):
        split_address(address)


def test_a_port_that_the_system_chooses_must_be_allowed() -> None:
    assert split_address("127.0.0.1:0", least=0) == ("127.0.0.1", 0)


@pytest.mark.parametrize(
    ("host", "here"),
    [
        ("127.8.0.1", True),
        ("::1", True),
        ("localhost", True),
        ("127.org", False),
        ("0.0.0.0", False),
    ],
)
def test_names_that_begin_like_loopback_are_not(host: str, here: bool) -> None:
    assert is_loopback(host) is here


def test_free_ports_are_distinct_and_may_be_listened_on() -> None:
    ports = find_free_ports(20)
    assert len(set(ports)) == 20
    for port in ports:
        socket.create_server(("127.0.0.1", port)).close()

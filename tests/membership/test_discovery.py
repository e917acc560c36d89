"""Boards find their control unit by mDNS, and believe nobody else who says that it is one."""

from __future__ import annotations

from pathlib import Path

import pytest

from collapipe_flwr.core.errors import LinkError
from collapipe_flwr.membership.admission import JoiningService
from collapipe_flwr.membership.discovery import announced, found
from collapipe_flwr.membership.newcomer import reachable
from tests.membership.clusters import board, joined, new_registry, print_token

pytest.importorskip("zeroconf")
LOOPBACK = "127.0.0.1"


def test_a_board_joins_whom_it_finds(tmp_path: Path) -> None:
    registry = new_registry(tmp_path / "cu")
    token = print_token(registry)
    with (
        JoiningService(registry, f"{LOOPBACK}:0") as service,
        announced(registry.cluster(), "127.0.0.1:9", bytes(32)),  # of another CA
        announced(registry.cluster(), service.address, token.pin),
    ):
        assert found(token.pin, interface=LOOPBACK, deadline_s=30.0) == service.address
        assert joined(service, token, board(tmp_path, "pi-1")).name == "pi-1"


def test_whoever_listens_on_all_addresses_is_announced_at_its_own() -> None:
    host, _, port = reachable("0.0.0.0:50060").rpartition(":")
    assert port == "50060" and host not in ("", "0.0.0.0")
    assert reachable("[::]:50060") == f"{host}:50060"
    assert reachable("10.0.0.2:50060") == "10.0.0.2:50060"


def test_where_nobody_is_announced_the_way_out_is_named() -> None:
    with pytest.raises(
        LinkError, match=r"no control unit of this token is announced .* --announce"
    ):
        found(bytes(range(32)), interface=LOOPBACK, deadline_s=0.5)

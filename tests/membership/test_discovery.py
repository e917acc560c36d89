"""Boards find their control unit by mDNS, and believe nobody else who says that it is one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from collapipe_flwr.core.errors import LinkError
from collapipe_flwr.membership.admission import JoiningService
from collapipe_flwr.membership.discovery import _look_up, announce, find_control_unit
from collapipe_flwr.membership.newcomer import make_reachable
from tests.membership.clusters import board, joined, new_registry, print_token

BadTypeInNameException = pytest.importorskip("zeroconf").BadTypeInNameException
LOOPBACK = "127.0.0.1"


def test_a_board_joins_whom_it_finds(tmp_path: Path) -> None:
    registry = new_registry(tmp_path / "cu")
    token = print_token(registry)
    with (
        JoiningService(registry, f"{LOOPBACK}:0") as service,
        announce(registry.cluster(), "127.0.0.1:9", bytes(32)),  # of another CA
        announce(registry.cluster(), service.address, token.pin),
    ):
        assert find_control_unit(token.pin, interface=LOOPBACK, deadline_s=30.0) == service.address
        assert joined(service, token, board(tmp_path, "pi-1")).name == "pi-1"


def test_whoever_listens_on_all_addresses_is_announced_at_its_own() -> None:
    host, _, port = make_reachable("0.0.0.0:50060").rpartition(":")
    assert port == "50060" and host not in ("", "0.0.0.0")
    assert make_reachable("[::]:50060") == f"{host}:50060"
    assert make_reachable("10.0.0.2:50060") == "10.0.0.2:50060"


def test_where_nobody_is_announced_the_way_out_is_named() -> None:
    with pytest.raises(
        LinkError, match=r"no control unit of this token is announced .* --announce"
    ):
        find_control_unit(bytes(range(32)), interface=LOOPBACK, deadline_s=0.5)


PIN = bytes(range(32))
TYPE = "_collapipe._tcp.local."
OURS = PIN.hex()[:16]
OURS_TOLD = OURS.encode()


class Network:
    """Answers what it is asked for with ``info``, or raises it."""

    def __init__(self, info: Any) -> None:
        self.info, self.asked = info, list[str]()

    def get_service_info(self, kind: str, name: str, timeout: int) -> Any:
        del kind, timeout
        self.asked.append(name)
        if isinstance(self.info, Exception):
            raise self.info
        return self.info


def info(port: Any = 9, pin: Any = OURS_TOLD, address: str = "10.0.0.2") -> SimpleNamespace:
    return SimpleNamespace(port=port, properties={b"pin": pin}, parsed_addresses=lambda: [address])


@pytest.mark.parametrize("name", ["evil.example.", "", f"{OURS}.local.", f"a-{'0' * 16}.{TYPE}"])
def test_what_others_announce_is_not_asked_for(name: str) -> None:
    network = Network(info())
    assert _look_up(network, TYPE, name, PIN) == [] and not network.asked


@pytest.mark.parametrize(
    "told",
    [
        None,
        BadTypeInNameException("x" * 300),
        info(port=None),
        info(port=99_999),
        info(pin=None),
        info(pin=b"\xff" * 99),
        info(address="/../etc"),
    ],
)
def test_an_odd_announcement_ends_no_search(told: Any) -> None:
    assert _look_up(Network(told), TYPE, f"garage-{OURS}.{TYPE}", PIN) == []
    assert _look_up(Network(info()), TYPE, f"garage-{OURS}.{TYPE}", PIN) == ["10.0.0.2:9"]

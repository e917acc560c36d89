"""A control unit on another machine than the cluster's CA joins by a token, as boards do."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from collapipe_flwr.cluster.profile import profile_cluster
from collapipe_flwr.config.cluster_file import Role, read_cluster
from collapipe_flwr.core.errors import ConfigError, LinkError
from collapipe_flwr.host.rosters import Rosters
from collapipe_flwr.host.server import Listener
from collapipe_flwr.membership.admission import JoiningService
from collapipe_flwr.membership.figures import add_figures, note_figures, read_figures
from collapipe_flwr.membership.members import (
    BEHIND,
    READY,
    RosterSender,
    ask_cluster,
    list_callable,
    send_rosters,
)
from collapipe_flwr.membership.newcomer import Membership, Newcomer, choose_name, forget
from collapipe_flwr.membership.registry import Registry
from collapipe_flwr.membership.serving import follow
from collapipe_flwr.transport.client import HostClient
from collapipe_flwr.transport.dialing import Dialing
from collapipe_flwr.transport.relay import DialRelay
from tests.membership.clusters import (
    ID,
    UNIT,
    board,
    daemon,
    joined,
    measured,
    names,
    new_registry,
    print_token,
    rosters_of,
)
from tests.ports import free_port


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    elsewhere = frozenset({Role.CONTROL_UNIT})
    return new_registry(tmp_path / "ca", f"127.0.0.1:{free_port()}", elsewhere)


@pytest.fixture
def unit(tmp_path: Path, registry: Registry, joining: JoiningService) -> Membership:
    return unit_joined(registry, joining, board(tmp_path / "unit", UNIT, free_port()))


def unit_joined(registry: Registry, joining: JoiningService, newcomer: Newcomer) -> Membership:
    return joined(joining, print_token(registry, role=Role.CONTROL_UNIT), newcomer)


@contextmanager
def following(unit: Membership, rosters: Rosters | None = None) -> Iterator[None]:
    """As `follow`, without signals."""
    rosters = rosters or rosters_of(unit)
    rosters.on_newer = add_figures
    address = unit.cluster.control_unit.address
    files = unit.cluster.tls_files(UNIT)
    with Listener(address, None, tls=files, rosters=rosters):
        yield


def of_unit(unit: Membership, device: Membership) -> HostClient:
    """Of a device's daemon, for the control unit."""
    return HostClient(
        device.cluster.member(device.name).address,
        tls=unit.cluster.tls_files(UNIT),
        certificate_name=device.name,
        deadline_s=10,
    )


def remove(registry: Registry, name: str) -> dict[str, str]:
    """As `collapipe cluster remove` does."""
    with registry.lock():
        before = registry.cluster()
        after = registry.remove(before, name)
    gone = [m for m in list_callable(before) if m.name == name]
    return send_rosters(after, (*list_callable(after), *gone), registry.roster(after))


def test_it_relays_to_devices_that_dial(
    tmp_path: Path, registry: Registry, joining: JoiningService, unit: Membership
) -> None:
    newcomer = replace(board(tmp_path, "phone"), address="", dials=True)
    phone = joined(joining, print_token(registry), newcomer)
    host = unit.cluster.control_unit.host
    assert registry.cluster().member("phone").address == f"{host}:50062"
    rosters, tls = rosters_of(unit), phone.cluster.tls_files("phone")
    assert tls is not None
    with following(unit, rosters), DialRelay("127.0.0.1:0", lambda: rosters.clusters) as relay:
        dialing = Dialing(relay=relay.address, unit=UNIT, tls=tls, listens="127.0.0.1:1")
        with pytest.raises(LinkError, match="phone is no device here"):
            asyncio.run(dialing.serve_once())
        RosterSender(registry).look()
        admitted = threading.Event()
        with replace(dialing, on_admitted=admitted.set)():
            assert admitted.wait(60)


def test_it_joins_once_and_its_key_stays_with_it(
    tmp_path: Path, registry: Registry, joining: JoiningService
) -> None:
    newcomer = board(tmp_path / "unit", choose_name(Role.CONTROL_UNIT, ID))
    token = print_token(registry, role=Role.CONTROL_UNIT)
    found = joined(joining, token, newcomer)
    assert (found.name, found.role) == (UNIT, Role.CONTROL_UNIT)
    secret = newcomer.own("key").read_text().splitlines()[1]
    for path in filter(Path.is_file, (tmp_path / "ca").rglob("*")):
        assert secret not in path.read_text(), path
    for name, said in ((UNIT, "the token was used by cu-shed already"), ("another", "is used up")):
        with pytest.raises(LinkError, match=said):
            joined(joining, token, board(tmp_path / "thief", name, 1001))
    expired = print_token(registry, role=Role.CONTROL_UNIT, minutes=0)
    with pytest.raises(LinkError, match="the token has expired"):
        joined(joining, expired, board(tmp_path / "late", UNIT))
    with pytest.raises(LinkError, match="shed has a control unit already: cu-shed"):
        unit_joined(registry, joining, board(tmp_path / "other", "other", 1001))


def test_rosters_and_figures_of_newcomers_reach_it_while_it_runs(
    tmp_path: Path, registry: Registry, joining: JoiningService, unit: Membership
) -> None:
    config, path = unit.cluster, unit.cluster.path
    assert path is not None and not config.devices
    with following(unit):
        first = joined(joining, print_token(registry), board(tmp_path, "pi-1", free_port()))
        RosterSender(registry).look()
        assert names(read_cluster(path)) == {"pi-1"}
        checked = [measured("pi-1")]
        note_figures(config, [*checked, measured("cu-shed")])  # a check here, which counts more
        joined(joining, print_token(registry), board(tmp_path, "pi-2", free_port()))
        RosterSender(registry).look()
        with daemon(first), of_unit(unit, first) as client:
            client.echo()
            states = {m.name: m.state for m in ask_cluster(registry.cluster()).members}
    assert (states[UNIT], states["pi-1"]) == (READY, BEHIND)  # which runs since a moment ago
    now = read_cluster(path)
    assert now.version == registry.cluster().version and names(now) == {"pi-1", "pi-2"}
    assert [d.speed_flop_per_s for d in profile_cluster(now, 1).devices] == [7e9, 7e9]
    assert read_figures(now).find("pi-1") == checked[0]  # without the address, as it was noted here


def test_one_that_was_removed_is_refused_at_once_and_another_takes_its_place(
    tmp_path: Path, registry: Registry, joining: JoiningService, unit: Membership
) -> None:
    device = joined(joining, print_token(registry), board(tmp_path, "pi-1", free_port()))
    rosters, heard = rosters_of(unit), []
    rosters.on_removed = heard.append
    with daemon(device), following(unit, rosters), of_unit(unit, device) as client:
        client.echo()
        faults = remove(registry, UNIT)
        assert not faults["pi-1"] and not faults[UNIT]
        assert heard == [f"{UNIT} was removed from {ID}"]
        with pytest.raises(LinkError, match="it is not the one that this member joined with"):
            client.echo()
        newcomer = board(tmp_path / "unit", UNIT, free_port())
        with pytest.raises(LinkError, match="cu-shed was removed from shed, and its key with it"):
            unit_joined(registry, joining, newcomer)
        forget(newcomer)
        again = unit_joined(registry, joining, newcomer)
        RosterSender(registry).look()
        with of_unit(again, device) as client:
            client.echo()


def test_who_has_its_key_beside_the_ca_cannot_be_removed(registry: Registry) -> None:
    with (
        registry.lock(),
        pytest.raises(ConfigError, match="edge of shed is on this machine, and its key with it"),
    ):
        registry.remove(registry.cluster(), "edge")
    with pytest.raises(ConfigError, match="neither the CA of shed nor the key of cu-shed is in"):
        follow(registry.cluster(), "", print)

"""Boards that only dial out join, hear of others, and are removed as all others."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from collapipe_flwr.cli import app, hosting
from collapipe_flwr.config.cluster_file import Role, format_cluster, parse_cluster
from collapipe_flwr.core.errors import ConfigError, LinkError
from collapipe_flwr.host import daemon
from collapipe_flwr.host.daemon import HostSettings
from collapipe_flwr.host.rosters import Rosters
from collapipe_flwr.host.server import Listener
from collapipe_flwr.membership import serving
from collapipe_flwr.membership.admission import JoiningService
from collapipe_flwr.membership.members import (
    AWAY,
    READY,
    RosterSender,
    ask_cluster,
    send_rosters,
)
from collapipe_flwr.membership.newcomer import Membership
from collapipe_flwr.membership.registry import Registry
from collapipe_flwr.transport import relay
from collapipe_flwr.transport.certificates import sign_all
from collapipe_flwr.transport.relay import DialRelay
from tests.membership.clusters import (
    ID,
    board,
    joined,
    new_registry,
    print_token,
    rosters_of,
)
from tests.ports import free_port


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    """Whose relay is at a port of its own."""
    found = new_registry(tmp_path / "cu")
    path = found.cluster().path
    assert path is not None
    path.write_text(f'relay = "127.0.0.1:{free_port()}"\n{path.read_text()}')
    return found


@pytest.fixture
def phones(tmp_path: Path, registry: Registry, joining: JoiningService) -> list[Membership]:
    token = print_token(registry, members=2)
    boards = [replace(board(tmp_path, n), address="", dials=True) for n in ("phone", "tablet")]
    return [joined(joining, token, each) for each in boards]


@contextmanager
def running(member: Membership, rosters: Rosters | None = None) -> Iterator[None]:
    """What `collapipe device` does of a member that dials, without parts."""
    unit = member.cluster.control_unit.name
    tls = member.cluster.tls_files(member.name)
    settings = HostSettings(
        listen="127.0.0.1:0",
        name=member.name,
        tls=tls,
        dial=member.cluster.relay_address,
        unit=unit,
    )
    there = threading.Event()
    rosters = rosters or rosters_of(member)
    with (
        Listener(settings.listen, None, tls=tls, rosters=rosters) as listener,
        daemon._make_reachable(settings, listener.address, lambda _: there.set()),
    ):
        assert there.wait(60)
        yield


def test_members_that_dial_hear_of_each_other_and_of_their_removal(
    registry: Registry, phones: list[Membership], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "_LOOK_S", 60.0)  # the roster is not in a race with the cut
    phone, tablet = phones
    at = registry.cluster().relay_address
    assert [device.address for device in registry.cluster().devices] == [at, at]
    removed: list[str] = []
    rosters = rosters_of(phone)
    rosters.on_removed = removed.append
    with DialRelay(at, lambda: registry.clusters().values()), running(phone, rosters):
        states = {m.name: m for m in ask_cluster(registry.cluster()).members}
        assert states["tablet"].state == AWAY
        assert "it has not dialled in" in states["tablet"].fault
        with running(tablet):
            RosterSender(registry).look()
            states = {m.name: m for m in ask_cluster(registry.cluster()).members}
            assert {states[n].state for n in ("phone", "tablet")} == {READY}
        assert rosters.versions == {ID: registry.cluster().version}
        before = registry.cluster()
        with registry.lock():
            after = registry.remove(before, "phone")
            roster = registry.roster(after)
        send_rosters(after, [before.member("phone")], roster)
        assert removed == [f"phone was removed from {ID}"]


def test_a_cluster_whose_file_is_written_by_hand_has_a_relay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "_LOOK_S", 0.05)
    devices = [{"name": "d0", "dials": True}]
    values = {"id": "A", "relay": f"127.0.0.1:{free_port()}", "device": devices, "tls": {}}
    config = parse_cluster(values, tmp_path)
    (tmp_path / "A.toml").write_text(format_cluster(config))
    sign_all(tmp_path / "certs", dict.fromkeys(config.names, ()))
    over, said = threading.Event(), list[str]()
    monkeypatch.setattr(serving, "stop_on_signals", lambda: nullcontext(over))
    with ThreadPoolExecutor(1) as pool:
        served = pool.submit(serving.serve, Registry(tmp_path), said.append)
        try:
            with running(Membership(cluster=config, name="d0", role=Role.DEVICE)):
                pass
        finally:
            over.set()
        served.result(60)
    assert said == [f"devices of A dial in at {config.relay}"]


def test_what_must_be_reached_does_not_dial(tmp_path: Path) -> None:
    away = new_registry(tmp_path / "other", elsewhere=frozenset({Role.CONTROL_UNIT, Role.EDGE}))
    dials = replace(board(tmp_path, "edge"), address="", dials=True)
    with JoiningService(away, "127.0.0.1:0") as there:
        with pytest.raises(LinkError, match=r"an edge must be reached: join without --dial"):
            joined(there, print_token(away, role=Role.EDGE), dials)
        with pytest.raises(LinkError, match=r"control unit of shed has not joined yet, through"):
            joined(there, print_token(away), replace(dials, name="phone"))


def test_a_daemon_dials_where_its_file_says_so_and_else_not(
    tmp_path: Path, registry: Registry, joining: JoiningService, phones: list[Membership]
) -> None:
    assert [phone.name for phone in phones] == ["phone", "tablet"]

    def settings(name: str, folder: Path, dial: str = "") -> HostSettings:
        unset = dict.fromkeys(("ca", "certificate", "key", "allow", "imports"), None)
        plain = {"listen": "", "memory_mb": 0.0, "insecure": False, "compute": "cpu", "threads": 0}
        more = {"grace_s": 1.0, "metrics": "", "name": name, "cluster": [folder], "dial": dial}
        return hosting._read_settings("127.0.0.1:50071", {**unset, **plain, **more})

    found = settings("phone", tmp_path / "phone")
    at = registry.cluster().relay_address
    assert (found.dial, found.unit, found.listen) == (at, f"cu-{ID}", "127.0.0.1:0")
    assert settings("phone", tmp_path / "phone", "hub.example").dial == "hub.example:50062"
    with pytest.raises(ConfigError, match="--dial: must read like"):
        settings("phone", tmp_path / "phone", "hub.example:99999")
    listening = joined(joining, print_token(registry), board(tmp_path, "pi-1", free_port()))
    there = settings("pi-1", tmp_path / "pi-1")
    assert (there.dial, there.listen) == ("", listening.cluster.member("pi-1").address)
    with pytest.raises(ConfigError, match=r"--dial hub: .* `collapipe join TOKEN --dial`"):
        settings("pi-1", tmp_path / "pi-1", "hub")
    result = CliRunner().invoke(app, ["join", "x", "--dial", "--address", "10.0.0.11"])
    assert "that dials has no address" in str(result.exception)

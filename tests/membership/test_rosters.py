"""Rosters reach members that run, and whoever was removed is out at once and for good."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from collapipe_flwr.cli import app
from collapipe_flwr.cluster.edges import serve_edge
from collapipe_flwr.config.cluster_file import MemberConfig, Role, read_cluster
from collapipe_flwr.config.privacy import PrivacyConfig
from collapipe_flwr.core.errors import LinkError, LinkTimeout, ProtocolError
from collapipe_flwr.host import server
from collapipe_flwr.host.rosters import Rosters
from collapipe_flwr.host.server import Listener
from collapipe_flwr.host.servicer import Servicer
from collapipe_flwr.membership import members
from collapipe_flwr.membership.admission import JoiningService
from collapipe_flwr.membership.members import (
    AWAY,
    EXPECTED,
    READY,
    RosterSender,
    ask_cluster,
    list_callable,
    send_rosters,
)
from collapipe_flwr.membership.newcomer import Membership, forget
from collapipe_flwr.membership.registry import Registry, issue_token
from collapipe_flwr.transport.client import HostClient
from collapipe_flwr.transport.roster import Roster, send_roster
from tests.host.chain_to_edge import request, service, session_key
from tests.membership.clusters import (
    ID,
    UNIT,
    board,
    daemon,
    joined,
    names,
    new_registry,
    print_token,
    rosters_of,
)
from tests.pipeline.chains import Head
from tests.ports import free_port


def remove(registry: Registry, name: str) -> tuple[Roster, dict[str, str]]:
    """As `collapipe cluster remove` does."""
    with registry.lock():
        before = registry.cluster()
        after = registry.remove(before, name)
        roster = registry.roster(after)
    return roster, send_rosters(after, (*list_callable(after), before.member(name)), roster)


def client(member: Membership, of: str, caller: str | None = None) -> HostClient:
    """Of the daemon of ``of``, as ``caller`` (None: the member itself)."""
    config = member.cluster
    return HostClient(
        config.member(of).address,
        tls=config.tls_files(caller or member.name),
        certificate_name=of,
        deadline_s=10,
    )


def unit(registry: Registry) -> Membership:
    config = registry.cluster()
    return Membership(cluster=config, name=UNIT, role=Role.CONTROL_UNIT)


def test_members_that_run_hear_of_a_newcomer_and_let_it_in(
    registry: Registry, pair: list[Membership]
) -> None:
    first, second = pair
    with daemon(first):
        with client(second, "pi-1") as stranger, pytest.raises(LinkError, match="no member here"):
            stranger.echo()
        RosterSender(registry).look()
        with client(second, "pi-1") as member:
            member.echo()


def test_no_roster_takes_back_what_a_file_demands(
    registry: Registry, pair: list[Membership]
) -> None:
    """Both in the file that is kept and in the one that a process has read."""
    path = pair[0].cluster.path
    assert path is not None
    path.write_text(path.read_text() + "[privacy]\ntrusted-blocks = 2\n")
    rosters = rosters_of(replace(pair[0], cluster=read_cluster(path)))
    newer = replace(registry.cluster(), version=99, privacy=PrivacyConfig(labels="home"))
    rosters.accept(registry.roster(newer))
    both = PrivacyConfig(labels="home", trusted_blocks=2)
    assert rosters.clusters[0].privacy == read_cluster(path).privacy == both
    assert read_cluster(path).version == 99


def test_a_roster_counts_if_it_is_newer_and_of_this_ca(
    tmp_path: Path, registry: Registry, pair: list[Membership]
) -> None:
    rosters = rosters_of(pair[0])
    newest = registry.roster(registry.cluster())
    older = registry.roster(replace(registry.cluster(), version=1, devices=()))
    for forged in (
        replace(newest, text=newest.text.replace("version = 3", "version = 9")),
        replace(newest, signature="AAAA"),
        replace(newest, signature="?"),
        new_registry(tmp_path / "other").roster(replace(registry.cluster(), version=9)),
    ):
        with pytest.raises(ProtocolError, match="was not signed by this cluster's CA"):
            rosters.accept(forged)
    assert rosters.accept(newest) == 3 and rosters.accept(older) == 3
    assert pair[0].cluster.path is not None
    kept = read_cluster(pair[0].cluster.path)
    assert names(kept) == {"pi-1", "pi-2"} and kept.version == 3
    with pytest.raises(ProtocolError, match="pi-1 is no member of barn"):
        rosters.accept(registry.roster(replace(registry.cluster(), id="barn", devices=())))


def test_no_other_roster_comes_in_between_before_one_is_applied(
    registry: Registry, pair: list[Membership]
) -> None:
    rosters, seen = rosters_of(pair[0]), []
    rosters.on_change = lambda access: seen.append((access, rosters._lock.locked()))
    rosters.accept(registry.roster(registry.cluster()))
    assert seen == [(rosters.access, True)]


def test_a_member_that_was_down_hears_of_it_when_it_is_back(
    registry: Registry, pair: list[Membership]
) -> None:
    now_s = [0.0]
    sender = RosterSender(registry, clock=lambda: now_s[0])
    sender.look()  # nobody is there
    remove(registry, "pi-2")
    sender.look()
    with daemon(pair[0]) as listener:
        now_s[0] = 10.0
        sender.look()
        assert listener._rosters is not None
        assert listener._rosters.versions == {ID: 4}
    with (
        daemon(back(pair[0])),
        client(pair[1], "pi-1") as removed,
        pytest.raises(LinkError, match="names pi-2, which is no member here"),
    ):
        removed.echo()


def test_a_member_that_stays_away_is_called_ever_more_rarely_and_mentioned_once(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now_s, called_s = [0.0], list[float]()

    def send(_config: object, members: list[MemberConfig], *_: object) -> dict[str, str]:
        called_s.append(now_s[0])
        return {member.name: "nobody answers" for member in members}

    away = MemberConfig(name="pi-1", address="10.0.0.9:1", fingerprint="ab")
    monkeypatch.setattr(members, "list_callable", lambda _: (away,))
    monkeypatch.setattr(members, "send_rosters", send)
    sender = RosterSender(registry, clock=lambda: now_s[0])
    while now_s[0] < 600.0:
        sender.look()
        now_s[0] += 10.0
    assert len(called_s) < 20
    assert called_s[-1] - called_s[-2] == 60.0
    assert caplog.text.count("does not have the newest roster yet: nobody answers") == 1


def back(member: Membership) -> Membership:
    """It, by its files."""
    assert member.cluster.path is not None
    return replace(member, cluster=read_cluster(member.cluster.path))


def test_what_a_removed_device_has_under_way_is_cut(
    registry: Registry, pair: list[Membership]
) -> None:
    config = registry.cluster()
    files = replace(config, folder=registry.edge_folder).tls_files("edge")
    path = registry.edge_folder / f"{ID}.toml"
    rosters = Rosters("edge", [read_cluster(path)], files.ca)
    servicer = Servicer(service())
    with Listener(config.edge.address, lambda: servicer, tls=files, rosters=rosters, on_edge=True):
        RosterSender(registry).look()
        with client(unit(registry), "edge") as hub, client(pair[0], "edge") as device:
            hub.open_session(request("s", cluster_id=ID))
            hub.get_session(session_key("s")).push_weights(Head().state_dict())
            stream = device.get_session(session_key("s")).stream()
            remove(registry, "pi-1")
            with pytest.raises(LinkError):
                stream.receive(deadline_s=20.0)
            with pytest.raises(LinkError, match="names pi-1, which is no member here"):
                device.echo()
        with client(pair[1], "edge") as other:
            other.echo()


def test_a_control_unit_that_is_the_edge_cuts_a_removed_device_within_its_round(
    registry: Registry, pair: list[Membership]
) -> None:
    """Nobody brings it a roster: its file is replaced by another process."""
    hosted = service()
    with serve_edge(registry.cluster(), hosted) as address:
        tls = [member.cluster.tls_files(member.name) for member in pair]
        own = registry.cluster().tls_files(UNIT)
        hub, first, second = (
            HostClient(address, tls=files, certificate_name=UNIT, deadline_s=10)
            for files in (own, *tls)
        )
        with hub, first, second:
            hub.open_session(request("s", cluster_id=ID))
            hub.get_session(session_key("s")).push_weights(Head().state_dict())
            stream = first.get_session(session_key("s")).stream()
            with registry.lock():
                registry.remove(registry.cluster(), "pi-1")
            with pytest.raises(LinkError) as cut:
                stream.receive(deadline_s=60.0)
            assert not isinstance(cut.value, LinkTimeout)
            with pytest.raises(LinkError, match="names pi-1, which is no member here"):
                first.echo()
            second.echo()


def test_a_removed_daemon_stops(registry: Registry, pair: list[Membership]) -> None:
    rosters, heard = rosters_of(pair[0]), []
    rosters.on_removed = heard.append
    with daemon(pair[0], rosters):
        _, faults = remove(registry, "pi-1")
        assert not faults["pi-1"] and faults["pi-2"]
    assert heard == ["pi-1 was removed from shed"]


def test_an_edge_of_two_clusters_stops_when_it_is_removed(tmp_path: Path) -> None:
    registry = new_registry(tmp_path / "cu", elsewhere=frozenset({Role.EDGE}))
    unit = MemberConfig(name="cu-barn", address="127.0.0.1:50060")
    with registry.lock():
        registry.create("barn", unit, "")
        token = issue_token(registry, registry.cluster(ID), Role.EDGE, members=1, minutes=60.0)
    with JoiningService(registry, "127.0.0.1:0") as joining:
        edge = joined(joining, token, board(tmp_path, "edge", free_port()))
    rosters, heard = rosters_of(edge), []
    rosters.on_removed = heard.append
    with daemon(edge, rosters):
        RosterSender(registry).look()
        assert set(rosters.versions) == {ID, "barn"}
        words = ["cluster", "remove", "edge", "--cluster", ID, "--folder", str(registry.folder)]
        done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert done.exit_code == 0 and "edge is not a member of barn any more" in done.stdout
    assert len(heard) == 1


def test_an_old_certificate_is_worthless_though_its_name_is_back(
    tmp_path: Path, registry: Registry, joining: JoiningService, pair: list[Membership]
) -> None:
    thief = tmp_path / "thief"
    thief.mkdir()
    stolen = pair[1].cluster.tls_files("pi-2")
    copies = {
        field: (thief / getattr(stolen, field).name) for field in ("ca", "certificate", "key")
    }
    for field, copy in copies.items():
        copy.write_bytes(getattr(stolen, field).read_bytes())
    with daemon(pair[0]):
        remove(registry, "pi-2")
        newcomer = board(tmp_path, "pi-2", free_port())
        forget(newcomer)
        again = joined(joining, print_token(registry), newcomer)
        RosterSender(registry).look()
        with client(again, "pi-1") as member:
            member.echo()
        with (
            HostClient(
                pair[0].cluster.member("pi-1").address,
                tls=replace(stolen, **copies),
                certificate_name="pi-1",
                deadline_s=10,
            ) as old,
            pytest.raises(LinkError, match="not the one that this member joined with"),
        ):
            old.echo()


def test_the_status_says_who_is_there(registry: Registry, pair: list[Membership]) -> None:
    with registry.lock():
        registry.admit(
            registry.cluster(), Role.EDGE, replace(registry.cluster().edge, fingerprint="")
        )
    with daemon(pair[1]):
        RosterSender(registry).look()
        found = ask_cluster(registry.cluster())
    states = {member.name: member.state for member in found.members}
    assert states == {"pi-1": AWAY, "pi-2": READY, "edge": EXPECTED}
    there = found.members[1]
    assert there.roster == found.version and there.resident_bytes
    assert there.speed_flop_per_s == 7e9 and not found.complete


def test_nothing_of_a_removed_member_s_roster_is_read(
    registry: Registry, pair: list[Membership], monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object) -> bytes:
        raise AssertionError("it was read")

    with daemon(pair[0]):
        roster, _ = remove(registry, "pi-2")
        monkeypatch.setattr(server, "take_message", never)
        with (
            client(pair[1], "pi-1") as removed,
            pytest.raises(LinkError, match="names pi-2, which is no member here"),
        ):
            send_roster(removed, roster)

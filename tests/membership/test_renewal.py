"""Certificates are renewed before they end, while members run, and the old one ends by itself."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta, tzinfo
from pathlib import Path
from types import SimpleNamespace

import pytest
from cryptography import x509

from collapipe_flwr.config.cluster_file import MemberConfig, Role, read_cluster
from collapipe_flwr.core.errors import ConfigError, LinkError, ProtocolError
from collapipe_flwr.core.links import TlsFiles, split_address
from collapipe_flwr.membership.admission import JoiningService
from collapipe_flwr.membership.members import RosterSender, list_callable, send_rosters
from collapipe_flwr.membership.newcomer import Membership, find_membership
from collapipe_flwr.membership.registry import Registry
from collapipe_flwr.transport import certificates
from collapipe_flwr.transport.certificates import Authority
from collapipe_flwr.transport.client import HostClient
from collapipe_flwr.transport.tls import fingerprint, make_trusting_context, read_validity
from tests.membership.clusters import (
    ID,
    UNIT,
    board,
    daemon,
    join_pair,
    joined,
    new_registry,
    print_token,
    rosters_of,
)
from tests.ports import free_port


@pytest.fixture
def pair(tmp_path: Path, registry: Registry, joining: JoiningService) -> list[Membership]:
    with signing(days_ago=600):
        return join_pair(tmp_path, registry, joining)


@contextmanager
def signing(days_ago: int) -> Iterator[None]:
    """Certificates are dated as if the clock had been so many days behind."""

    class Shifted(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:
            return datetime.now(tz) - timedelta(days=days_ago)

    shifted = SimpleNamespace(datetime=Shifted, timedelta=timedelta, UTC=UTC)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(certificates, "datetime", shifted)
        patch.setattr(certificates, "_check_clock", lambda: None)
        yield


def files_of(member: Membership, name: str = "") -> TlsFiles:
    files = member.cluster.tls_files(name or member.name)
    assert files is not None and files.certificate is not None
    return files


def certificate_of(member: Membership) -> bytes:
    certificate = files_of(member).certificate
    assert certificate is not None
    return certificate.read_bytes()


def client(member: Membership, of: str, files: TlsFiles) -> HostClient:
    address = member.cluster.member(of).address
    return HostClient(address, tls=files, certificate_name=of, deadline_s=10)


def shown_at(address: str, files: TlsFiles) -> str:
    """The fingerprint of the certificate that a host shows now."""
    context = make_trusting_context()
    assert files.certificate is not None
    context.load_cert_chain(files.certificate, files.key)
    with (
        socket.create_connection(split_address(address), 10) as peer,
        context.wrap_socket(peer) as shaken,
    ):
        der = shaken.getpeercert(binary_form=True)
        assert der is not None
        return fingerprint(ssl.DER_cert_to_PEM_cert(der).encode())


def test_members_that_run_get_new_certificates_and_nothing_breaks(
    registry: Registry, pair: list[Membership]
) -> None:
    first, second = pair
    before = [certificate_of(member) for member in pair]
    kept = files_of(second).certificate.with_name("kept.pem")
    kept.write_bytes(before[1])
    old = replace(files_of(second), certificate=kept)
    with daemon(first) as listener, daemon(second):
        sender = RosterSender(registry)
        with client(second, "pi-1", old) as connected:
            sender.look()
            connected.echo()  # over the connection that was there
        for member, pem in zip(pair, before, strict=True):
            now = certificate_of(member)
            assert read_validity(now)[1] > read_validity(pem)[1] + timedelta(days=500)
            listed = registry.cluster().member(member.name)
            assert listed.fingerprints == {fingerprint(now), fingerprint(pem)}
            assert member.cluster.path is not None
            assert read_cluster(member.cluster.path).member(member.name) == listed
            assert shown_at(listed.address, files_of(member)) == listed.fingerprint
        for shown in (old, files_of(second)):
            with client(second, "pi-1", shown) as member:
                member.echo()
        version = registry.cluster().version
        sender.look()
        RosterSender(registry).look()
        assert registry.cluster().version == version  # once is enough
        assert listener._rosters is not None and listener._rosters.versions == {ID: version}
        with registry.lock():
            registry.remove(registry.cluster(), "pi-2")
            after = registry.cluster()
        send_rosters(after, list_callable(after), registry.roster(after))
        for shown in (old, files_of(second)):
            with (
                client(second, "pi-1", shown) as gone,
                pytest.raises(LinkError, match="names pi-2, which is no member here"),
            ):
                gone.echo()


def test_a_member_that_was_away_is_let_in_with_the_old_one_and_gets_the_new_one(
    registry: Registry, pair: list[Membership]
) -> None:
    first, second = pair
    before = certificate_of(second)
    sender = RosterSender(registry)
    with daemon(first):
        sender.look()
        with client(second, "pi-1", files_of(second)) as late:
            late.echo()
    assert certificate_of(second) == before
    with daemon(second):
        RosterSender(registry).look()
    assert certificate_of(second) != before


def test_control_unit_and_edge_are_renewed_where_they_are(tmp_path: Path) -> None:
    folder = tmp_path / "cu"
    with signing(days_ago=600):
        registry = new_registry(folder, f"127.0.0.1:{free_port()}")
    config = registry.cluster()
    edge = Membership(
        cluster=read_cluster(registry.edge_folder / f"{ID}.toml"), name="edge", role=Role.EDGE
    )
    before = certificate_of(edge)
    with daemon(edge):
        RosterSender(registry).look()
        address = config.edge.address
        unit = replace(edge, cluster=registry.cluster(), name=UNIT)
        assert shown_at(address, files_of(unit)) == fingerprint(certificate_of(edge))
        with client(edge, "edge", files_of(unit)) as hub:
            hub.echo()
    assert certificate_of(edge) != before
    for name in (UNIT, "edge", "server"):
        listed = registry.cluster().member(name)
        assert listed.earlier_fingerprint == config.member(name).fingerprint
        kept = registry.read_certificate(name)
        assert kept is not None and fingerprint(kept) == listed.fingerprint
        assert read_validity(kept)[1] > datetime.now(UTC) + timedelta(days=800)


def test_a_renewal_that_broke_off_is_finished(
    registry: Registry, pair: list[Membership], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The certificate was signed, and the cluster file does not know it."""

    def dies(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt), registry.lock():
        patch.setattr(Registry, "admit", dies)
        registry.renew(datetime.now(UTC))
    with daemon(pair[0]), daemon(pair[1]):
        RosterSender(registry).look()
        for member in pair:
            listed = registry.cluster().member(member.name)
            assert fingerprint(certificate_of(member)) == listed.fingerprint
            assert listed.earlier_fingerprint


def test_a_member_takes_no_certificate_that_is_not_its_own(
    tmp_path: Path, registry: Registry, pair: list[Membership]
) -> None:
    before, rosters = certificate_of(pair[0]), rosters_of(pair[0])
    other, stranger = Authority(registry.certs), Authority(tmp_path / "other")
    newest = registry.roster(replace(registry.cluster(), version=99))
    strange = [by.issue("pi-1") for by in (other, stranger)]  # another key; they end later
    strange.append(other.issue("pi-2"))
    for issued in strange:
        with pytest.raises(ProtocolError, match="certificate that came back"):
            rosters.accept(replace(newest, certificate=issued.certificate.read_text()))
    with signing(days_ago=900):
        ending = other.issue("pi-3").certificate.read_text()
    rosters.accept(replace(newest, certificate=ending))  # nobody looks at one that ends no later
    assert certificate_of(pair[0]) == before


def test_one_whose_certificate_has_ended_joins_again_by_a_new_token(
    tmp_path: Path, registry: Registry, joining: JoiningService
) -> None:
    newcomer = board(tmp_path, "pi-1", free_port())
    found = joined(joining, print_token(registry), newcomer)
    expired = _expired(registry, found)
    token = print_token(registry)
    assert find_membership(newcomer, token.pin) is None
    with pytest.raises(ConfigError, match=r"expired on .*join again by a new one"), daemon(found):
        raise AssertionError("it listens")
    with registry.lock():
        (told,) = registry.renew(datetime.now(UTC))
    assert "pi-1 ends on" in told and "let it join again by a new token" in told
    again = joined(joining, token, newcomer)
    assert certificate_of(again) != expired
    with daemon(again):
        RosterSender(registry).look()


def _expired(registry: Registry, member: Membership) -> bytes:
    """Its certificate as if it had joined long ago."""
    kept = registry.read_certificate(member.name)
    assert kept is not None
    key = x509.load_pem_x509_certificate(kept).public_key()
    with signing(days_ago=900), registry.lock():
        pem = registry.certify(member.name, (), key)  # type: ignore[arg-type]
        config = registry.cluster()
        listed: MemberConfig = replace(
            config.member(member.name), fingerprint=fingerprint(pem), earlier_fingerprint=""
        )
        config = registry.admit(config, Role.DEVICE, listed)
    certificate = files_of(member).certificate
    assert certificate is not None and member.cluster.path is not None
    certificate.write_bytes(pem)
    member.cluster.path.write_text(config.path.read_text() if config.path else "")
    return pem

"""Certificates outside their time are refused in one sentence, before anybody connects."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta, tzinfo
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest
from cryptography import x509

from collapipe_flwr.core.errors import ConfigError, LinkError
from collapipe_flwr.core.links import TlsFiles
from collapipe_flwr.transport import certificates, methods, tls
from collapipe_flwr.transport.certificates import Authority, sign_all
from collapipe_flwr.transport.connection import Connection
from collapipe_flwr.transport.diagnosis import diagnose
from collapipe_flwr.transport.tls import check_validity, read_validity


@pytest.mark.parametrize("days", [1, 825, 36_500])  # the last ends after 2049, written otherwise
def test_the_dates_are_those_that_a_library_reads(tmp_path: Path, days: int) -> None:
    pem = sign_all(tmp_path, {"pi-1": ["10.0.0.11"]}, days=days)["pi-1"].certificate.read_bytes()
    known = x509.load_pem_x509_certificate(pem)
    assert read_validity(pem) == (known.not_valid_before_utc, known.not_valid_after_utc)


def test_before_and_after_its_time_a_certificate_is_refused_with_the_way_out(tmp_path: Path):
    pem = sign_all(tmp_path, {"pi-1": []}, days=10)["pi-1"].certificate.read_bytes()
    now = datetime.now(UTC)
    check_validity("pi-1.pem", pem, now)
    with pytest.raises(ConfigError, match=r"pi-1.pem expired on 20.*collapipe certs --renew"):
        check_validity("pi-1.pem", pem, now + timedelta(days=11))
    with pytest.raises(ConfigError, match=r"pi-1.pem holds from 20.*timedatectl"):
        check_validity("pi-1.pem", pem, now - timedelta(days=2))


def test_neither_end_of_a_link_starts_with_an_expired_certificate(tmp_path: Path, monkeypatch):
    files = sign_all(tmp_path, {"pi-1": []}, days=10)["pi-1"]
    late = datetime.now(UTC) + timedelta(days=11)
    monkeypatch.setattr(tls, "_read_clock", lambda: late)
    for credentials in (tls.build_server_credentials, tls.build_client_credentials):
        with pytest.raises(ConfigError, match="expired on"):
            credentials(files)


def _made(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch, days: int) -> TlsFiles:
    """The files of a member whose certificate was made in so many days, for ten."""

    class Shifted(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:
            return datetime.now(tz) + timedelta(days=days)

    with monkeypatch.context() as then:
        shifted = SimpleNamespace(datetime=Shifted, timedelta=timedelta, UTC=UTC)
        then.setattr(certificates, "datetime", shifted)
        return Authority(folder, days=10).issue(name, ["127.0.0.1"])


@pytest.mark.parametrize(
    ("days", "said"), [(-30, "its certificate is not valid any more"), (30, "is not valid yet")]
)
def test_a_peers_certificate_that_is_out_of_date_by_this_clock_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, days: int, said: str
) -> None:
    ours = sign_all(tmp_path, {"cu": []})["cu"]
    theirs = _made(tmp_path, "pi-1", monkeypatch, days)
    with (
        _listening(theirs, monkeypatch) as address,
        Connection(address, what="pi-1", tls=ours) as connection,
        pytest.raises(LinkError, match=f"{said}: this machine's clock says 20.*timedatectl"),
    ):
        connection.call(methods.STATUS)


@pytest.mark.parametrize("days", [-30, 30])
def test_a_host_whose_clock_refuses_this_machine_is_told_from_a_silent_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, days: int
) -> None:
    theirs = sign_all(tmp_path, {"pi-1": ["127.0.0.1"]})["pi-1"]
    ours = _made(tmp_path, "cu", monkeypatch, days)
    good = sign_all(tmp_path, {"edge": []})["edge"]
    with _listening(theirs, monkeypatch) as address:
        said = diagnose(address, "pi-1", ours)
        assert "it refuses the certificate of this machine, which holds from 20" in said
        assert "see that its clock is between these" in said
        assert "refuses" not in diagnose(address, "pi-1", good)


@contextmanager
def _listening(files: TlsFiles, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A server whose certificate nobody checks before it starts."""
    monkeypatch.setattr(tls, "check_validity", lambda *_: None)
    server = grpc.server(ThreadPoolExecutor(1))
    address = tls.bind(server, "127.0.0.1:0", files)
    server.start()
    try:
        yield address
    finally:
        server.stop(0).wait()


@pytest.mark.parametrize(
    "pem",
    [
        b"",
        b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----",
        b"-----BEGIN CERTIFICATE-----\nMIIBeTCC\n-----END CERTIFICATE-----",
        b"-----BEGIN CERTIFICATE-----\n=\n-----END CERTIFICATE-----",
    ],
)
def test_what_is_no_certificate_is_named(pem: bytes) -> None:
    with pytest.raises(ConfigError, match=r"pi-1.pem is no certificate"):
        check_validity("pi-1.pem", pem, datetime.now(UTC))

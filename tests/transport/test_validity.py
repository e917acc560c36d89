"""Certificates outside their time are refused in one sentence, before anybody connects."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509

from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.transport import tls
from collapipe_flwr.transport.certificates import sign_all
from collapipe_flwr.transport.tls import check_validity, validity_of


@pytest.mark.parametrize("days", [1, 825, 36_500])  # the last ends after 2049, written otherwise
def test_the_dates_are_those_that_a_library_reads(tmp_path: Path, days: int) -> None:
    pem = sign_all(tmp_path, {"pi-1": ["10.0.0.11"]}, days=days)["pi-1"].certificate.read_bytes()
    known = x509.load_pem_x509_certificate(pem)
    assert validity_of(pem) == (known.not_valid_before_utc, known.not_valid_after_utc)


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
    monkeypatch.setattr(tls, "_now", lambda: late)
    for credentials in (tls.server_credentials, tls.client_credentials):
        with pytest.raises(ConfigError, match="expired on"):
            credentials(files)


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

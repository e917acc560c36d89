"""A private certificate authority for one cluster: `ca.pem`, and a certificate per member.

A member's certificate bears its name, which is what peers check, and its host, for clients that
check addresses. Keys are readable by their owner only.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID

from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.core.tls_files import TlsFiles

_CA_DAYS = 3650  # members are renewed under the same CA
_CLOCKS_DIFFER = datetime.timedelta(days=1)  # boards without a clock start in the past
_USES = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]


class Authority:
    """Signs into ``folder``.

    A CA that lies in the folder already goes on signing, so that a new member can join; a
    ``new_ca`` replaces it, and every older certificate is worthless. Raises ConfigError when the
    CA's key is not there.
    """

    def __init__(self, folder: Path, *, days: int = 825, new_ca: bool = False) -> None:
        self.folder = folder
        self.ca = folder / "ca.pem"
        self._days = days
        self._ca_key_path = folder / "ca.key"
        _make_private(folder)
        if new_ca or not (self.ca.exists() or self._ca_key_path.exists()):
            self._make_ca()
        else:
            self._key, self._name = _read_ca(self.ca, self._ca_key_path)

    def member(self, name: str, hosts: Iterable[str] = ()) -> TlsFiles:
        """A new certificate for ``name``, valid for these host names and IP addresses too."""
        files = self.files(name)
        assert files.certificate is not None and files.key is not None
        key = ec.generate_private_key(ec.SECP256R1())
        names = [_general_name(host) for host in dict.fromkeys((name, *hosts))]
        builder = (
            self._builder(_subject(name), key.public_key(), self._days)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.ExtendedKeyUsage(_USES), critical=False)
        )
        _write(files.key, _private_pem(key), 0o600)
        _write(files.certificate, _pem(builder.sign(self._key, hashes.SHA256())), 0o644)
        return files

    def files(self, name: str) -> TlsFiles:
        """Where those of a member are."""
        return TlsFiles(
            ca=self.ca, certificate=self.folder / f"{name}.pem", key=self.folder / f"{name}.key"
        )

    def _make_ca(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _subject(f"CollaPipe CA {x509.random_serial_number() % 10**6:06d}")
        usage = x509.KeyUsage(
            digital_signature=True,
            key_cert_sign=True,
            crl_sign=True,
            content_commitment=False,
            key_encipherment=False,
            data_encipherment=False,
            key_agreement=False,
            encipher_only=False,
            decipher_only=False,
        )
        builder = (
            self._builder(self._name, self._key.public_key(), max(self._days, _CA_DAYS))
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
        )
        _write(self._ca_key_path, _private_pem(self._key), 0o600)
        _write(self.ca, _pem(builder.sign(self._key, hashes.SHA256())), 0o644)

    def _builder(
        self, subject: x509.Name, public_key: ec.EllipticCurvePublicKey, days: int
    ) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(public_key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _CLOCKS_DIFFER)
            .not_valid_after(now + datetime.timedelta(days=days))
        )


def sign_all(
    folder: Path,
    members: Mapping[str, Iterable[str]],
    *,
    days: int = 825,
    renew: bool = False,
    new_ca: bool = False,
) -> dict[str, TlsFiles]:
    """Certificates for ``members`` (name to hosts); the answer names those that were made.

    Who has one keeps it, unless it is to ``renew``, or a ``new_ca`` makes the old ones worthless.
    """
    authority = Authority(folder, days=days, new_ca=new_ca)
    return {
        name: authority.member(name, hosts)
        for name, hosts in members.items()
        if renew or new_ca or not all(path.exists() for path in _pair(authority.files(name)))
    }


def _pair(files: TlsFiles) -> tuple[Path, Path]:
    assert files.certificate is not None and files.key is not None
    return files.certificate, files.key


def _subject(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host.strip("[]")))
    except ValueError:
        return x509.DNSName(host)


def _read_ca(certificate: Path, key: Path) -> tuple[ec.EllipticCurvePrivateKey, x509.Name]:
    missing = [path for path in (certificate, key) if not path.exists()]
    if missing:
        raise ConfigError(
            f"{missing[0]} is missing, so the CA in {certificate.parent} cannot sign: bring it "
            "back, choose another folder, or make a new CA with --new-ca"
        )
    try:
        found = x509.load_pem_x509_certificate(certificate.read_bytes())
        private = serialization.load_pem_private_key(key.read_bytes(), password=None)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the CA in {certificate.parent} cannot be read: {error}") from error
    if not isinstance(private, ec.EllipticCurvePrivateKey):
        raise ConfigError(f"{key} is no key of `collapipe certs`: choose another folder")
    return private, found.subject


def _make_private(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make the folder {folder}: {error.strerror}") from error


def _write(path: Path, data: bytes, mode: int) -> None:
    """Never readable by others for a moment, as a chmod after writing would be."""
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as stream:
        stream.write(data)


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _private_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )

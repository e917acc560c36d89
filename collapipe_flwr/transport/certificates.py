"""A private certificate authority for one cluster: `ca.pem`, and a certificate per member.

A member's certificate bears its name as common name, by which hosts know a caller, and among its
alternative names with its hosts, where clients look. Keys are readable by their owner only.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID

from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.core.tls_files import TlsFiles
from collapipe_flwr.transport.certificate_names import (
    AUTHORITY,
    check_names,
    general_name,
    names_in,
)
from collapipe_flwr.transport.key_pair import check_pair, replace_pair

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
        self.ca = folder / f"{AUTHORITY}.pem"
        self._days = days
        self._ca_key_path = folder / f"{AUTHORITY}.key"
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
        names = [general_name(host) for host in dict.fromkeys((name, *hosts))]
        builder = (
            self._builder(_subject(name), key.public_key(), self._days)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.ExtendedKeyUsage(_USES), critical=False)
        )
        signed = builder.sign(self._key, hashes.SHA256())
        replace_pair(files.key, _private_pem(key), files.certificate, _pem(signed))
        return files

    def check(self, name: str) -> None:
        """Raise ConfigError when a member's files are not a pair that this CA signed."""
        files = self.files(name)
        assert files.certificate is not None and files.key is not None
        way_out = f"make both anew with --renew, and bring them to {name}"
        check_pair(files.certificate, files.key, way_out)
        try:
            certificate = x509.load_pem_x509_certificate(files.certificate.read_bytes())
            certificate.verify_directly_issued_by(
                x509.load_pem_x509_certificate(self.ca.read_bytes())
            )
        except (ValueError, TypeError, InvalidSignature) as error:
            raise ConfigError(
                f"{files.certificate} was not signed by {self.ca}: {way_out}"
            ) from error

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
        signed = builder.sign(self._key, hashes.SHA256())
        replace_pair(self._ca_key_path, _private_pem(self._key), self.ca, _pem(signed))

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
    Raises ConfigError for names that would let one pass as another, and for files that a run
    which broke off, or somebody's hand, left unfit.
    """
    anew = renew or new_ca
    signed = {} if new_ca else names_in(folder)
    check_names(members, {n: h for n, h in signed.items() if not (renew and n in members)})
    authority = Authority(folder, days=days, new_ca=new_ca)
    wanted = {
        name: hosts
        for name, hosts in members.items()
        if anew or not all(path.exists() for path in _pair(authority.files(name)))
    }
    for name in members.keys() - wanted.keys():
        authority.check(name)
    return {name: authority.member(name, hosts) for name, hosts in wanted.items()}


def _pair(files: TlsFiles) -> tuple[Path, Path]:
    assert files.certificate is not None and files.key is not None
    return files.certificate, files.key


def _subject(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])


def _read_ca(certificate: Path, key: Path) -> tuple[ec.EllipticCurvePrivateKey, x509.Name]:
    missing = [path for path in (certificate, key) if not path.exists()]
    if missing:
        raise ConfigError(
            f"{missing[0]} is missing, so the CA in {certificate.parent} cannot sign: bring it "
            "back, choose another folder, or make a new CA with --new-ca"
        )
    check_pair(certificate, key, "bring back those that belong together, or use --new-ca")
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


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _private_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )

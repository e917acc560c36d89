"""A private certificate authority for one cluster: `ca.pem`, and a certificate per member.

A certificate has its member's name as common name, which identifies a caller (`authorizer`), and
again among its alternative names with its hosts, which identify a server: a client looks for the
wanted host among all names of the certificate, ignoring case and a final dot. So no machine's host
may have the name of another member. Keys are readable by their owner only.
"""

from __future__ import annotations

import datetime
import ipaddress
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID

from collapipe_flwr.config.cluster_file import MEMBER_NAME
from collapipe_flwr.core.durable import draft, make_own_folder, publish, sync, write_file
from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.core.links import TlsFiles, is_slip
from collapipe_flwr.transport.tls import check_pair

AUTHORITY = "ca"
_CA_DAYS = 3650  # members are renewed under the same CA
_CLOCKS_DIFFER = datetime.timedelta(days=1)  # boards without a clock start in the past
_BEFORE_THIS = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
_USES = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
_HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,252}")
Hosts = Mapping[str, Iterable[str]]


class Authority:
    """The CA in ``folder``, which is made if it is missing or a ``new_ca`` is wanted.

    A new CA makes all older certificates worthless. Raises ConfigError when the CA's key is
    missing, and when the clock, which dates certificates, is wrong.
    """

    def __init__(self, folder: Path, *, days: int = 825, new_ca: bool = False) -> None:
        _check_clock()
        self.folder = make_own_folder(folder, "the folder")
        self.ca, key_path = self.locate_pair(AUTHORITY)
        self._days = days
        if new_ca or not (self.ca.exists() or key_path.exists()):
            self._make_ca()
        else:
            self._key, self._name = _read_ca(self.ca, key_path)

    def issue(self, name: str, hosts: Iterable[str] = ()) -> TlsFiles:
        """Make a certificate for ``name``, valid for these host names and IP addresses too."""
        key = ec.generate_private_key(ec.SECP256R1())
        self._write(name, self._build(name, hosts, key.public_key()), key)
        return self.locate_files(name)

    def certify_key(self, name: str, hosts: Iterable[str], key: ec.EllipticCurvePublicKey) -> bytes:
        """Certify a key in PEM, whose private half stays where it was made; a copy is kept here."""
        signed = self._build(name, hosts, key).sign(self._key, hashes.SHA256())
        pem = signed.public_bytes(serialization.Encoding.PEM)
        write_file(self.locate_pair(name)[0], lambda path: path.write_bytes(pem))
        return pem

    def sign(self, data: bytes) -> bytes:
        """Sign by the CA's key; members verify it."""
        return self._key.sign(data, ec.ECDSA(hashes.SHA256()))

    def _build(
        self, name: str, hosts: Iterable[str], key: ec.EllipticCurvePublicKey
    ) -> x509.CertificateBuilder:
        names = [
            x509.IPAddress(address) if (address := _parse_address(host)) else x509.DNSName(host)
            for host in dict.fromkeys((name, *hosts))
        ]
        return (
            self._begin(_make_subject(name), key, self._days)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.ExtendedKeyUsage(_USES), critical=False)
        )

    def check(self, name: str) -> None:
        """Raise ConfigError when a member's files are not a pair that this CA signed."""
        path, key = self.locate_pair(name)
        way_out = f"make both anew with --renew, and bring them to {name}"
        check_pair(path, key, way_out)
        try:
            certificate = x509.load_pem_x509_certificate(path.read_bytes())
            certificate.verify_directly_issued_by(
                x509.load_pem_x509_certificate(self.ca.read_bytes())
            )
        except (ValueError, TypeError, InvalidSignature) as error:
            raise ConfigError(f"{path} was not signed by {self.ca}: {way_out}") from error

    def locate_pair(self, name: str) -> tuple[Path, Path]:
        """Return the paths of a member's certificate and key."""
        return self.folder / f"{name}.pem", self.folder / f"{name}.key"

    def locate_files(self, name: str) -> TlsFiles:
        certificate, key = self.locate_pair(name)
        return TlsFiles(ca=self.ca, certificate=certificate, key=key)

    def _make_ca(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _make_subject(f"CollaPipe CA {x509.random_serial_number() % 10**6:06d}")
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
            self._begin(self._name, self._key.public_key(), max(self._days, _CA_DAYS))
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
        )
        self._write(AUTHORITY, builder, self._key)

    def _write(
        self, name: str, builder: x509.CertificateBuilder, key: ec.EllipticCurvePrivateKey
    ) -> None:
        """Sign, and write the certificate and its key."""
        pem = serialization.Encoding.PEM
        private = serialization.PrivateFormat.PKCS8
        key_pem = key.private_bytes(pem, private, serialization.NoEncryption())
        signed = builder.sign(self._key, hashes.SHA256())
        certificate_path, key_path = self.locate_pair(name)
        replace_pair(key_path, key_pem, certificate_path, signed.public_bytes(pem))

    def _begin(
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
    members: Hosts,
    *,
    days: int = 825,
    renew: bool = False,
    new_ca: bool = False,
) -> dict[str, TlsFiles]:
    """Make the missing certificates of ``members`` (name to hosts), and return those.

    With ``renew`` or ``new_ca`` all are replaced. Raises ConfigError for names by which one member
    could pass as another, and for files that are no pair or not of this CA.
    """
    anew = renew or new_ca
    signed = {} if new_ca else list_names(folder)
    check_names(members, {n: h for n, h in signed.items() if not (renew and n in members)})
    authority = Authority(folder, days=days, new_ca=new_ca)
    wanted = {
        name: hosts
        for name, hosts in members.items()
        if anew or not all(path.exists() for path in authority.locate_pair(name))
    }
    for name in members.keys() - wanted.keys():
        authority.check(name)
    return {name: authority.issue(name, hosts) for name, hosts in wanted.items()}


def check_names(members: Hosts, signed: Hosts) -> None:
    """Check ``members`` (name to hosts), to be signed, against those that are ``signed`` already.

    Raises ConfigError when two names cannot be told apart, or when one could pass as another.
    """
    for name, hosts in members.items():
        if not MEMBER_NAME.holds(name) or name.casefold() == AUTHORITY:
            what = f"{MEMBER_NAME.says}, and not {AUTHORITY!r}, whose files are the CA's own"
            raise ConfigError(f"a member cannot be called {name[:80]!r}: its name {what}")
        for host in hosts:
            if _parse_address(host) is None and (is_slip(host) or not _HOST.fullmatch(host)):
                raise ConfigError(
                    f"{name} is reached at {host[:80]!r}: give an IP address or a host name"
                )
    bearers = {_normalize(name): name for name in signed} | {_normalize(n): n for n in members}
    for name in (*signed, *members):
        other = bearers[_normalize(name)]
        if other != name:
            raise ConfigError(
                f"the names {other!r} and {name!r} cannot be told apart in certificates and on "
                "every disk: rename one of these members"
            )
    for name, hosts in members.items():
        for host in hosts:
            if bearers.get(_normalize(host), name) != name:
                raise ConfigError(
                    f"{name} is reached at {host!r}, which is the name of another member, so it "
                    f"would pass as that one: reach {name} by its IP address or another host name, "
                    "or rename that member"
                )
    for name, hosts in signed.items():
        for host in hosts:
            bearer = bearers.get(_normalize(host), name)
            if bearer != name and bearer in members:
                raise ConfigError(
                    f"{name}.pem, which was signed here, is valid for the host {host!r}: its "
                    f"holder would pass as {bearer}; rename that member, or make a new CA with "
                    "--new-ca"
                )


def list_names(folder: Path) -> dict[str, tuple[str, ...]]:
    """Return the members with a certificate in a folder, and the hosts it is valid for."""
    paths = (path for path in sorted(folder.glob("*.pem")) if path.stem != AUTHORITY)
    return {path.stem: hosts for path in paths if (hosts := _read_hosts(path)) is not None}


def replace_pair(key: Path, key_pem: bytes, certificate: Path, certificate_pem: bytes) -> None:
    """Replace both files; the key is readable by its owner only. Raises OSError.

    Both are complete on disk before the first of them is renamed. So a crash leaves the old pair,
    the new pair, or two files that do not belong together, which `check_pair` finds.
    """
    with draft(key) as new_key, draft(certificate) as new_certificate:
        new_key.touch(0o600)
        new_key.write_bytes(key_pem)
        new_certificate.write_bytes(certificate_pem)
        sync(new_key)
        sync(new_certificate)
        publish(new_key, key)
        publish(new_certificate, certificate)


def _check_clock() -> None:
    """Raise ConfigError if the clock is before this program was written, as without a battery."""
    now = datetime.datetime.now(datetime.UTC)
    if now < _BEFORE_THIS:
        raise ConfigError(
            f"this machine's clock says {now:%Y-%m-%d}, and certificates that are made now would "
            "be worthless once it is right: set it (`timedatectl`)"
        )


def _make_subject(name: str) -> x509.Name:
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


def _normalize(host: str) -> str:
    """Return one form for all spellings of a host that a client treats as the same."""
    address = _parse_address(host)
    return host.casefold().rstrip(".") if address is None else str(address)


def is_ip_address(name: str) -> bool:
    """Return whether a certificate would name it as an IP address."""
    return _parse_address(name) is not None


def _parse_address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return None


def _read_hosts(path: Path) -> tuple[str, ...] | None:
    """Read the hosts of a certificate; None for a file that is no certificate."""
    try:
        pem = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    try:
        certificate = x509.load_pem_x509_certificate(pem)
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except ValueError:
        return None
    except x509.ExtensionNotFound:
        return ()
    addresses = names.get_values_for_type(x509.IPAddress)
    return (*names.get_values_for_type(x509.DNSName), *map(str, addresses))

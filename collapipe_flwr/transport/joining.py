"""Joining of a machine without a certificate: its messages, the CA that it trusts, and its key.

It trusts only the CA whose fingerprint is in its token. Its key never leaves it: it sends a signing
request, and checks the certificate that comes back.
"""

from __future__ import annotations

import hmac
import socket
import ssl
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from collapipe_flwr.core import bounds
from collapipe_flwr.core.durable import write_private
from collapipe_flwr.core.errors import ConfigError, LinkError, ProtocolError, Unreachable
from collapipe_flwr.core.links import split_address
from collapipe_flwr.transport.methods import Method
from collapipe_flwr.transport.roster import Roster
from collapipe_flwr.transport.tls import make_trusting_context

JOIN = Method("Join", service="collapipe.Joining")
_MOST_PEM = 8192  # characters of a signing request
_PEM = serialization.Encoding.PEM


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinRequest:
    """A machine that asks to join; figures of 0 were not measured, ``kind`` may be empty.

    ``address`` is where it listens (empty: nowhere, for a machine that ``dials``), ``unix_s`` its
    clock, ``version`` that of its CollaPipe. With ``only_asks`` it asks whether it would be
    admitted: a refusal is the only answer.
    """

    secret: bounds.Text = field(repr=False)  # of its token, in hexadecimal
    name: bounds.MemberName
    request_pem: Annotated[str, bounds.most_entries(_MOST_PEM)]
    unix_s: bounds.Moment
    address: bounds.Address = ""
    dials: bool = False
    kind: bounds.Text = ""
    speed_flop_per_s: bounds.SpeedOrNone = 0.0
    overhead_s: bounds.Overhead = 0.0
    memory_bytes: bounds.Bytes = 0
    version: bounds.Text = ""
    only_asks: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinAnswer:
    """The newcomer's certificate, and the roster of the cluster that it has joined."""

    cluster_id: str
    role: str
    certificate_pem: str
    roster: Roster


def fetch_pinned_ca(address: str, pin: bytes, deadline_s: float) -> bytes:
    """Return the CA certificate in PEM with SHA-256 ``pin``, from the chain a server shows.

    Nothing is sent, because anybody can show that certificate; TLS verified by it comes next.
    Raises LinkError when nobody answers, or the CA is another one.
    """
    place = split_address(address)
    try:
        with (
            socket.create_connection(place, deadline_s) as peer,
            make_trusting_context().wrap_socket(peer) as shaken,
        ):
            chain = _read_chain(shaken)
    except (OSError, OverflowError) as error:
        raise Unreachable(
            f"no control unit answers at {address} ({error}): see that `collapipe cluster serve` "
            "runs there and that the firewall lets the port through"
        ) from error
    for der in chain:
        if hmac.compare_digest(sha256(der).digest(), pin):
            return ssl.DER_cert_to_PEM_cert(der).encode()
    raise LinkError(
        f"the machine at {address} is not of the CA that the token names, so nothing was sent: "
        "print a token on the present control unit, or find out which machine is in between"
    )


def _read_chain(shaken: ssl.SSLSocket) -> list[bytes]:
    """Return the chain that the peer showed, in DER; Python 3.13 has a public method."""
    if hasattr(shaken, "get_unverified_chain"):
        return list(shaken.get_unverified_chain())
    inner: Any = shaken._sslobj  # type: ignore[attr-defined]
    return [
        ssl.PEM_cert_to_DER_cert(shown.public_bytes()) for shown in inner.get_unverified_chain()
    ]


def load_or_make_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """Read the key in ``path``, or make one there that only its owner can read.

    Raises ConfigError for a file that holds no such key.
    """
    if not path.exists():
        made = ec.generate_private_key(ec.SECP256R1())
        plain = serialization.NoEncryption()
        write_private(path, made.private_bytes(_PEM, serialization.PrivateFormat.PKCS8, plain))
        return made
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), password=None)
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"the key {path} cannot be read: delete it to make another") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ConfigError(f"{path} is no key of `collapipe`: choose another folder")
    return key


def make_request(name: str, key: ec.EllipticCurvePrivateKey) -> str:
    """Make a certificate signing request in PEM, which proves possession of ``key``."""
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    request = x509.CertificateSigningRequestBuilder().subject_name(subject)
    return request.sign(key, hashes.SHA256()).public_bytes(_PEM).decode()


def extract_request_key(pem: str) -> ec.EllipticCurvePublicKey:
    """Return the key in a signing request; raises ProtocolError if it did not sign it.

    Names in the request are ignored: the signer decides them.
    """
    try:
        request = x509.load_pem_x509_csr(pem.encode())
        key = request.public_key()
        sound = request.is_signature_valid
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ProtocolError("the signing request cannot be read") from error
    if not sound or not isinstance(key, ec.EllipticCurvePublicKey):
        raise ProtocolError("the signing request was not signed by its own key on a P-256 curve")
    if not isinstance(key.curve, ec.SECP256R1):
        raise ProtocolError("the signing request has a key of another curve than P-256")
    return key


def extract_key(pem: bytes) -> bytes:
    """Return the public key in a certificate, as `encode_public_key` gives it."""
    return encode_public_key(x509.load_pem_x509_certificate(pem).public_key())


def extract_keys(pems: bytes) -> list[bytes]:
    """Return the public keys in several certificates, as `encode_public_key` gives them."""
    return [
        encode_public_key(found.public_key()) for found in x509.load_pem_x509_certificates(pems)
    ]


def encode_public_key(key: object) -> bytes:
    """Return a public key as bytes that can be compared."""
    assert isinstance(key, ec.EllipticCurvePublicKey)
    return key.public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )


def check_signed(pem: str, name: str, key: bytes, ca_pem: bytes) -> None:
    """Raise ProtocolError unless ``pem`` certifies this name and public key under this CA."""
    try:
        found = x509.load_pem_x509_certificate(pem.encode())
        found.verify_directly_issued_by(x509.load_pem_x509_certificate(ca_pem))
        (shown,) = found.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)
        fits = encode_public_key(found.public_key()) == key
    except (ValueError, TypeError, AssertionError, InvalidSignature) as error:
        raise ProtocolError("the certificate that came back is not of this CA") from error
    if not fits or shown.value != name:
        raise ProtocolError("the certificate that came back is for another name or key")

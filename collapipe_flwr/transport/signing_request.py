"""Keys that stay where they are made: a request to sign them, and a check of what came back."""

from __future__ import annotations

from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from collapipe_flwr.core.durable import write_private
from collapipe_flwr.core.errors import ConfigError, ProtocolError

_PEM = serialization.Encoding.PEM


def own_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """The key in ``path``; a new one that only its owner can read where there is none.

    Raises ConfigError for a file that holds no such key.
    """
    if path.exists():
        return _read_key(path)
    key = ec.generate_private_key(ec.SECP256R1())
    plain = serialization.NoEncryption()
    pem = key.private_bytes(_PEM, serialization.PrivateFormat.PKCS8, plain)
    write_private(path, pem)
    return key


def _read_key(path: Path) -> ec.EllipticCurvePrivateKey:
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), password=None)
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"the key {path} cannot be read: delete it to make another") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ConfigError(f"{path} is no key of `collapipe`: choose another folder")
    return key


def request_for(name: str, key: ec.EllipticCurvePrivateKey) -> str:
    """A certificate signing request in PEM, by which the bearer of ``key`` proves that it is."""
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    request = x509.CertificateSigningRequestBuilder().subject_name(subject)
    return request.sign(key, hashes.SHA256()).public_bytes(_PEM).decode()


def key_in_request(pem: str) -> ec.EllipticCurvePublicKey:
    """The key that a request asks to sign; raises ProtocolError for one that is not its bearer's.

    Names in it do not count: who may be called how is decided by who signs.
    """
    try:
        request = x509.load_pem_x509_csr(pem.encode())
        key = request.public_key()
        sound = request.is_signature_valid
    except (ValueError, TypeError) as error:
        raise ProtocolError("the signing request cannot be read") from error
    if not sound or not isinstance(key, ec.EllipticCurvePublicKey):
        raise ProtocolError("the signing request was not signed by its own key on a P-256 curve")
    if not isinstance(key.curve, ec.SECP256R1):
        raise ProtocolError("the signing request has a key of another curve than P-256")
    return key


def key_in_certificate(pem: bytes) -> bytes:
    """The public key that a certificate is about, as `public_bytes` gives it."""
    return public_bytes(x509.load_pem_x509_certificate(pem).public_key())


def public_bytes(key: object) -> bytes:
    """A public key as bytes that can be compared."""
    assert isinstance(key, ec.EllipticCurvePublicKey)
    return key.public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )


def check_signed(pem: str, name: str, key: ec.EllipticCurvePrivateKey, ca_pem: bytes) -> None:
    """Raise ProtocolError unless ``pem`` certifies this name and key under this CA."""
    try:
        found = x509.load_pem_x509_certificate(pem.encode())
        found.verify_directly_issued_by(x509.load_pem_x509_certificate(ca_pem))
        (shown,) = found.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)
        fits = public_bytes(found.public_key()) == public_bytes(key.public_key())
    except (ValueError, TypeError, AssertionError, InvalidSignature) as error:
        raise ProtocolError("the certificate that came back is none of this CA") from error
    if not fits or shown.value != name:
        raise ProtocolError("the certificate that came back is for another name or key")

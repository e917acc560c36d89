"""Diagnosis of a host that listens but does not accept our calls: its certificate, or ours."""

from __future__ import annotations

import socket
import ssl
from contextlib import suppress
from datetime import UTC, datetime

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.x509.oid import NameOID

from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.core.links import TlsFiles, split_address
from collapipe_flwr.transport.tls import (
    NOT_DIALLED,
    UNRECOGNIZED_NAME,
    make_trusting_context,
    read_validity,
)

_CONNECT_S = 3.0
_MEND = "`collapipe certs`"
_SILENT = "it listens, but does not answer: see its log"


def diagnose(address: str, name: str, tls: TlsFiles | None) -> str:
    """Say in one sentence what to fix; return "" where nobody listens at ``address``.

    The host's certificate must bear ``name``; the host is shown the certificate of ``tls``.
    """
    try:
        with socket.create_connection(split_address(address), _CONNECT_S) as peer:
            return _try_tls(peer) if tls is None else _check_handshake(peer, name, tls)
    except OSError:
        return ""


def _try_tls(peer: socket.socket) -> str:
    try:
        with make_trusting_context().wrap_socket(peer):
            return "it speaks TLS and the cluster file has no [tls]: add it, or start it without"
    except OSError:
        return _SILENT


def _check_handshake(peer: socket.socket, name: str, tls: TlsFiles) -> str:
    """Shake hands with any certificate, then check it."""
    assert tls.ca is not None and tls.certificate is not None and tls.key is not None
    context = make_trusting_context()
    try:
        context.load_cert_chain(tls.certificate, tls.key)
        ca = x509.load_pem_x509_certificate(tls.ca.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"the certificates here cannot be used: {error}") from error
    try:
        with context.wrap_socket(peer, server_hostname=name) as shaken:
            shown = shaken.getpeercert(binary_form=True)
            fault = _judge(x509.load_der_x509_certificate(shown or b""), name, ca)
            return fault or _explain_refusal(shaken, tls.certificate.read_bytes())
    except (OSError, ValueError) as error:
        if UNRECOGNIZED_NAME in str(error):
            return NOT_DIALLED
        return "it does not speak TLS: start it with a cluster file that has [tls], or --tls-ca ..."


def _judge(certificate: x509.Certificate, name: str, ca: x509.Certificate) -> str:
    now, names = datetime.now(UTC), _list_names(certificate)
    begins, ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    try:
        certificate.verify_directly_issued_by(ca)
    except (ValueError, TypeError, InvalidSignature):
        return f"its certificate was signed by another CA: give it the files that {_MEND} made here"
    if now > ends:
        return (
            f"its certificate expired on {ends:%Y-%m-%d}, and this machine's clock says "
            f"{now:%Y-%m-%d}: make a new one with {_MEND} --renew, or set the clock if that is in "
            "the future (`timedatectl`)"
        )
    if now < begins:
        return (
            f"its certificate holds from {begins:%Y-%m-%d} on, and this machine's clock says "
            f"{now:%Y-%m-%d}: set it (`timedatectl`)"
        )
    if name not in names:
        return (
            f"its certificate names {', '.join(names)}, not {name}: give it {name}.pem and "
            f"{name}.key, which {_MEND} makes"
        )
    return ""


def _explain_refusal(shaken: ssl.SSLSocket, ours_pem: bytes) -> str:
    """Explain how the host took our certificate, which it judges after the handshake in TLS 1.3.

    A host that accepts it speaks first. A host that refuses it hangs up without a reason, as gRPC
    does.
    """
    try:
        if shaken.recv(1):
            return _SILENT
    except TimeoutError:
        return _SILENT
    except OSError:
        pass
    begins, ends = read_validity(ours_pem)
    return (
        f"it refuses the certificate of this machine, which holds from {begins:%Y-%m-%d} to "
        f"{ends:%Y-%m-%d}: see that its clock is between these (`timedatectl`; this machine's says "
        f"{datetime.now(UTC):%Y-%m-%d}), and that both have the same ca.pem"
    )


def _list_names(certificate: x509.Certificate) -> tuple[str, ...]:
    common = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    found = [str(entry.value) for entry in common]
    with suppress(x509.ExtensionNotFound):
        other = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        found += other.get_values_for_type(x509.DNSName)
    return tuple(dict.fromkeys(found))

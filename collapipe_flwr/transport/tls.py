"""gRPC credentials from PEM files: TLS, and mutual TLS where both sides show certificates.

The validity of a certificate is parsed here, without the package `cryptography`, because a daemon
that waits should hold little memory and needs two dates only. They are in ASN.1 (X.690): a tag, a
length, the content; the certificate's first element has an optional version, serial number,
algorithm, issuer and then the two times.
"""

from __future__ import annotations

import base64
import binascii
import logging
import re
import socket
import ssl
from collections.abc import Iterator
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path

import grpc

from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.core.links import TlsFiles
from collapipe_flwr.transport.methods import Options

_log = logging.getLogger(__name__)
_ANEW = (
    "take both from one run of `collapipe certs`, or make both anew by `collapipe certs --renew`"
)
_PEM = re.compile(rb"-----BEGIN CERTIFICATE-----(.+?)-----END CERTIFICATE-----", re.DOTALL)
_VERSION, _UTC_TIME = 0xA0, 0x17
UNRECOGNIZED_NAME = "UNRECOGNIZED_NAME"  # in the words of a TLS library that a relay sent away
NOT_DIALLED = (
    "it has not dialled in to its control unit: see that `collapipe device` runs there, and its log"
)


def build_server_credentials(files: TlsFiles) -> grpc.ServerCredentials:
    """Build the credentials of a server, which shows later renewals of its certificate, too.

    Raises ConfigError when a file is missing or out of date, or the key is another certificate's.
    """
    certificate, key = files.certificate, files.key
    if certificate is None or key is None:
        raise ConfigError("a TLS server needs a certificate and a key")
    ca = None if files.ca is None else _read_certificate(files.ca)
    shown = [_read_pair(certificate, key)]

    def newer() -> grpc.ServerCertificateConfiguration | None:
        """Read the files before a handshake; None where nothing is new, or nothing is usable."""
        try:
            if certificate.read_bytes() == shown[0][1]:
                return None
            shown[0] = _read_pair(certificate, key)
        except (ConfigError, OSError) as error:
            _log.warning("an older certificate is shown: %s", error)
            return None
        return grpc.ssl_server_certificate_configuration(shown, ca)

    return grpc.dynamic_ssl_server_credentials(
        grpc.ssl_server_certificate_configuration(shown, ca),
        newer,
        require_client_authentication=ca is not None,
    )


def build_client_credentials(files: TlsFiles) -> grpc.ChannelCredentials:
    """Build the credentials of a client; raises ConfigError as those of a server."""
    if files.ca is None:
        raise ConfigError("a TLS client needs the CA certificate that signed its servers")
    if (files.certificate is None) != (files.key is None):
        raise ConfigError("a client certificate and its key go together; one of them is missing")
    ca = _read_certificate(files.ca)
    if files.certificate is None or files.key is None:
        return grpc.ssl_channel_credentials(ca)
    return grpc.ssl_channel_credentials(ca, *_read_pair(files.certificate, files.key))


def bind(server: grpc.Server, listen: str, tls: TlsFiles | None) -> str:
    """Bind ``server``, in plain text without ``tls``; return the address with the real port.

    Raises ConfigError when the port is taken or the host is not ours.
    """
    _check_free(listen)
    host = listen.rpartition(":")[0]
    try:
        if tls is None:
            port = server.add_insecure_port(listen)
        else:
            port = server.add_secure_port(listen, build_server_credentials(tls))
    except RuntimeError as error:
        raise _explain_listening(listen, str(error)) from error
    return f"{host}:{port}"


def _check_free(listen: str) -> None:
    """Raise ConfigError with the system's reason, which gRPC only logs."""
    host, _, port = listen.rpartition(":")
    try:
        places = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise _explain_listening(listen, error.strerror) from error
    reasons = []
    for family, kind, protocol, _, place in places:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as gRPC does
                probe.bind(place)
            return  # gRPC, too, is content with one of them
        except OSError as error:
            reasons.append(error)
    raise _explain_listening(listen, reasons[0].strerror) from reasons[0]


def _explain_listening(listen: str, why: str | None) -> ConfigError:
    return ConfigError(
        f"cannot listen on {listen} ({why}): choose a free port and an address of this machine"
    )


def open_channel(
    address: str, tls: TlsFiles | None, options: Options | None = None
) -> grpc.Channel:
    """Open a channel to ``address``, in plain text without ``tls``; nothing is sent yet.

    Members reach each other directly: a web proxy of the environment is ignored.
    """
    options = [*(options or []), ("grpc.enable_http_proxy", 0)]
    if tls is None:
        return grpc.insecure_channel(address, options)
    return grpc.secure_channel(address, build_client_credentials(tls), options)


def make_trusting_context() -> ssl.SSLContext:
    """Make a client's context that accepts any certificate, for the caller to judge."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    return context


def check_pair(certificate: Path, key: Path, way_out: str) -> None:
    """Raise ConfigError, whose sentence ends with ``way_out``, when the two are no pair."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_ciphers("ALL:@SECLEVEL=0")  # the strength of the key is not checked here
    try:
        context.load_cert_chain(certificate, key, password="")  # never ask at the terminal
    except ssl.SSLError as error:
        raise ConfigError(
            f"{key} is not the key of {certificate} ({error.reason}): {way_out}"
        ) from error


def read_validity(pem: bytes) -> tuple[datetime, datetime]:
    """Read begin and end of the first certificate in PEM; raises ConfigError without one."""
    der = _decode_pem(pem)
    try:
        ((_, certificate),) = _iterate_elements(der)
        signed = next(content for _, content in _iterate_elements(certificate))
        fields = [(tag, content) for tag, content in _iterate_elements(signed) if tag != _VERSION]
        begins, ends = (
            _parse_moment(tag, content) for tag, content in _iterate_elements(fields[3][1])
        )
    except (IndexError, StopIteration, ValueError) as error:
        raise ConfigError(f"its certificate cannot be read: {error}") from error
    return begins, ends


def _decode_pem(pem: bytes) -> bytes:
    found = _PEM.search(pem)
    if found is None:
        raise ConfigError("no certificate in PEM is in it")
    try:
        return base64.b64decode(found[1])
    except binascii.Error as error:
        raise ConfigError(f"its certificate cannot be read: {error}") from error


def fingerprint(pem: bytes) -> str:
    """Return the SHA-256 of the first certificate in PEM; raises ConfigError without one."""
    return sha256(_decode_pem(pem)).hexdigest()


def is_due(pem: bytes, now: datetime) -> bool:
    """Return whether a certificate has a third of its time left or less, or has ended."""
    begins, ends = read_validity(pem)
    return ends - now <= (ends - begins) / 3


def check_validity(path: str, pem: bytes, now: datetime) -> None:
    """Raise ConfigError when a certificate is not valid ``now``."""
    try:
        begins, ends = read_validity(pem)
    except ConfigError as error:
        raise ConfigError(f"{path} is no certificate: {error}") from error
    if now > ends:
        raise ConfigError(
            f"the certificate {path} expired on {ends:%Y-%m-%d}, and this machine's clock says "
            f"{now:%Y-%m-%d}: make a new one with `collapipe certs --renew` (where members "
            "join by tokens: join again by a new one), or set the clock if that is in the future "
            "(`timedatectl`)"
        )
    if now < begins:
        raise ConfigError(
            f"the certificate {path} holds from {begins:%Y-%m-%d} on, and this machine's "
            f"clock says {now:%Y-%m-%d}: set it (`timedatectl`)"
        )


def _read_pair(certificate: Path, key: Path) -> tuple[bytes, bytes]:
    """Read key and certificate, in gRPC's order."""
    pair = (_read(key), _read_certificate(certificate))
    check_pair(certificate, key, _ANEW)
    return pair


def _read_certificate(path: Path) -> bytes:
    pem = _read(path)
    check_validity(str(path), pem, _read_clock())
    return pem


def _read_clock() -> datetime:
    return datetime.now(UTC)


def _read(path: Path) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(
            f"cannot read {path} ({error.strerror}): `collapipe certs` makes such files, and each "
            "machine needs a copy of its own"
        ) from error


def _iterate_elements(der: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield tag and content of each element in a row."""
    at = 0
    while at < len(der):
        tag, length, at = der[at], der[at + 1], at + 2
        if length & 0x80:
            count = length & 0x7F
            length, at = int.from_bytes(der[at : at + count]), at + count
        if at + length > len(der):
            raise ValueError("it is cut short")
        yield tag, der[at : at + length]
        at += length


def _parse_moment(tag: int, text: bytes) -> datetime:
    """Parse UTCTime, whose two digits mean 1950 to 2049, or GeneralizedTime, which has four."""
    digits = text.decode("ascii")
    if tag == _UTC_TIME:
        digits = ("19" if digits[0] >= "5" else "20") + digits
    return datetime.strptime(digits, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC)

"""gRPC credentials from PEM files: TLS, and mutual TLS where both sides show certificates."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import grpc

from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.core.tls_files import TlsFiles
from collapipe_flwr.transport.key_pair import check_pair
from collapipe_flwr.transport.validity import check_validity

__all__ = ["TlsFiles", "bind", "client_credentials", "open_channel", "server_credentials"]

_ANEW = (
    "take both from one run of `collapipe certs`, or make both anew by `collapipe certs --renew`"
)
PricingOptions = Sequence[tuple[str, object]]


def server_credentials(files: TlsFiles) -> grpc.ServerCredentials:
    """Credentials of a server.

    Raises ConfigError when a file is missing or out of date, or the key is another certificate's.
    """
    if files.certificate is None or files.key is None:
        raise ConfigError("a TLS server needs a certificate and a key")
    pair = _pair(files.certificate, files.key)
    ca = None if files.ca is None else _certificate(files.ca)
    return grpc.ssl_server_credentials([pair], ca, require_client_auth=ca is not None)


def client_credentials(files: TlsFiles) -> grpc.ChannelCredentials:
    """Credentials of a client; raises ConfigError as those of a server."""
    if files.ca is None:
        raise ConfigError("a TLS client needs the CA certificate that signed its servers")
    if (files.certificate is None) != (files.key is None):
        raise ConfigError("a client certificate and its key go together; one of them is missing")
    ca = _certificate(files.ca)
    if files.certificate is None or files.key is None:
        return grpc.ssl_channel_credentials(ca)
    return grpc.ssl_channel_credentials(ca, *_pair(files.certificate, files.key))


def bind(server: grpc.Server, listen: str, tls: TlsFiles | None) -> str:
    """Have ``server`` listen, in plain text without ``tls``; the address with the real port.

    Raises ConfigError when the port is taken or the host is not ours.
    """
    host = listen.rpartition(":")[0]
    try:
        if tls is None:
            port = server.add_insecure_port(listen)
        else:
            port = server.add_secure_port(listen, server_credentials(tls))
    except RuntimeError as error:
        raise ConfigError(
            f"cannot listen on {listen}: is the port taken or the host wrong?"
        ) from error
    return f"{host}:{port}"


def open_channel(address: str, tls: TlsFiles | None, options: PricingOptions = ()) -> grpc.Channel:
    """A channel to ``address``, in plain text without ``tls``; nothing is sent yet."""
    if tls is None:
        return grpc.insecure_channel(address, options)
    return grpc.secure_channel(address, client_credentials(tls), options)


def _pair(certificate: Path, key: Path) -> tuple[bytes, bytes]:
    """Key and certificate, as gRPC orders them."""
    pair = (_read(key), _certificate(certificate))
    check_pair(certificate, key, _ANEW)
    return pair


def _certificate(path: Path) -> bytes:
    pem = _read(path)
    check_validity(str(path), pem, _now())
    return pem


def _now() -> datetime:
    return datetime.now(UTC)


def _read(path: Path) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error

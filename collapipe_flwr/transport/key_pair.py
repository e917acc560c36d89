"""A private key and its certificate are one: written together, checked together.

Two files cannot be renamed at one moment. Both are complete on disk before the first of them takes
its place, so that a crash leaves the old pair, the new pair, or two halves that do not fit, which
``check_pair`` finds.
"""

from __future__ import annotations

import ssl
from pathlib import Path

from collapipe_flwr.core.durable import draft, publish, sync
from collapipe_flwr.core.errors import ConfigError


def replace_pair(key: Path, key_pem: bytes, certificate: Path, certificate_pem: bytes) -> None:
    """Put both in their places; nobody but its owner can ever read the key. Raises OSError."""
    with draft(key) as new_key, draft(certificate) as new_certificate:
        new_key.touch(0o600)
        new_key.write_bytes(key_pem)
        new_certificate.write_bytes(certificate_pem)
        sync(new_key)
        sync(new_certificate)
        publish(new_key, key)
        publish(new_certificate, certificate)


def check_pair(certificate: Path, key: Path, way_out: str) -> None:
    """Raise ConfigError, which ends with the ``way_out``, when they do not belong together."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_ciphers("ALL:@SECLEVEL=0")  # how strong a key must be is not the question here
    try:
        context.load_cert_chain(certificate, key, password="")  # never ask at the terminal
    except ssl.SSLError as error:
        raise ConfigError(
            f"{key} is not the key of {certificate} ({error.reason}): {way_out}"
        ) from error

"""A private key and its certificate are one: written together, checked together.

Two files cannot be renamed at one moment. Both are complete on disk before the first of them takes
its place, so that a crash leaves the old pair, the new pair, or two halves that do not fit, which
``check_pair`` finds.
"""

from __future__ import annotations

import os
import ssl
from pathlib import Path

from collapipe_flwr.core.errors import ConfigError


def replace_pair(key: Path, key_pem: bytes, certificate: Path, certificate_pem: bytes) -> None:
    """Put both in their places; the key is readable by its owner only, from its first byte on."""
    written = [(_written(key, key_pem, 0o600), key)]
    written.append((_written(certificate, certificate_pem, 0o644), certificate))
    for fresh, path in written:
        os.replace(fresh, path)
    _sync_folder(key.parent)


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


def _written(path: Path, data: bytes, mode: int) -> Path:
    fresh = path.with_name(f"{path.name}.new")
    fresh.unlink(missing_ok=True)
    with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
    return fresh


def _sync_folder(folder: Path) -> None:
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)

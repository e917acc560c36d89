"""The socket between a ClientApp and its control unit, accessible to one user only.

It lies in a folder of that user, and both sides verify each other's user id with the kernel.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
from collections.abc import Mapping
from pathlib import Path

from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.federation.node_keys import CLUSTER_KEY, CONTROL_UNIT_KEY

log = logging.getLogger("flwr.collapipe")
VARIABLE = "COLLAPIPE_CONTROL_UNIT"
_SYSTEM = Path("/var/lib/collapipe-control-unit/socket")
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_BACKLOG = 8


def default_path() -> Path:
    """Where a control unit listens by default."""
    named, runtime = os.environ.get(VARIABLE), os.environ.get("XDG_RUNTIME_DIR")
    if named:
        return Path(named).expanduser()
    return Path(runtime) / "collapipe" / "control-unit.sock" if runtime else _SYSTEM


def path_for(node_config: Mapping[str, object]) -> Path | None:
    """Where the control unit of a node would listen, by --node-config or the environment.

    None for an empty name, and for a node without a cluster file that names no control unit. Raises
    ConfigError.
    """
    named = node_config.get(CONTROL_UNIT_KEY)
    if named is not None and not isinstance(named, str):
        raise ConfigError(
            f"node-config {CONTROL_UNIT_KEY} must be the path of a socket, got {named!r}"
        )
    if named is not None:
        return Path(named).expanduser() if named else None
    return default_path() if CLUSTER_KEY in node_config or VARIABLE in os.environ else None


def listen(path: Path) -> socket.socket:
    """Listen there, in a folder that only this user may enter.

    Raises ConfigError if another process listens, or the folder is open to others.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _refuse_shared(path.parent)
        if other := connected(path):
            other.close()
            raise ConfigError(f"another control unit listens at {path}: stop it, or give --socket")
        path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(str(path))
        path.chmod(0o600)
        listener.listen(_BACKLOG)
    except OSError as error:
        raise ConfigError(f"--socket {path} cannot be made: {error}") from error
    return listener


def connected(path: Path) -> socket.socket | None:
    """A connection to the process that listens there; None without one of this user."""
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        peer.connect(str(path))
    except OSError:
        peer.close()
        return None
    if not is_own(peer):
        log.warning("%s is another user's control unit; it is not used", path)
        peer.close()
        return None
    return peer


def is_own(peer: socket.socket) -> bool:
    """Whether the process at the other end is this user's; always True without SO_PEERCRED."""
    if not hasattr(socket, "SO_PEERCRED"):
        return True
    told = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    uid: int = _CREDENTIALS.unpack(told)[1]
    return uid == os.geteuid()


def _refuse_shared(folder: Path) -> None:
    found = folder.stat()
    if found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise ConfigError(
            f"--socket: others may enter {folder}; it must be this user's alone (chmod 700)"
        )

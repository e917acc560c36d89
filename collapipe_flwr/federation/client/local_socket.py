"""The socket between a ClientApp and its control unit, and Flower's records on it.

It lies in a folder of one user, and both sides verify each other's user id with the kernel. A
parcel is a JSON head, then the bytes of every array. Arrays leave the record as they are written,
so a model is never in memory twice. Imports flwr alone, since the relay pays for it with every
message.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import struct
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.app.metadata import Metadata

from collapipe_flwr.core.errors import ConfigError, LinkError, LinkTimeout, ProtocolError
from collapipe_flwr.core.hub import expand_home
from collapipe_flwr.federation.bundles import array_records
from collapipe_flwr.federation.client import CLUSTER_KEY, CONTROL_UNIT_KEY, named_path

log = logging.getLogger("flwr.collapipe")
VARIABLE = "COLLAPIPE_CONTROL_UNIT"
_SYSTEM = Path("/var/lib/collapipe-control-unit/socket")
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_BACKLOG = 8
CONNECT_S = 60.0  # of a control unit that accepts nobody, until it counts as hung
_TIMEVAL = struct.Struct("ll")  # seconds, microseconds
_LENGTH = struct.Struct("!Q")
_MOST_HEAD_BYTES = 2**28
_BYTES = "bytes"  # key of a value that JSON lacks
_KINDS = {"arrays": ArrayRecord, "metrics": MetricRecord, "config": ConfigRecord}


def default_path() -> Path:
    """Return the path at which a control unit listens by default."""
    named, runtime = os.environ.get(VARIABLE), os.environ.get("XDG_RUNTIME_DIR")
    if named:
        return expand_home(named)
    return Path(runtime) / "collapipe" / "control-unit.sock" if runtime else _SYSTEM


def path_for(node_config: Mapping[str, object]) -> Path | None:
    """Return where the control unit of a node would listen, by --node-config or the environment.

    None for an empty name, and for a node without a cluster file that names no control unit. Raises
    ConfigError.
    """
    if CONTROL_UNIT_KEY in node_config:
        named = named_path(node_config, CONTROL_UNIT_KEY, "socket")
        return expand_home(named) if named else None
    return default_path() if CLUSTER_KEY in node_config or VARIABLE in os.environ else None


def listen(path: Path) -> socket.socket:
    """Listen at ``path``, in a folder that only this user may enter.

    Raises ConfigError if another process listens, or the folder is open to others.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _refuse_shared(path.parent)
        try:
            if other := open_connection(path):
                other.close()
        except LinkTimeout as error:
            raise ConfigError(f"--socket: {error}") from error
        if other:
            raise ConfigError(f"another control unit listens at {path}: stop it, or give --socket")
        path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(str(path))
        path.chmod(0o600)
        listener.listen(_BACKLOG)
    except OSError as error:
        raise ConfigError(f"--socket {path} cannot be made: {error}") from error
    return listener


def open_connection(path: Path, within_s: float = CONNECT_S) -> socket.socket | None:
    """Connect to this user's process that listens at ``path``; None if there is none.

    Raises LinkTimeout if its queue of waiting connections stays full for ``within_s``.
    """
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # With Python's own timeout, connect fails at once when the queue is full.
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _pack_timeval(within_s))
        peer.connect(str(path))
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _pack_timeval(0.0))
    except BlockingIOError as error:
        peer.close()
        raise LinkTimeout(
            f"the control unit at {path} has accepted nobody for {within_s:g} s: see its log, and "
            "restart it"
        ) from error
    except OSError:
        peer.close()
        return None
    if not is_own(peer):
        log.warning("%s is another user's control unit; it is not used", path)
        peer.close()
        return None
    return peer


def _pack_timeval(seconds: float) -> bytes:
    return _TIMEVAL.pack(int(seconds), int(seconds % 1 * 1e6))


def is_own(peer: socket.socket) -> bool:
    """Return whether the peer's process is this user's; always True without SO_PEERCRED."""
    if not hasattr(socket, "SO_PEERCRED"):
        return True
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    uid: int = _CREDENTIALS.unpack(credentials)[1]
    return uid == os.geteuid()


def _refuse_shared(folder: Path) -> None:
    found = folder.stat()
    if found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise ConfigError(
            f"--socket: others may enter {folder}; it must be this user's alone (chmod 700)"
        )


def write_parcel(peer: socket.socket, head: Mapping[str, Any], *contents: RecordDict) -> None:
    """Send head and contents, taking the arrays out of these; raises LinkError for a lost peer."""
    described = {"head": head, "contents": [_describe(content) for content in contents]}
    data = json.dumps(described).encode()
    try:
        peer.sendall(_LENGTH.pack(len(data)) + data)
        for content in contents:
            records = array_records(content)
            for name in list(records):
                record = records.pop(name).copy()  # the caller's record stays complete
                content[name] = record
                for key in list(record):
                    if data := record.pop(key).data:  # a reader may be gone before an empty one
                        peer.sendall(data)
    except OSError as error:
        raise LinkError(f"the peer of the local socket is gone: {error}") from error


def read_parcel(file: BinaryIO) -> tuple[dict[str, Any], list[RecordDict]]:
    """Receive a head, and the records sent with it.

    Raises LinkError for a lost peer, ProtocolError for malformed data.
    """
    (size,) = _LENGTH.unpack(_read(file, _LENGTH.size))
    if size > _MOST_HEAD_BYTES:
        raise ProtocolError(f"the local socket announced a head of {size} bytes")
    try:
        described = json.loads(_read(file, size))
        return described["head"], [_gather(file, one) for one in described["contents"]]
    except (KeyError, TypeError, ValueError) as error:
        raise ProtocolError(f"malformed data on the local socket: {error!r}") from error


def encode_order(message: Message, context: Context) -> dict[str, Any]:
    """Encode the metadata of a message, and a context without its state."""
    metadata = {name.lstrip("_"): value for name, value in vars(message.metadata).items()}
    rest = {name: value for name, value in vars(context).items() if name != "state"}
    return {"message": metadata, "context": rest}


def decode_order(
    head: Mapping[str, Any], content: RecordDict, state: RecordDict
) -> tuple[Message, Context]:
    """Rebuild the message and the context that :func:`encode_order` was given."""
    known = {name: value for name, value in head["message"].items() if name != "delivered_at"}
    message = Message(content, metadata=Metadata(**known))  # type: ignore[call-overload]
    return message, Context(state=state, **head["context"])


def _read(file: BinaryIO, size: int) -> bytes:
    try:
        data = file.read(size)
    except TimeoutError as error:
        raise LinkTimeout("the peer of the local socket did not answer in time") from error
    except OSError as error:
        raise LinkError(f"the peer of the local socket is gone: {error}") from error
    if len(data) < size:
        raise LinkError("the peer of the local socket closed it")
    return data


def _describe(content: RecordDict) -> list[list[Any]]:
    return [[name, *_describe_record(record)] for name, record in content.items()]


def _describe_record(record: ArrayRecord | MetricRecord | ConfigRecord) -> tuple[str, object]:
    if isinstance(record, ArrayRecord):
        arrays = record.items()
        return "arrays", [[k, a.dtype, list(a.shape), a.stype, len(a.data)] for k, a in arrays]
    kind = "metrics" if isinstance(record, MetricRecord) else "config"
    return kind, {name: _encode_value(value) for name, value in record.items()}


def _gather(file: BinaryIO, described: Sequence[Sequence[Any]]) -> RecordDict:
    content = RecordDict()
    for name, kind, values in described:
        record = _KINDS[kind]()
        if isinstance(record, ArrayRecord):
            for key, dtype, shape, stype, size in values:
                record[key] = Array(dtype, tuple(shape), stype, _read(file, size))
        else:
            for key, value in values.items():
                record[key] = _decode_value(value)
        content[name] = record
    return content


def _encode_value(value: Any) -> Any:
    if isinstance(value, bytes):
        return {_BYTES: b64encode(value).decode()}
    return [_encode_value(item) for item in value] if isinstance(value, list) else value


def _decode_value(plain: Any) -> Any:
    if isinstance(plain, dict):
        return b64decode(plain[_BYTES])
    return [_decode_value(item) for item in plain] if isinstance(plain, list) else plain

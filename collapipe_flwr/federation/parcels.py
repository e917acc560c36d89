"""Flower's records over a local socket: a JSON head, then the bytes of every array.

Imports flwr alone, since the relay in a ClientApp pays for it with every message. Arrays leave the
record as they are written, so a model is never in memory twice.
"""

from __future__ import annotations

import json
import struct
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from socket import socket
from typing import Any, BinaryIO

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.app.metadata import Metadata

from collapipe_flwr.core.errors import LinkError, LinkTimeout, ProtocolError
from collapipe_flwr.federation.bundles import array_records

_LENGTH = struct.Struct("!Q")
_MOST_HEAD_BYTES = 2**28
_BYTES = "bytes"  # key of a value that JSON lacks
_KINDS = {"arrays": ArrayRecord, "metrics": MetricRecord, "config": ConfigRecord}


@dataclass(frozen=True, slots=True, kw_only=True)
class Parcel:
    """JSON values, and the records sent with them."""

    head: Mapping[str, Any]
    contents: tuple[RecordDict, ...] = ()


def write_parcel(peer: socket, head: Mapping[str, Any], *contents: RecordDict) -> None:
    """Send both, emptying ``contents`` of arrays; raises LinkError for a lost peer."""
    told = {"head": head, "contents": [_describe(content) for content in contents]}
    data = json.dumps(told).encode()
    try:
        peer.sendall(_LENGTH.pack(len(data)) + data)
        for content in contents:
            records = array_records(content)
            for name in list(records):
                content[name] = record = records.pop(name).copy()  # who keeps it has it all
                for key in list(record):
                    if data := record.pop(key).data:  # a reader may be gone before an empty one
                        peer.sendall(data)
    except OSError as error:
        raise LinkError(f"the other side of the local socket is gone: {error}") from error


def read_parcel(file: BinaryIO) -> Parcel:
    """Receive a parcel; raises LinkError for a lost peer, ProtocolError for malformed data."""
    (size,) = _LENGTH.unpack(_read(file, _LENGTH.size))
    if size > _MOST_HEAD_BYTES:
        raise ProtocolError(f"a head of {size} bytes came over the local socket")
    try:
        told = json.loads(_read(file, size))
        return Parcel(
            head=told["head"], contents=tuple(_gather(file, one) for one in told["contents"])
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ProtocolError(f"the local socket carried nonsense: {error!r}") from error


def message_head(message: Message) -> dict[str, Any]:
    """The metadata of a message."""
    return {name.lstrip("_"): value for name, value in vars(message.metadata).items()}


def message_of(head: Mapping[str, Any], content: RecordDict) -> Message:
    known = {name: value for name, value in head.items() if name != "delivered_at"}
    return Message(content, metadata=Metadata(**known))  # type: ignore[call-overload, no-any-return]


def context_head(context: Context) -> dict[str, Any]:
    """A context without its state."""
    return {name: value for name, value in vars(context).items() if name != "state"}


def context_of(head: Mapping[str, Any], state: RecordDict) -> Context:
    return Context(state=state, **head)


def _read(file: BinaryIO, size: int) -> bytes:
    try:
        data = file.read(size)
    except TimeoutError as error:
        raise LinkTimeout("the other side of the local socket was silent for too long") from error
    except OSError as error:
        raise LinkError(f"the other side of the local socket is gone: {error}") from error
    if len(data) < size:
        raise LinkError("the other side of the local socket ended")
    return data


def _describe(content: RecordDict) -> list[list[Any]]:
    return [[name, *_describe_record(record)] for name, record in content.items()]


def _describe_record(record: ArrayRecord | MetricRecord | ConfigRecord) -> tuple[str, object]:
    if isinstance(record, ArrayRecord):
        arrays = record.items()
        return "arrays", [[k, a.dtype, list(a.shape), a.stype, len(a.data)] for k, a in arrays]
    kind = "metrics" if isinstance(record, MetricRecord) else "config"
    return kind, {name: _plain(value) for name, value in record.items()}


def _gather(file: BinaryIO, told: Sequence[Sequence[Any]]) -> RecordDict:
    content = RecordDict()
    for name, kind, values in told:
        record = _KINDS[kind]()
        if isinstance(record, ArrayRecord):
            for key, dtype, shape, stype, size in values:
                record[key] = Array(dtype, tuple(shape), stype, _read(file, size))
        else:
            for key, value in values.items():
                record[key] = _value(value)
        content[name] = record
    return content


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return {_BYTES: b64encode(value).decode()}
    return [_plain(item) for item in value] if isinstance(value, list) else value


def _value(plain: Any) -> Any:
    if isinstance(plain, dict):
        return b64decode(plain[_BYTES])
    return [_value(item) for item in plain] if isinstance(plain, list) else plain

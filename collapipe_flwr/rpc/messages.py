"""Control messages: frozen dataclasses as JSON, checked field by field when they come in.

They are small and rare, so they need no generated code; tensors never travel in them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, fields, is_dataclass
from types import NoneType, UnionType
from typing import TypeVar, get_args, get_origin, get_type_hints

from collapipe_flwr.core.errors import CollaPipeError, ProtocolError

Message = TypeVar("Message")
MESSAGE_BYTES = 4 * 2**20  # more than any model config needs


def encode_message(message: object) -> bytes:
    """A dataclass instance as JSON bytes."""
    return json.dumps(asdict(message)).encode()  # type: ignore[call-overload]


def message_decoder(kind: type[Message]) -> Callable[[bytes], Message]:
    """A function that reads exactly `kind`. It raises ProtocolError on anything else."""

    def decode(data: bytes) -> Message:
        return decode_message(kind, data)

    return decode


def decode_message(kind: type[Message], data: bytes) -> Message:
    """Read a message of type `kind`. Raises ProtocolError on anything else."""
    if len(data) > MESSAGE_BYTES:
        raise ProtocolError(f"a {kind.__name__} of {len(data)} bytes; {MESSAGE_BYTES} are allowed")
    try:
        raw = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"a {kind.__name__} that is not JSON") from error
    return _read(kind, raw)


def _read(kind: type[Message], raw: object) -> Message:
    names = {f.name for f in fields(kind)}  # type: ignore[arg-type]
    if not isinstance(raw, dict) or set(raw) != names:
        raise ProtocolError(f"a {kind.__name__} needs exactly the fields {sorted(names)}")
    hints = get_type_hints(kind)
    values = {name: _value(hints[name], raw[name], f"{kind.__name__}.{name}") for name in names}
    try:
        return kind(**values)
    except ProtocolError:
        raise
    except CollaPipeError as error:
        raise ProtocolError(f"{kind.__name__}: {error}") from error


def _value(hint: object, raw: object, where: str) -> object:
    if isinstance(hint, type) and is_dataclass(hint):
        return _read(hint, raw)
    if get_origin(hint) is UnionType:  # always with None
        inner = next(h for h in get_args(hint) if h is not NoneType)
        return None if raw is None else _value(inner, raw, where)
    if get_origin(hint) is tuple and isinstance(raw, list):
        hints = _item_hints(get_args(hint), len(raw))
        if len(raw) == len(hints):
            return tuple(_value(h, r, where) for h, r in zip(hints, raw, strict=True))
    if hint is float and type(raw) is int and abs(raw) < 2**63:
        return float(raw)
    if hint in (str, int, bool, float) and type(raw) is hint:
        return raw
    raise ProtocolError(f"{where} cannot be {str(raw)[:40]!r}")


def _item_hints(arguments: tuple[object, ...], length: int) -> tuple[object, ...]:
    """The types of a tuple's items: `tuple[X, ...]` has as many as there are."""
    return arguments[:1] * length if arguments[-1] is Ellipsis else arguments

"""Frozen dataclasses to JSON and back, with strict checks of input from peers.

Accepts str, int, float (NaN and infinities too: a loss may diverge), bool, enums, optional values,
tuples, string-keyed mappings and dataclasses of these. Every key must be known and every field
without a default present.
"""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any, TypeVar, cast

from collapipe_flwr.core.errors import CollaPipeError, ProtocolError

T = TypeVar("T")
_SCALARS: Mapping[type, str] = {str: "a string", int: "a whole number", bool: "true or false"}
_hints = cache(typing.get_type_hints)


@cache
def _parts(kind: Any) -> tuple[Any, tuple[Any, ...]]:
    return typing.get_origin(kind), typing.get_args(kind)


def to_json(value: object) -> str:
    """One dataclass as compact JSON."""
    return json.dumps(plain(value), separators=(",", ":"))


def from_json(kind: type[T], text: str, what: str) -> T:
    """Rebuild a ``kind``; raises ProtocolError that names the place, as ``what.field``."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"{what} is not JSON: {error}") from error
    return cast(T, _decode(kind, data, what))


def plain(value: object) -> Any:
    """A value as dicts, lists and scalars, for the json module."""
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, tuple | list):
        return [plain(v) for v in value]
    return value


def _decode(kind: Any, data: Any, path: str) -> Any:
    origin, args = _parts(kind)
    if origin in (typing.Union, types.UnionType):
        options = [option for option in args if option is not type(None)]
        if data is None and len(options) < len(args):
            return None
        exact = [option for option in options if option is type(data)]
        return _decode((exact or options)[0], data, path)
    if origin is tuple:
        return _decode_tuple(args, data, path)
    if origin in (Mapping, dict):
        return {k: _decode(args[1], v, f"{path}.{k}") for k, v in _object(data, path).items()}
    if is_dataclass(kind):
        return _decode_dataclass(kind, _object(data, path), path)
    if isinstance(kind, type) and issubclass(kind, Enum):
        values = [member.value for member in kind]
        if not any(type(value) is type(data) and value == data for value in values):
            raise _wrong(path, f"one of {values}", data)
        return kind(data)
    if kind is float and type(data) is int and abs(data) < 2**63:
        return float(data)
    if type(data) is not kind:
        raise _wrong(path, _SCALARS.get(kind, "a number"), data)
    return data


def _decode_tuple(args: tuple[Any, ...], data: Any, path: str) -> tuple[Any, ...]:
    if not isinstance(data, list):
        raise _wrong(path, "a list", data)
    if args[-1] is Ellipsis:
        args = args[:1] * len(data)
    if len(data) != len(args):
        raise _wrong(path, f"a list of {len(args)}", data)
    pairs = zip(args, data, strict=True)
    return tuple(_decode(a, v, f"{path}[{i}]") for i, (a, v) in enumerate(pairs))


def _object(data: Any, path: str) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise _wrong(path, "an object", data)
    return data


def _decode_dataclass(kind: Any, data: dict[str, Any], path: str) -> Any:
    hints = _hints(kind)
    unknown = sorted(set(data) - set(hints))
    if unknown:
        raise ProtocolError(f"{path} has the unknown key {unknown[0]!r}")
    for f in sorted(fields(kind), key=lambda field: field.name):
        if f.name not in data and f.default is MISSING and f.default_factory is MISSING:
            raise ProtocolError(f"{path} lacks the key {f.name!r}")
    values = {k: _decode(hints[k], v, f"{path}.{k}") for k, v in data.items()}
    try:
        return kind(**values)
    except CollaPipeError as error:  # a dataclass that checks its own values
        raise ProtocolError(f"{path}: {error}") from error


def _wrong(path: str, wanted: str, data: Any) -> ProtocolError:
    try:
        got = f"{data!r:.60}"
    except RecursionError:  # the deepest nesting that json reads is too deep for repr
        got = "deeply nested lists or objects"
    return ProtocolError(f"{path} must be {wanted}, got {got}")

"""Frozen dataclasses to JSON and back, with strict checks of input from peers.

Accepts str, int, float (NaN and infinities too: a loss may diverge), bool, enums, optional values,
tuples, string-keyed mappings and dataclasses of these. Every key must be known, no key doubled and
every field without a default present. A type may carry rules, ``Annotated[float, at_least(0)]``,
which its values obey (`bounds` has those of messages). Text must be Unicode, and whole numbers must
fit into 64 bits.
"""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Annotated, Any, TypeVar, cast

from collapipe_flwr.core.errors import CollaPipeError, ProtocolError
from collapipe_flwr.core.keys import Rule
from collapipe_flwr.core.texts import SHORT, to_one_line

T = TypeVar("T")
_SCALARS: Mapping[type, str] = {
    str: "a string",
    int: "a whole number",
    bool: "true or false",
    float: "a number",
}
_MOST = 2**64  # beyond every whole number: node ids of Flower have 64 bits


@cache
def _read_hints(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind, include_extras=True)


@cache
def _split_type(kind: Any) -> tuple[Any, tuple[Any, ...]]:
    return typing.get_origin(kind), typing.get_args(kind)


@cache
def _list_values(kind: type[Enum]) -> list[Any]:
    return [member.value for member in kind]


@cache
def _list_required(kind: Any) -> list[str]:
    """List the fields without a default by name."""
    without = (f for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING)
    return sorted(f.name for f in without)


def to_json(value: object) -> str:
    """Encode one dataclass as compact JSON."""
    return json.dumps(to_plain(value), separators=(",", ":"))


def from_json(kind: type[T], text: str, what: str, *, most: int | None = None) -> T:
    """Build a ``kind`` from JSON of at most ``most`` characters.

    Raises ProtocolError that names the place, as ``what.field``.
    """
    if most is not None and len(text) > most:
        raise ProtocolError(f"{what} has {len(text)} characters; {most} are allowed")
    try:
        data = json.loads(text, object_pairs_hook=_refuse_doubled)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"{what} is not JSON: {to_one_line(str(error))}") from error
    try:
        return cast(T, _decode(kind, data, ""))
    except ProtocolError:
        return cast(T, _decode(kind, data, what))  # again, to name the place


def _refuse_doubled(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("an object names a key twice")
    return found


def to_plain(value: object) -> Any:
    """Convert a value to dicts, lists and scalars, for the json module."""
    if value is None or type(value) in _SCALARS:
        return value
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(k): to_plain(v) for k, v in value.items()}
    if isinstance(value, tuple | list):
        return [to_plain(v) for v in value]
    return value


def _decode(kind: Any, data: Any, path: str) -> Any:
    """Build a ``kind`` from decoded JSON; an empty ``path`` stays empty, to save time."""
    if kind in _SCALARS:
        return _decode_scalar(kind, data, path)
    origin, args = _split_type(kind)
    if origin is Annotated:
        return _check_rules(args[1:], _decode(args[0], data, path), path)
    if origin in (typing.Union, types.UnionType):
        options = [option for option in args if option is not type(None)]
        if data is None and len(options) < len(args):
            return None
        exact = [option for option in options if _strip_rules(option) is type(data)]
        return _decode((exact or options)[0], data, path)
    if origin is tuple:
        return _decode_tuple(args, data, path)
    if origin in (Mapping, dict):
        pairs = _check_object(data, path).items()
        return {
            _decode(args[0], k, path): _decode(args[1], v, _extend_path(path, k)) for k, v in pairs
        }
    if is_dataclass(kind):
        return _decode_dataclass(kind, _check_object(data, path), path)
    if isinstance(kind, type) and issubclass(kind, Enum):
        values = _list_values(kind)
        if not any(type(value) is type(data) and value == data for value in values):
            raise _make_error(path, f"one of {values}", data)
        return kind(data)
    return _decode_scalar(kind, data, path)


def _decode_scalar(kind: Any, data: Any, path: str) -> Any:
    if kind is float and type(data) is int and abs(data) < 2**63:
        return float(data)
    if type(data) is not kind:
        raise _make_error(path, _SCALARS.get(kind, "a number"), data)
    if kind is int and not -_MOST < data < _MOST:
        raise _make_error(path, "a whole number of at most 64 bits", data)
    if kind is str and not _is_unicode(data):
        raise _make_error(path, "a string of Unicode characters", data)
    return data


def _check_rules(rules: tuple[object, ...], value: Any, path: str) -> Any:
    for rule in rules:
        if isinstance(rule, Rule) and not rule.holds(value):
            raise ProtocolError(f"{path} {rule.says}, got {_show(value)}")
    return value


def _strip_rules(kind: Any) -> Any:
    origin, args = _split_type(kind)
    return args[0] if origin is Annotated else kind


def _is_unicode(text: str) -> bool:
    """Return whether a text can be encoded: half of a surrogate pair cannot."""
    try:
        return text.isascii() or bool(text.encode())
    except UnicodeEncodeError:
        return False


def _decode_tuple(args: tuple[Any, ...], data: Any, path: str) -> tuple[Any, ...]:
    if not isinstance(data, list):
        raise _make_error(path, "a list", data)
    if args[-1] is Ellipsis:
        args = args[:1] * len(data)
    if len(data) != len(args):
        raise _make_error(path, f"a list of {len(args)}", data)
    pairs = zip(args, data, strict=True)
    return tuple(_decode(a, v, path and f"{path}[{i}]") for i, (a, v) in enumerate(pairs))


def _check_object(data: Any, path: str) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise _make_error(path, "an object", data)
    return data


def _decode_dataclass(kind: Any, data: dict[str, Any], path: str) -> Any:
    hints = _read_hints(kind)
    unknown = sorted(set(data) - set(hints))
    if unknown:
        raise ProtocolError(f"{path} has the unknown key {_show(unknown[0])}")
    for name in _list_required(kind):
        if name not in data:
            raise ProtocolError(f"{path} lacks the key {name!r}")
    values = {k: _decode(hints[k], v, path and f"{path}.{k}") for k, v in data.items()}
    try:
        return kind(**values)
    except CollaPipeError as error:  # a dataclass that checks its own values
        raise ProtocolError(f"{path}: {error}") from error


def _make_error(path: str, wanted: str, data: Any) -> ProtocolError:
    return ProtocolError(f"{path} must be {wanted}, got {_show(data)}")


def _show(data: Any) -> str:
    try:
        return f"{data!r:.60}" if not isinstance(data, int) or abs(data) < _MOST else "a huge one"
    except RecursionError:  # the deepest nesting that json reads is too deep for repr
        return "deeply nested lists or objects"


def _extend_path(path: str, key: str) -> str:
    """Extend a path by a mapping's key, which is made printable because a peer chose it."""
    return path and f"{path}.{to_one_line(key, SHORT)}"

"""The inner strategy's memory as JSON and arrays: attributes that changed since it was made.

Pickle would run code from a checkpoint file, so plain values are encoded instead: numbers, strings,
lists, dicts, named tuples, numpy arrays, Flower's records, and wrapped strategies. Unchanged
attributes are not saved, so a resumed run may change its settings.
"""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord
from flwr.serverapp.strategy import Strategy

from collapipe_flwr.core.errors import RunError

Arrays = dict[str, np.ndarray[Any, Any]]
_KIND = "__kind__"  # marks an object in JSON that is not a dict of the strategy
_DICTS: Mapping[str, type[dict[Any, Any]]] = {
    "dict": dict,
    "Counter": Counter,
    "OrderedDict": OrderedDict,
}
_Key = str | int | float | None


def encode_state(strategy: Strategy, arrays: Arrays, path: str = "inner") -> dict[str, Any]:
    """Encode the attributes of ``strategy`` as JSON; arrays go into ``arrays`` by their path.

    Functions are left out: only the constructor can set them. Raises RunError for an attribute that
    has no plain form.
    """
    return {
        name: _encode(value, arrays, f"{path}.{name}")
        for name, value in vars(strategy).items()
        if not callable(value)
    }


def select_changed(now: Mapping[str, Any], first: Mapping[str, Any]) -> dict[str, Any]:
    """Select the attributes that changed; those of a wrapped strategy one by one."""
    changed = {}
    for name, value in now.items():
        if _is_kind(value, "strategy"):
            inner = select_changed(value["state"], first.get(name, {}).get("state", {}))
            changed[name] = {**value, "state": inner}
        elif name not in first or value != first[name] or _holds_arrays(value):
            changed[name] = value
    return changed


def restore_state(strategy: Strategy, saved: Mapping[str, Any], arrays: Arrays) -> None:
    for name, value in saved.items():
        if _is_kind(value, "strategy"):
            wrapped = getattr(strategy, name)
            check_same_class(wrapped, value["class"])
            restore_state(wrapped, value["state"], arrays)
        else:
            setattr(strategy, name, _decode(value, arrays))


def check_same_class(strategy: Strategy, saved: str) -> None:
    """Raise RunError unless the checkpoint is of the same kind of strategy."""
    if type(strategy).__name__ != saved:
        raise RunError(
            f"the checkpoint holds the state of {saved}, this run uses {type(strategy).__name__}: "
            "use the same strategy or start anew"
        )


def _encode(value: Any, arrays: Arrays, path: str) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.generic):
        value = np.asarray(value)
    if isinstance(value, bytes):
        arrays[path] = np.frombuffer(value, dtype=np.uint8)
        return {_KIND: "bytes", "path": path}
    if isinstance(value, np.ndarray):
        arrays[path] = value
        return {_KIND: "array", "path": path}
    if isinstance(value, ArrayRecord):
        items = {k: _encode(a.numpy(), arrays, f"{path}.{k}") for k, a in value.items()}
        return {_KIND: "record", "items": items}
    if isinstance(value, Strategy):
        state = encode_state(value, arrays, path)
        return {_KIND: "strategy", "class": type(value).__name__, "state": state}
    return _encode_container(value, arrays, path)


def _encode_container(value: Any, arrays: Arrays, path: str) -> Any:
    if isinstance(value, list | tuple):
        items = [_encode(v, arrays, f"{path}.{i}") for i, v in enumerate(value)]
        if isinstance(value, list):
            return items
        if not hasattr(value, "_fields"):
            return {_KIND: "tuple", "items": items}
        kind = type(value)
        where = {"module": kind.__module__, "class": kind.__qualname__}
        if _find_named_tuple(where) is kind:
            return {_KIND: "named tuple", **where, "items": items}
    if type(value) in _DICTS.values() and all(isinstance(k, _Key) for k in value):
        pairs = [[k, _encode(v, arrays, f"{path}.{k}")] for k, v in value.items()]
        return {_KIND: type(value).__name__, "pairs": pairs}
    raise RunError(
        f"{path} is a {type(value).__name__}, which a checkpoint cannot hold; "
        "run without checkpoints or with a strategy of plain values"
    )


def _decode(value: Any, arrays: Arrays) -> Any:
    if isinstance(value, list):
        return [_decode(v, arrays) for v in value]
    if not isinstance(value, dict):
        return value
    if value[_KIND] == "array":
        return arrays[value["path"]]
    if value[_KIND] == "bytes":
        return arrays[value["path"]].tobytes()
    if value[_KIND] == "record":
        record = ArrayRecord()
        for key, item in value["items"].items():
            record[key] = Array(np.asarray(_decode(item, arrays)))
        return record
    if value[_KIND] == "tuple":
        return tuple(_decode(v, arrays) for v in value["items"])
    if value[_KIND] == "named tuple":
        if (kind := _find_named_tuple(value)) is None:
            raise RunError(
                f"the checkpoint holds a {value['class']} of {value['module']}, which this run has "
                "not: use the same code or start anew"
            )
        return kind._make(_decode(v, arrays) for v in value["items"])
    return _DICTS[value[_KIND]]({k: _decode(v, arrays) for k, v in value["pairs"]})


def _find_named_tuple(where: Mapping[str, Any]) -> Any:
    """Look up a named tuple's class, None without one; a checkpoint never imports anything."""
    found: Any = sys.modules.get(where["module"])
    for name in where["class"].split("."):
        found = getattr(found, name, None)
    is_named = isinstance(found, type) and issubclass(found, tuple) and hasattr(found, "_make")
    return found if is_named else None


def _is_kind(value: Any, kind: str) -> bool:
    return isinstance(value, dict) and value.get(_KIND) == kind


def _holds_arrays(value: Any) -> bool:
    """Return whether a value holds arrays: compared by path only, these count as changed."""
    if isinstance(value, list):
        return any(_holds_arrays(v) for v in value)
    if not isinstance(value, dict):
        return False
    return value.get(_KIND) in ("array", "bytes") or any(
        _holds_arrays(v) for k, v in value.items() if k != _KIND
    )

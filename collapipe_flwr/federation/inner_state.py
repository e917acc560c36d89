"""The inner strategy's state before a round, to which a repeated or a refused one returns.

Strategies keep moments, clipping norms and counts in attributes, and may change them in place. So
everything that a strategy holds is put back where it is: attributes, containers, arrays, tensors,
random generators, and objects of its own package. Objects of other libraries, such as a logger or
an open file, are left alone.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Collection, Iterable
from typing import Any

import numpy as np
import torch
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from collapipe_flwr.federation.inner import layers

Undo = Callable[[], object]
_DATA = "torch.utils.data"  # examples, which no round changes
_MISSING = object()


def undo_nothing() -> None:
    """Leave the strategy as it is: outside a round there is nothing to return to."""


def remember(strategy: Strategy) -> Undo:
    """A function that returns ``strategy`` to its present state, as often as it is called."""
    kinds = {kind for layer in layers(strategy) for kind in type(layer).__mro__}
    packages = {_package(kind) for kind in kinds} - {"builtins", "abc", "typing"}
    undo: list[Undo] = []
    seen: dict[int, object] = {}  # which keeps them alive, so that no id is used again
    left: list[object] = [strategy]
    while left:
        found = left.pop()
        if id(found) not in seen:
            seen[id(found)] = found
            left += _remember_one(found, {*packages, "torch"}, undo)
    return lambda: [step() for step in undo]


def _remember_one(found: Any, packages: Collection[str], undo: list[Undo]) -> Iterable[object]:
    """Add what restores this object without what it holds, which is returned."""
    if isinstance(found, torch.Tensor):
        undo.append(_tensor_undo(found))
        return ()
    if (state := _generator_undo(found)) is not None:
        undo.append(state)
        return ()
    held: list[object] = []
    if isinstance(found, np.ndarray):
        if found.flags.writeable:
            undo.append(_call(np.copyto, found, found.copy()))
        return list(found.flat) if found.dtype.hasobject else ()
    if isinstance(found, dict):
        items = dict(found)
        undo.append(_call(_refill, found, items))
        held += items.values()
    elif isinstance(found, list | deque | set):
        values = list(found)
        fill = found.update if isinstance(found, set) else found.extend
        undo.append(lambda: (found.clear(), fill(values)))
        held += values
    elif isinstance(found, tuple | frozenset):
        held += found
    if _is_followed(type(found), packages):
        held += _remember_attributes(found, undo)
    return held


def _is_followed(kind: type, packages: Collection[str]) -> bool:
    """Whether the attributes of such objects belong to the strategy."""
    ours = _package(kind) in packages and not kind.__module__.startswith(_DATA)
    return ours and not issubclass(kind, Grid)


def _remember_attributes(found: Any, undo: list[Undo]) -> list[object]:
    names = {name for kind in type(found).__mro__ for name in _slots(kind)}
    slots = {n: v for n in names if (v := getattr(found, n, _MISSING)) is not _MISSING}
    for name, value in slots.items():
        undo.append(_call(object.__setattr__, found, name, value))
    attributes = dict(vars(found)) if hasattr(found, "__dict__") else {}
    if attributes:
        undo.append(_call(_reset, vars(found), attributes))
    return [*slots.values(), *attributes.values()]


def _slots(kind: type) -> tuple[str, ...]:
    named = vars(kind).get("__slots__", ())
    every = (named,) if isinstance(named, str) else tuple(named)
    return tuple(name for name in every if name not in ("__dict__", "__weakref__"))


def _tensor_undo(tensor: torch.Tensor) -> Undo:
    kept, inner = tensor.detach().clone(), tensor.detach()  # `inner` has the same storage

    def put_back() -> None:
        if tensor.data_ptr() != inner.data_ptr() or tensor.shape != inner.shape:
            tensor.data = inner
        inner.copy_(kept)

    return put_back


def _generator_undo(found: object) -> Undo | None:
    """What restores a random generator; None for any other object."""
    if isinstance(found, random.Random):
        return _call(found.setstate, found.getstate())
    if isinstance(found, np.random.Generator):
        return _call(setattr, found.bit_generator, "state", found.bit_generator.state)
    if isinstance(found, np.random.RandomState):
        return _call(found.set_state, found.get_state())
    if isinstance(found, torch.Generator):
        return _call(found.set_state, found.get_state())
    return None


def _refill(found: dict[Any, Any], items: dict[Any, Any]) -> None:
    """Put the items back in their order."""
    found.clear()
    for key, value in items.items():
        found[key] = value


def _reset(attributes: dict[str, Any], before: dict[str, Any]) -> None:
    """Put attributes back without a moment in which an old one is missing."""
    attributes.update(before)
    for name in attributes.keys() - before.keys():
        del attributes[name]


def _call(function: Callable[..., object], *args: object) -> Undo:
    return lambda: function(*args)


def _package(kind: type) -> str:
    return kind.__module__.partition(".")[0]

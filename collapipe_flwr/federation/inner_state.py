"""The inner strategy's state before a round, restored when the round is repeated or refused.

A round that leaves infinities or NaN in that state is refused as well: moments do not recover.

Strategies keep moments, clipping norms and counts in attributes, and may change them in place. So
everything that a strategy holds is put back where it is: attributes, containers, arrays, tensors,
random generators, and objects of its own package. Objects of other libraries, such as a logger or
an open file, are left alone.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from collapipe_flwr.federation.arrays import count_not_finite
from collapipe_flwr.federation.inner import layers

Undo = Callable[[], object]
_DATA = "torch.utils.data"  # examples, which no round changes
_MISSING = object()
_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)


def undo_nothing() -> None:
    """Leave the strategy as it is: outside a round there is nothing to return to."""


def remember(strategy: Strategy) -> Undo:
    """Return a function that restores the present state of ``strategy`` whenever it is called."""
    packages = _find_packages(strategy)
    undo = [step for found in _walk(strategy, packages) for step in _capture(found, packages)]
    return lambda: [step() for step in undo]


def count_unsound(strategy: Strategy, model: ArrayRecord) -> Counter[str]:
    """Count the moments with infinities or NaN in each of the strategy's attributes.

    Moments are arrays and tensors shaped like one of the model's.
    """
    packages, shapes = _find_packages(strategy), {tuple(array.shape) for array in model.values()}
    found = Counter[str]()
    for layer in layers(strategy):
        for name, value in vars(layer).items():
            if not isinstance(value, Strategy):  # it is a layer of its own
                moments = [each for each in _walk(value, packages) if _is_shaped(each, shapes)]
                found[name] += sum(not _is_finite(moment) for moment in moments)
    return found


def find_spoilt(strategy: Strategy, before: Counter[str], model: ArrayRecord) -> str | None:
    """Return the first attribute with more such moments than ``before``, if any.

    As many moments as the model has arrays with infinities may be infinite on account of these.
    """
    now = count_unsound(strategy, model)
    if now <= before:
        return None
    theirs = count_not_finite(model)
    return next((name for name in now if now[name] > max(before[name], theirs)), None)


def _find_packages(strategy: Strategy) -> frozenset[str]:
    """Return the top-level packages whose objects belong to the strategy."""
    kinds = {kind for layer in layers(strategy) for kind in type(layer).__mro__}
    return frozenset({_package(kind) for kind in kinds} - {"builtins", "abc", "typing"} | {"torch"})


def _walk(first: object, packages: Collection[str]) -> Iterator[Any]:
    """Yield all that an object holds, itself included, each once."""
    seen: dict[int, object] = {}  # which keeps them alive, so that no id is used again
    left = [first]
    while left:
        found = left.pop()
        if id(found) not in seen:
            seen[id(found)] = found
            left += _list_held(found, packages)
            yield found


def _list_held(found: Any, packages: Collection[str]) -> list[object]:
    """List what an object holds directly."""
    if isinstance(found, (torch.Tensor, *_GENERATORS)):
        return []
    if isinstance(found, np.ndarray):
        return list(found.flat) if found.dtype.hasobject else []
    held: list[object] = []
    if isinstance(found, dict):
        held += found.values()
    elif isinstance(found, list | deque | set | tuple | frozenset):
        held += found
    if _is_followed(type(found), packages):
        held += [*_slots_of(found).values(), *getattr(found, "__dict__", {}).values()]
    return held


def _is_followed(kind: type, packages: Collection[str]) -> bool:
    """Return whether the attributes of such objects belong to the strategy."""
    ours = _package(kind) in packages and not kind.__module__.startswith(_DATA)
    return ours and not issubclass(kind, Grid)


def _slots_of(found: Any) -> dict[str, Any]:
    names = {name for kind in type(found).__mro__ for name in _slot_names(kind)}
    return {n: v for n in names if (v := getattr(found, n, _MISSING)) is not _MISSING}


def _slot_names(kind: type) -> tuple[str, ...]:
    named = vars(kind).get("__slots__", ())
    every = (named,) if isinstance(named, str) else tuple(named)
    return tuple(name for name in every if name not in ("__dict__", "__weakref__"))


def _capture(found: Any, packages: Collection[str]) -> list[Undo]:
    """Return what restores this object, but not the objects that it holds."""
    undo: list[Undo] = []
    if isinstance(found, torch.Tensor):
        return [_capture_tensor(found)]
    if (generator := _capture_generator(found)) is not None:
        return [generator]
    if isinstance(found, np.ndarray):
        return [_defer(np.copyto, found, found.copy())] if found.flags.writeable else []
    if isinstance(found, dict):
        undo.append(_defer(_refill, found, dict(found)))
    elif isinstance(found, list | deque | set):
        values = list(found)
        fill = found.update if isinstance(found, set) else found.extend
        undo.append(lambda: (found.clear(), fill(values)))
    if _is_followed(type(found), packages):
        for name, value in _slots_of(found).items():
            undo.append(_defer(object.__setattr__, found, name, value))
        if getattr(found, "__dict__", None):
            undo.append(_defer(_reset, vars(found), dict(vars(found))))
    return undo


def _capture_tensor(tensor: torch.Tensor) -> Undo:
    kept, inner = tensor.detach().clone(), tensor.detach()  # `inner` has the same storage

    def put_back() -> None:
        if tensor.data_ptr() != inner.data_ptr() or tensor.shape != inner.shape:
            tensor.data = inner
        inner.copy_(kept)

    return put_back


def _capture_generator(found: object) -> Undo | None:
    """Return what restores a random generator; None for any other object."""
    if isinstance(found, random.Random):
        return _defer(found.setstate, found.getstate())
    if isinstance(found, np.random.Generator):
        return _defer(setattr, found.bit_generator, "state", found.bit_generator.state)
    if isinstance(found, np.random.RandomState):
        return _defer(found.set_state, found.get_state())
    if isinstance(found, torch.Generator):
        return _defer(found.set_state, found.get_state())
    return None


def _is_shaped(found: object, shapes: Collection[tuple[int, ...]]) -> bool:
    return isinstance(found, np.ndarray | torch.Tensor) and tuple(found.shape) in shapes


def _is_finite(moment: Any) -> bool:
    if isinstance(moment, torch.Tensor):
        return bool(torch.isfinite(moment).all())
    return moment.dtype.kind not in "fc" or bool(np.isfinite(moment).all())


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


def _defer(function: Callable[..., object], *args: object) -> Undo:
    return lambda: function(*args)


def _package(kind: type) -> str:
    return kind.__module__.partition(".")[0]

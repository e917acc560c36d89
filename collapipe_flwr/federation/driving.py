"""A strategy's own ``start``, run with the hooks of the strategy that wraps it.

Many Flower projects put their run into ``start``: it saves checkpoints, logs, keeps the best score
in attributes of the strategy. A wrapper with a loop of its own would lose all of that, so the inner
strategy drives.
"""

from __future__ import annotations

from copy import copy
from types import new_class
from typing import Any

from flwr.serverapp.strategy import Strategy

_HOOKS = (
    "configure_train",
    "aggregate_train",
    "configure_evaluate",
    "aggregate_evaluate",
    "summary",
)


class _Hook:
    """The wrapper's method, also where the inner instance has an attribute of that name.

    What ``start`` assigns to the name becomes such an attribute of the inner strategy.
    """

    def __init__(self, name: str, method: Any) -> None:
        self._name, self._method = name, method

    def __get__(self, driver: object, kind: type) -> Any:
        return self._method

    def __set__(self, driver: object, value: Any) -> None:
        vars(driver)[self._name] = value


def driver(inner: Strategy, hooks: Strategy) -> Strategy:
    """``inner`` with the five methods of ``hooks`` in place of its own.

    It is an instance of a subclass of ``inner``'s class and shares its ``__dict__``, so what its
    ``start`` sets is set on ``inner``. Its methods ``configure_train``, ``aggregate_train``,
    ``configure_evaluate``, ``aggregate_evaluate`` and ``summary`` are those of ``hooks``, which
    may call ``inner``'s. A copy of it, or what is unpickled of it, is ``inner``'s.
    """
    kind = type(inner)
    body: dict[str, Any] = {name: _Hook(name, getattr(hooks, name)) for name in _HOOKS}
    body["__module__"], body["__qualname__"] = kind.__module__, kind.__qualname__
    body["__copy__"] = lambda _: copy(inner)
    body["__reduce__"] = lambda _: (_itself, (inner,))
    driven: Strategy = object.__new__(
        new_class(kind.__name__, (kind,), None, lambda own: own.update(body))
    )
    object.__setattr__(driven, "__dict__", vars(inner))
    return driven


def _itself(strategy: Strategy) -> Strategy:
    return strategy

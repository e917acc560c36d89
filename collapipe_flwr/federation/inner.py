"""The strategy inside :class:`CollaPipe`: its validation, and how its own ``start`` runs.

Many Flower projects extend ``start``: it saves checkpoints, logs, keeps the best score in
attributes. So the inner strategy's ``start`` runs, with the hooks of the strategy that wraps it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from inspect import Parameter, signature
from numbers import Real
from types import new_class
from typing import Any, TypeVar

from flwr.serverapp import Grid
from flwr.serverapp.strategy import (
    Bulyan,
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    FedMedian,
    FedTrimmedAvg,
    FedXgbBagging,
    FedXgbCyclic,
    Strategy,
)

from collapipe_flwr.core.errors import ConfigError, RunError

_LEGACY = "flwr.server.strategy"
_TREES = (FedXgbBagging, FedXgbCyclic)
CLIPPED_BY_CLIENTS = (
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
)
BY_COORDINATE = (Bulyan, FedMedian, FedTrimmedAvg)  # take each number on its own
_RETURNED = {
    "configure_train": "the messages to the nodes",
    "aggregate_train": "arrays and metrics",
}
T = TypeVar("T")
_HOOKS = (
    "configure_train",
    "aggregate_train",
    "configure_evaluate",
    "aggregate_evaluate",
    "summary",
)


def check_inner(strategy: object, wrapper: type[Strategy], *, split: bool) -> None:
    """Raise ConfigError for what ``wrapper`` cannot wrap, with a way out."""
    if isinstance(strategy, type):
        name = strategy.__name__
        raise ConfigError(
            f"CollaPipe wraps a strategy, got the class {name}: make one, CollaPipe({name}(), ...)"
        )
    if any(kind.__module__.startswith(_LEGACY) for kind in type(strategy).__mro__):
        name = type(strategy).__name__
        raise ConfigError(
            f"CollaPipe cannot wrap the {name} of flwr.server.strategy, Flower's former interface: "
            f"import {name} from flwr.serverapp.strategy"
        )
    if not isinstance(strategy, Strategy):
        raise ConfigError(
            f"CollaPipe wraps a strategy of flwr.serverapp.strategy, got {strategy!r}: pass one, "
            "for example FedAvg()"
        )
    for layer in layers(strategy):
        if isinstance(layer, wrapper):
            raise ConfigError(
                "CollaPipe is already inside this strategy: wrap once, and pass the inner strategy "
                "and every option to the same CollaPipe"
            )
        if split and isinstance(layer, _TREES):
            raise ConfigError(
                f"{type(layer).__name__} aggregates boosted trees, which cannot be split between "
                "devices and edge: leave out the split model, or choose a strategy that averages"
            )


def layers(strategy: Strategy) -> list[Strategy]:
    """List a strategy and those that it wraps, outermost first."""
    found = [strategy]
    for layer in found:
        values = vars(layer).values()
        found += [v for v in values if isinstance(v, Strategy) and v not in found]
    return found


def check_returned(found: T | None, strategy: Strategy, hook: str) -> T:
    """Return what a hook of the strategy returned; raises RunError for None."""
    if found is None:
        raise RunError(
            f"{hook} of {type(strategy).__name__} returned None: let it return {_RETURNED[hook]}"
        )
    return found


def read_start_numbers(
    strategy: Strategy, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, float]:
    """Return the numbers among the arguments of the strategy's own ``start``, by name.

    A ``start`` with ``*args`` or ``**kwargs`` passes them on to Flower's, whose names count then,
    by position from the grid on.
    """
    given = signature(strategy.start).bind(*args, **kwargs)
    given.apply_defaults()
    found = dict(given.arguments)
    for name, parameter in given.signature.parameters.items():
        if parameter.kind is Parameter.VAR_KEYWORD:
            found |= found.pop(name)
        elif parameter.kind is Parameter.VAR_POSITIONAL and found.pop(name):
            grid = next((n for n, value in enumerate(args) if isinstance(value, Grid)), 0)
            names = [*signature(Strategy.start).parameters][1:]  # without self
            found = dict(zip(names, args[grid:], strict=False)) | found
    return {name: float(value) for name, value in found.items() if isinstance(value, Real)}


class _Hook:
    """The wrapper's method, even if the inner instance has an attribute of that name.

    An assignment to the name sets such an attribute of the inner strategy.
    """

    def __init__(self, name: str, method: Any) -> None:
        self._name, self._method = name, method

    def __get__(self, driver: object, kind: type) -> Any:
        return self._method

    def __set__(self, driver: object, value: Any) -> None:
        vars(driver)[self._name] = value


def make_driver(inner: Strategy, hooks: Strategy) -> Strategy:
    """Make a view of ``inner`` with five methods of ``hooks`` in place of its own.

    The result is an instance of a subclass of ``inner``'s class and shares its ``__dict__``, so
    what its ``start`` sets is set on ``inner``. Copying or unpickling it gives ``inner``.
    """
    kind = type(inner)
    body: dict[str, Any] = {name: _Hook(name, getattr(hooks, name)) for name in _HOOKS}
    body["__module__"], body["__qualname__"] = kind.__module__, kind.__qualname__
    body["__copy__"] = lambda _: copy(inner)
    body["__reduce__"] = lambda _: (_return_itself, (inner,))
    driven: Strategy = object.__new__(
        new_class(kind.__name__, (kind,), None, lambda own: own.update(body))
    )
    object.__setattr__(driven, "__dict__", vars(inner))
    return driven


def _return_itself(strategy: Strategy) -> Strategy:
    return strategy

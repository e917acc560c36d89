"""The strategy inside :class:`CollaPipe`: which ones it takes, and what it must know of them."""

from __future__ import annotations

from flwr.serverapp.strategy import FedXgbBagging, FedXgbCyclic, Strategy

from collapipe_flwr.core.errors import ConfigError

_LEGACY = "flwr.server.strategy"
_TREES = (FedXgbBagging, FedXgbCyclic)


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
    _check_wrapped(strategy, wrapper, split=split)


def _check_wrapped(strategy: Strategy, wrapper: type[Strategy], *, split: bool) -> None:
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
    """A strategy and those that it wraps, outermost first."""
    found = [strategy]
    for layer in found:
        values = vars(layer).values()
        found += [v for v in values if isinstance(v, Strategy) and v not in found]
    return found

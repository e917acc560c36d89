"""Flower's strategies by the names and arguments of a run-config.

The app itself decides on the number of nodes, the names of records, and how metrics are joined.
Strategies of boosted trees and those that need a mod in the ClientApp have no name in a run-config.
"""

from __future__ import annotations

from collections.abc import Mapping
from inspect import Parameter, signature
from typing import Any

from flwr.serverapp import strategy as strategies
from flwr.serverapp.strategy import FedAvg, Strategy

from collapipe_flwr.config.schema import STRATEGIES, AppConfig
from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.core.keys import read_assignments

_OURS = {"strategy", "accountant", "selection_rule", "fraction_evaluate", "train_loss_key"}
_OUR_ENDINGS = ("_nodes", "_key", "_aggr_fn")
_COUNT = "num_malicious_nodes"


def make_strategy(config: AppConfig, **own: Any) -> Strategy:
    """Make the strategy of a run; ``own`` are the arguments of every FedAvg.

    Raises ConfigError for arguments that its class does not take or refuses.
    """
    name = config.run.strategy
    kind = _find_class(name)
    given = read_assignments(config.run.strategy_arguments)
    chosen = {**_derive_defaults(name, config), **given}
    _check_arguments(name, given, chosen)
    _check_clusters(name, given, config.run.clusters)
    try:
        made: Strategy = (
            kind(**own, **chosen) if issubclass(kind, FedAvg) else kind(FedAvg(**own), **chosen)
        )
    except ValueError as error:
        raise ConfigError(f"strategy-arguments: {error}") from error
    return made


def _find_class(name: str) -> Any:
    return getattr(strategies, STRATEGIES[name])


def list_arguments(name: str) -> dict[str, Parameter]:
    """Return the arguments of a strategy that the run-config may set."""
    parameters = signature(_find_class(name).__init__).parameters.items()
    return {k: p for k, p in parameters if k != "self" and not _is_ours(k)}


def _is_ours(argument: str) -> bool:
    return argument in _OURS or (argument.endswith(_OUR_ENDINGS) and argument != _COUNT)


def _derive_defaults(name: str, config: AppConfig) -> dict[str, Any]:
    """Derive default arguments from the rest of the run-config."""
    if name.startswith("dp-"):
        return {"num_sampled_clients": config.run.clusters}
    if name == "qfedavg":
        rate = config.train.optimizer.learning_rate
        return {"client_learning_rate": rate}
    return {}


def _check_arguments(name: str, given: Mapping[str, object], chosen: Mapping[str, object]) -> None:
    known = list_arguments(name)
    for argument, value in given.items():
        if argument not in known:
            raise ConfigError(
                f"strategy-arguments: {name} has no argument {argument}; known: {', '.join(known)}"
            )
        whole = type(known[argument].default) is int
        if type(value) not in ((int,) if whole else (int, float)):
            wanted = "a whole number" if whole else "a number"
            raise ConfigError(f"strategy-arguments: {argument} must be {wanted}, got {value!r}")
    missing = [k for k, p in known.items() if p.default is p.empty and k not in chosen]
    if missing:
        raise ConfigError(
            f"strategy {name} needs {' and '.join(missing)}: set "
            f'strategy-arguments="{" ".join(f"{k}=..." for k in missing)}"'
        )


def _check_clusters(name: str, given: Mapping[str, object], clusters: int) -> None:
    """Raise ConfigError where Bulyan would drop every round: it needs 4 f + 3 replies."""
    if name != "bulyan":
        return
    malicious = int(str(given.get(_COUNT, 0)))
    if clusters < (needed := 4 * malicious + 3):
        raise ConfigError(
            f"strategy bulyan with {_COUNT}={malicious} needs {needed} clusters, clusters is "
            f"{clusters}: use more, or krum"
        )

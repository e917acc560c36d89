"""A user's optimizer, as a training loop makes it, as an `OptimizerConfig`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import partial
from glob import escape
from typing import Any

import torch
from torch import Tensor, nn

from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.pipeline.optimizer import OptimizerConfig, ParameterGroup
from collapipe_flwr.pipeline.update_rules import Argument, torch_names

_OF_A_SCHEDULER = "initial_lr"  # in the groups of an optimizer that torch's schedulers change


def optimizer_config(optimizer: object, model: nn.Module | None = None) -> OptimizerConfig:
    """The configuration of a class of torch.optim, a `functools.partial` of one, or an instance.

    An instance needs its ``model``, whose parameters it names; what it has learnt so far is not
    taken along. A configuration is returned as it is, a name stands for the optimizer of that name.
    Raises ConfigError for what an `OptimizerConfig` cannot express.
    """
    if isinstance(optimizer, OptimizerConfig):
        return optimizer
    if isinstance(optimizer, str):
        return OptimizerConfig(name=optimizer)
    if isinstance(optimizer, torch.optim.Optimizer):
        return _of_instance(optimizer, model)
    if not isinstance(optimizer, partial):
        return _of_arguments(optimizer, {})
    if optimizer.args:
        raise ConfigError(
            "an optimizer's arguments must be named, as partial(torch.optim.Adam, lr=1e-3)"
        )
    return _of_arguments(optimizer.func, optimizer.keywords)


def _of_arguments(kind: Any, given: Mapping[str, Any]) -> OptimizerConfig:
    name, defaults = _defaults(kind)
    return OptimizerConfig(name=name, **_split({"lr": defaults["lr"], **given}))


def _of_instance(optimizer: torch.optim.Optimizer, model: nn.Module | None) -> OptimizerConfig:
    if model is None:
        raise ConfigError(
            "an optimizer that was made already needs the model whose parameters it holds; "
            "functools.partial of its class needs none"
        )
    name, defaults = _defaults(type(optimizer))
    _check_parameters(optimizer, model)
    common = {k: optimizer.defaults[k] for k in defaults}
    given = {k: v for k, v in common.items() if k == "lr" or v != defaults[k]}
    names = _names(model)
    groups = []
    for group in optimizer.param_groups:
        own = {k: group[k] for k in defaults if group[k] != common[k]}
        if own:
            patterns = tuple(escape(name) for p in group["params"] for name in names[p])
            groups.append(ParameterGroup(patterns=patterns, **_split(own)))
    return OptimizerConfig(name=name, groups=tuple(groups), **_split(given))


def _defaults(kind: Any) -> tuple[str, dict[str, Any]]:
    """Name and default arguments of a class. Raises ConfigError unless it is of torch.optim."""
    name = getattr(kind, "__name__", repr(kind))
    if name not in torch_names() or getattr(torch.optim, name) is not kind:
        raise ConfigError(
            f"the optimizer must be a class of torch.optim, a functools.partial of one or an "
            f"instance, got {name}: stages know no other"
        )
    found = {n: p.default for n, p in inspect.signature(kind).parameters.items()}
    del found["params"]
    return name, found


def _split(given: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of torch as fields of a configuration."""
    found = {name: _plain(name, value) for name, value in given.items()}
    fields = {"lr": "learning_rate", "weight_decay": "weight_decay"}
    named = {fields[name]: value for name, value in found.items() if name in fields}
    return {**named, "arguments": {k: v for k, v in found.items() if k not in fields}}


def _plain(name: str, value: object) -> Argument:
    """A value as it travels; raises ConfigError for others than numbers, words and tuples."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return float(value)
    if isinstance(value, list | tuple):
        return tuple(_plain(name, v) for v in value)  # type: ignore[misc]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ConfigError(f"the optimizer's {name} must be a number, got {value!r}")


def _check_parameters(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Raise ConfigError unless it trains just what the model trains, at rates of its own."""
    names = _names(model)
    held = {p for group in optimizer.param_groups for p in group["params"]}
    if any(p not in names for p in held):
        raise ConfigError("the optimizer holds parameters that are not the model's")
    for parameter, (name, *_) in names.items():
        if parameter.requires_grad and parameter not in held:
            raise ConfigError(
                f"the optimizer leaves out {name}, which the model trains: add it, or set its "
                "requires_grad to False"
            )
    if any(_OF_A_SCHEDULER in group for group in optimizer.param_groups):
        raise ConfigError(
            "a scheduler of torch has changed the optimizer's learning rates; make the optimizer "
            "without it, and give OptimizerConfig a schedule"
        )


def _names(model: nn.Module) -> dict[Tensor, list[str]]:
    """The keys of each parameter; tied ones have several."""
    found: dict[Tensor, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found.setdefault(parameter, []).append(name)
    return found

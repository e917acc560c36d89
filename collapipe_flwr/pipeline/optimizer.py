"""The optimizer of a model in parts: the part of it that each stage runs.

A step of any optimizer here depends on one parameter at a time, so every stage updates its own
parameters and together they take the step of the unsplit model. Parameters are named by their keys
in the whole model's state dict, which are the same however it is cut.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from glob import escape
from typing import Any

import torch
from torch import Tensor, nn

from collapipe_flwr.core.errors import ConfigError, ModelError
from collapipe_flwr.pipeline.optimizer_names import Argument, Keywords
from collapipe_flwr.pipeline.optimizer_settings import START as START
from collapipe_flwr.pipeline.optimizer_settings import OptimizerConfig as OptimizerConfig
from collapipe_flwr.pipeline.optimizer_settings import ParameterGroup as ParameterGroup
from collapipe_flwr.pipeline.update_rules import (
    list_torch_names,
    make_optimizer,
    name_state,
    select_tensors,
)


class Optimizer:
    """Updates the parameters of one part, and holds their state between steps.

    Takes named parameters; those that are frozen are left out, and those without gradient keep
    their values and state in a step.
    """

    def __init__(self, settings: OptimizerConfig, parameters: Iterable[tuple[str, Tensor]]) -> None:
        self.settings = settings
        trained = [(name, p) for name, p in parameters if p.requires_grad]
        self.by_name = dict(trained)
        if len(self.by_name) < len(trained):
            raise ModelError("two parameters have the same name")
        self.parameters = tuple(self.by_name.values())
        self._collect_keywords = {name: settings.keywords(name) for name in self.by_name}
        kinds: list[Keywords] = []
        for keywords in self._collect_keywords.values():
            if keywords not in kinds:
                kinds.append(keywords)
        groups: list[dict[str, Any]] = [
            {
                "params": [
                    self.by_name[n] for n, own in self._collect_keywords.items() if own == kind
                ],
                **kind,
            }
            for kind in kinds
        ]
        self._rates = [group["lr"] for group in groups]
        # torch refuses an optimizer of nothing
        self._torch = make_optimizer(settings.name, groups) if groups else None
        self._start: dict[str, Tensor] = {}  # the round's first weights, where they are needed

    def step(self, rate: float = 1.0) -> None:
        """Apply the accumulated gradients once, with ``rate`` times the learning rates."""
        if self._torch is not None:
            for group, own_rate in zip(self._torch.param_groups, self._rates, strict=True):
                group["lr"] = own_rate * rate
            self._torch.step()

    def add_proximal(self, names: Iterable[str] | None = None) -> None:
        """Add the gradients of the proximal term; None stands for all parameters.

        Like autograd, it also gives a gradient to parameters without one. Call it before every
        step: before the first one it notes the weights that the round began with.
        """
        mu = self.settings.proximal_mu
        if not mu:
            return
        for name in self.by_name.keys() - self._start.keys():
            self._start[name] = self.by_name[name].detach().clone()
        for name in self.by_name if names is None else names:
            parameter = self.by_name[name]
            pull = torch.sub(parameter.detach(), self._start[name]).mul_(mu)
            parameter.grad = pull if parameter.grad is None else parameter.grad.add_(pull)

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    @property
    def num_states(self) -> int:
        """The number of entries of `collect_state`, which grows only."""
        return len(self._start) + (0 if self._torch is None else len(self._torch.state))

    def collect_state(self) -> dict[str, tuple[Tensor, ...]]:
        """Return the state by key: for adamw (step, mean, square), for sgd (buffer).

        With a proximal term also the weights that the round began with, by `START` and key.
        """
        kept: Mapping[Tensor, Any] = {} if self._torch is None else self._torch.state
        found = {
            name: tuple(select_tensors(kept[p]).values())
            for name, p in self.by_name.items()
            if kept.get(p)
        }
        return {**found, **{START + name: (tensor,) for name, tensor in self._start.items()}}

    def load_state(self, state: Mapping[str, tuple[Tensor, ...]], *, copy: bool = True) -> None:
        """Continue from an earlier `collect_state`; without `copy`, in the given tensors."""
        for name, tensors in state.items():
            own = tuple(t.clone() for t in tensors) if copy else tensors
            if name.startswith(START):
                (begun,), key = own, name.removeprefix(START)
                self._start[key] = begun.to(self.by_name[key].device)
            else:
                assert self._torch is not None
                parameter, rule = self.by_name[name], self.settings.name
                self._torch.state[parameter] = name_state(
                    rule, self._collect_keywords[name], parameter, own
                )

    def make_meta_state(self) -> dict[str, tuple[Tensor, ...]]:
        """Return the state as meta tensors, see `OptimizerConfig.make_meta_states`."""
        return self.settings.make_meta_states(
            {name: (p.shape, p.dtype) for name, p in self.by_name.items()}
        )


def optimizer_config(optimizer: object, model: nn.Module | None = None) -> OptimizerConfig:
    """Read a class of torch.optim, a `functools.partial` of one, or an instance.

    An instance needs its ``model``, whose parameters it names; its state is ignored. A
    configuration is returned as it is, a name stands for the optimizer of that name. Raises
    ConfigError for what an `OptimizerConfig` cannot express.
    """
    if isinstance(optimizer, OptimizerConfig):
        return optimizer
    if isinstance(optimizer, str):
        return OptimizerConfig(name=optimizer)
    if isinstance(optimizer, torch.optim.Optimizer):
        return _read_instance(optimizer, model)
    kind, given = optimizer, dict[str, Any]()
    if isinstance(optimizer, partial):
        if optimizer.args:
            raise ConfigError(
                "an optimizer's arguments must be named, as partial(torch.optim.Adam, lr=1e-3)"
            )
        kind, given = optimizer.func, optimizer.keywords
    name, defaults = _read_defaults(kind)
    return OptimizerConfig(name=name, **_split({"lr": defaults["lr"], **given}))


def _read_instance(optimizer: torch.optim.Optimizer, model: nn.Module | None) -> OptimizerConfig:
    if model is None:
        raise ConfigError(
            "an optimizer that was made already needs the model whose parameters it holds; "
            "functools.partial of its class needs none"
        )
    name, defaults = _read_defaults(type(optimizer))
    names: dict[Tensor, list[str]] = {}  # tied parameters have several
    for full_name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(full_name)
    _check_parameters(optimizer, names)
    _check_hidden(optimizer, name, defaults)
    common = {k: optimizer.defaults[k] for k in defaults}
    given = {k: v for k, v in common.items() if k == "lr" or v != defaults[k]}
    groups = []
    for group in optimizer.param_groups:
        own = {k: group[k] for k in defaults if group[k] != common[k]}
        if own:
            patterns = tuple(escape(name) for p in group["params"] for name in names[p])
            groups.append(ParameterGroup(patterns=patterns, **_split(own)))
    return OptimizerConfig(name=name, groups=tuple(groups), **_split(given))


def _read_defaults(kind: Any) -> tuple[str, dict[str, Any]]:
    """Read name and default arguments of a class. Raises ConfigError if not of torch.optim."""
    name = getattr(kind, "__name__", repr(kind))
    if name not in list_torch_names() or getattr(torch.optim, name) is not kind:
        raise ConfigError(
            f"the optimizer must be a class of torch.optim, a functools.partial of one or an "
            f"instance, got {name}: stages know no other"
        )
    found = {n: p.default for n, p in inspect.signature(kind).parameters.items()}
    del found["params"]
    return name, found


def _split(given: Mapping[str, Any]) -> dict[str, Any]:
    """Turn arguments of torch into fields of a configuration."""
    found = {name: _convert(name, value) for name, value in given.items()}
    fields = {"lr": "learning_rate", "weight_decay": "weight_decay"}
    named = {fields[name]: value for name, value in found.items() if name in fields}
    return {**named, "arguments": {k: v for k, v in found.items() if k not in fields}}


def _convert(name: str, value: object) -> Argument:
    """Convert a value to send; raises ConfigError if it is no number, string or tuple."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return float(value)
    if isinstance(value, list | tuple):
        return tuple(_convert(name, v) for v in value)  # type: ignore[misc]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ConfigError(f"the optimizer's {name} must be a number, got {value!r}")


def _check_hidden(
    optimizer: torch.optim.Optimizer, name: str, arguments: Mapping[str, object]
) -> None:
    """Raise ConfigError where a group sets an option that the class takes no argument for."""
    for group in optimizer.param_groups:
        for hidden in optimizer.defaults.keys() - arguments.keys():
            if group[hidden] != optimizer.defaults[hidden]:
                raise ConfigError(
                    f"a parameter group of the optimizer has {hidden}={group[hidden]!r}, which is "
                    f"no argument of {name}: use the class that has it"
                )


def _check_parameters(
    optimizer: torch.optim.Optimizer, names: Mapping[Tensor, Sequence[str]]
) -> None:
    """Raise ConfigError unless it trains what the model trains, at unscheduled rates."""
    held = {p for group in optimizer.param_groups for p in group["params"]}
    if any(p not in names for p in held):
        raise ConfigError("the optimizer holds parameters that are not the model's")
    for parameter, (name, *_) in names.items():
        if parameter.requires_grad and parameter not in held:
            raise ConfigError(
                f"the optimizer leaves out {name}, which the model trains: add it, or set its "
                "requires_grad to False"
            )
    if any("initial_lr" in group for group in optimizer.param_groups):  # as schedulers note it
        raise ConfigError(
            "a scheduler of torch has changed the optimizer's learning rates; make the optimizer "
            "without it, and give OptimizerConfig a schedule"
        )

"""The optimizer of a model in parts: its configuration, and the part of it that each stage runs.

A step of any optimizer here depends on one parameter at a time, so every stage updates its own
parameters and together they take the step of the unsplit model. Parameters are named by their keys
in the whole model's state dict, which are the same however it is cut.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from functools import partial
from glob import escape, has_magic
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from collapipe_flwr.core.errors import ConfigError, ModelError
from collapipe_flwr.core.keys import Rule, above, assignments, at_least, key, read_assignments
from collapipe_flwr.pipeline.update_rules import (
    FUSED,
    Argument,
    Keywords,
    check_arguments,
    check_name,
    check_of_group,
    check_overridden,
    check_schedule,
    empty_state,
    factor_of,
    known_arguments,
    make_optimizer,
    state_by_name,
    tensors_in,
    torch_names,
)

START = "start/"  # no module path holds a slash
_OWNERS = {"betas": "adamw", "eps": "adamw", "momentum": "sgd"}  # fields of one rule only


def _frozen(value: Any) -> Argument:
    return tuple(value) if isinstance(value, list) else value


def _read_arguments(text: str) -> dict[str, Argument]:
    if not assignments().holds(text):
        raise ValueError(text)
    return {name: _frozen(value) for name, value in read_assignments(text).items()}


def _write_arguments(arguments: Keywords) -> str:
    compact = {k: json.dumps(v, separators=(",", ":")) for k, v in arguments.items()}
    return " ".join(f"{name}={value}" for name, value in compact.items())


_ARGUMENTS = Rule(
    lambda _: True,
    'must read like "momentum=0.9 nesterov=true betas=[0.9,0.95]"',
    read=_read_arguments,
    write=_write_arguments,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterGroup:
    """Settings of the parameters whose keys match one of `patterns` (as `fnmatch`).

    What is None or not named is as for all other parameters.
    """

    patterns: tuple[str, ...]
    learning_rate: float | None = None
    weight_decay: float | None = None
    arguments: Mapping[str, Argument] = field(default_factory=dict, hash=False)

    def matches(self, name: str) -> bool:
        if name in self.patterns:
            return True
        # a user's instance names hundreds of parameters, and compiling a pattern is slow
        return any(fnmatchcase(name, pattern) for pattern in self.patterns if has_magic(pattern))


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """How gradients turn into weights, on all stages.

    ``name`` is ``adamw`` or ``sgd`` (fused operators), or a class of torch.optim; ``arguments`` are
    its keyword arguments. Without a ``weight_decay`` the class uses its own default, adamw 0.01 and
    sgd 0. A parameter belongs to the first of ``groups`` that matches its key. ``betas``,
    ``eps`` are for adamw, ``momentum`` for sgd.

    All learning rates are multiplied by the factor of ``schedule`` (see `factor_of`), whose
    ``total_steps`` are the batches of the round if they are 0. ``proximal_mu`` is that of FedProx:
    the loss of every step has the term mu/2 * |w - w0|^2, where w0 are the weights that the round
    began with.

    Raises ConfigError for a name or an argument that does not exist or cannot be used.
    """

    name: str = key("adamw", name="optimizer")
    learning_rate: float = key(1e-3, above(0))
    weight_decay: float | None = key(None, at_least(0))
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    momentum: float = 0.0
    arguments: Mapping[str, Argument] = key({}, _ARGUMENTS, name="optimizer-arguments")
    groups: tuple[ParameterGroup, ...] = ()
    schedule: str = "constant"
    warmup_steps: int = 0
    total_steps: int = 0
    proximal_mu: float = 0.0

    def __post_init__(self) -> None:
        check_name(self.name)
        check_schedule(self.schedule)
        if not (self.warmup_steps >= 0 and self.total_steps >= 0):
            raise ConfigError(
                f"warmup_steps and total_steps must be >= 0, got {self.warmup_steps} and "
                f"{self.total_steps}"
            )
        if not 0 <= self.proximal_mu < math.inf:
            raise ConfigError(f"proximal_mu must be >= 0, got {self.proximal_mu}")
        if self.name not in FUSED:
            self._check_fields()
        check_overridden(self.arguments, self.weight_decay)
        for group in self.groups:
            check_overridden(group.arguments, group.weight_decay)
            check_of_group(self.name, group.arguments)
        for keywords in (self._keywords(None), *map(self._keywords, self.groups)):
            rate: Any = keywords["lr"]
            if not rate >= 0:
                raise ConfigError(f"learning rate must be >= 0, got {rate}")
            check_arguments(self.name, keywords)

    def keywords(self, name: str) -> Keywords:
        """All arguments, ``lr`` and defaults included, for the parameter with this key."""
        return self._keywords(next((g for g in self.groups if g.matches(name)), None))

    def rates(self, *, first: int = 0, batches: int = 0) -> Iterator[float]:
        """The factors of a round's steps from number ``first`` on; 0 ``batches``: unknown.

        Raises ConfigError as `factor_of`.
        """
        total = self.total_steps or batches
        return map(factor_of(self.schedule, self.warmup_steps, total), count(first))

    def with_learning_rate(self, rate: float) -> OptimizerConfig:
        """The same with another rate; those of groups keep their ratio to it.

        Raises ConfigError where groups have rates of their own and this one is 0.
        """
        if any(group.learning_rate for group in self.groups) and not self.learning_rate:
            raise ConfigError("parameter groups cannot keep their ratio to a learning rate of 0")
        groups = tuple(
            replace(group, learning_rate=group.learning_rate * rate / self.learning_rate)
            if group.learning_rate
            else group
            for group in self.groups
        )
        return replace(self, learning_rate=rate, groups=groups)

    def state_bytes(self, parameters: Mapping[str, tuple[torch.Size, torch.dtype]]) -> int:
        """Bytes of the state of such parameters, without counters of a few bytes each."""
        kept = self.empty_states(parameters).values()
        return sum(tensor.nbytes for tensors in kept for tensor in tensors if tensor.dim())

    def empty_states(
        self, parameters: Mapping[str, tuple[torch.Size, torch.dtype]]
    ) -> dict[str, tuple[Tensor, ...]]:
        """The state of every parameter as meta tensors, for its shapes and dtypes."""
        found = {
            name: empty_state(self.name, self.keywords(name), shape, dtype)
            for name, (shape, dtype) in parameters.items()
        }
        if self.proximal_mu:
            for name, (shape, dtype) in parameters.items():
                found[START + name] = (torch.empty(shape, dtype=dtype, device="meta"),)
        return found

    def _keywords(self, group: ParameterGroup | None) -> Keywords:
        own = {name: getattr(self, name) for name, owner in _OWNERS.items() if owner == self.name}
        # All of them: torch fills what a group lacks with the arguments of another group.
        known = known_arguments(self.name)
        chosen = {**known, **own, **_given(self)}
        if group is not None:
            chosen |= _given(group)
        if not chosen.get("weight_decay") and "weight_decay" not in known:
            chosen.pop("weight_decay", None)  # 0 is what such a class does
        return chosen

    def _check_fields(self) -> None:
        defaults = {field_.name: field_.default for field_ in fields(self)}
        for name, owner in _OWNERS.items():
            if getattr(self, name) != defaults[name]:
                raise ConfigError(
                    f"{name} is for the optimizer {owner}; {self.name} takes its own as "
                    f"arguments={{{name!r}: {getattr(self, name)!r}}}"
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
        self._keywords = {name: settings.keywords(name) for name in self.by_name}
        kinds: list[Keywords] = []
        for keywords in self._keywords.values():
            if keywords not in kinds:
                kinds.append(keywords)
        groups: list[dict[str, Any]] = [
            {
                "params": [self.by_name[n] for n, own in self._keywords.items() if own == kind],
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

        As autograd would, it gives those without gradient one, too. To be called before every step,
        also before the first one, whose weights are those that the round began with.
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

    def state_tensors(self) -> dict[str, tuple[Tensor, ...]]:
        """The state by key: for adamw (step, mean, square), for sgd (buffer).

        With a proximal term also the weights that the round began with, by `START` and key.
        """
        kept: Mapping[Tensor, Any] = {} if self._torch is None else self._torch.state
        found = {
            name: tuple(tensors_in(kept[p]).values())
            for name, p in self.by_name.items()
            if kept.get(p)
        }
        return {**found, **{START + name: (tensor,) for name, tensor in self._start.items()}}

    def load_state_tensors(
        self, state: Mapping[str, tuple[Tensor, ...]], *, copy: bool = True
    ) -> None:
        """Continue from an earlier `state_tensors`; without `copy`, in the given tensors."""
        for name, tensors in state.items():
            own = tuple(t.clone() for t in tensors) if copy else tensors
            if name.startswith(START):
                (begun,), key = own, name.removeprefix(START)
                self._start[key] = begun.to(self.by_name[key].device)
            else:
                assert self._torch is not None
                parameter, rule = self.by_name[name], self.settings.name
                self._torch.state[parameter] = state_by_name(
                    rule, self._keywords[name], parameter, own
                )

    def empty_state(self) -> dict[str, tuple[Tensor, ...]]:
        """See `OptimizerConfig.empty_states`."""
        return self.settings.empty_states(
            {name: (p.shape, p.dtype) for name, p in self.by_name.items()}
        )


def _given(config: OptimizerConfig | ParameterGroup) -> dict[str, Argument]:
    found = {name: _frozen(value) for name, value in config.arguments.items()}
    named = {"lr": config.learning_rate, "weight_decay": config.weight_decay}
    return {**found, **{name: value for name, value in named.items() if value is not None}}


def optimizer_config(optimizer: object, model: nn.Module | None = None) -> OptimizerConfig:
    """The configuration of a class of torch.optim, a `functools.partial` of one, or an instance.

    An instance needs its ``model``, whose parameters it names; its state is not taken along. A
    configuration is returned as it is, a name stands for the optimizer of that name. Raises
    ConfigError for what an `OptimizerConfig` cannot express.
    """
    if isinstance(optimizer, OptimizerConfig):
        return optimizer
    if isinstance(optimizer, str):
        return OptimizerConfig(name=optimizer)
    if isinstance(optimizer, torch.optim.Optimizer):
        return _of_instance(optimizer, model)
    kind, given = optimizer, dict[str, Any]()
    if isinstance(optimizer, partial):
        if optimizer.args:
            raise ConfigError(
                "an optimizer's arguments must be named, as partial(torch.optim.Adam, lr=1e-3)"
            )
        kind, given = optimizer.func, optimizer.keywords
    name, defaults = _defaults(kind)
    return OptimizerConfig(name=name, **_split({"lr": defaults["lr"], **given}))


def _of_instance(optimizer: torch.optim.Optimizer, model: nn.Module | None) -> OptimizerConfig:
    if model is None:
        raise ConfigError(
            "an optimizer that was made already needs the model whose parameters it holds; "
            "functools.partial of its class needs none"
        )
    name, defaults = _defaults(type(optimizer))
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
    """A value as it is sent; raises ConfigError for others than numbers, strings and tuples."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return float(value)
    if isinstance(value, list | tuple):
        return tuple(_plain(name, v) for v in value)  # type: ignore[misc]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ConfigError(f"the optimizer's {name} must be a number, got {value!r}")


def _check_hidden(
    optimizer: torch.optim.Optimizer, name: str, arguments: Mapping[str, object]
) -> None:
    """Raise ConfigError where a group sets what the class itself takes no argument for."""
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

"""The configuration of an optimizer, checked without loading torch where that can be.

torch is asked about its own classes, and about arguments of ``adamw`` and ``sgd`` other than
learning rate and weight decay.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import cache
from glob import has_magic
from itertools import count
from typing import TYPE_CHECKING, Any

from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.core.imports import list_declared_names
from collapipe_flwr.core.keys import (
    Rule,
    above,
    assignments,
    at_least,
    check_types,
    key,
    read_assignments,
)
from collapipe_flwr.pipeline.optimizer_names import (
    FUSED,
    LEARNING_RATE_SCHEDULES,
    Argument,
    Keywords,
)

if TYPE_CHECKING:  # slow to import
    import torch
    from torch import Tensor

START = "start/"  # no module path holds a slash
_NO_RULES = ("Optimizer",)  # classes that torch.optim lists besides
_REFUSED = {
    "LBFGS": "it searches along all weights together, and no stage has them all",
    "SparseAdam": "it takes sparse gradients only, and stages exchange dense ones",
}
_KEYS = {"lr": "learning_rate", "weight_decay": "weight_decay"}  # arguments with own fields
_OF_ALL = {"Adagrad": ("initial_accumulator_value",)}  # arguments that groups cannot set
_SWITCHES = ("foreach", "fused")  # None stands for torch's own choice
_OWNERS = {"betas": "adamw", "eps": "adamw", "momentum": "sgd"}  # fields of one rule only


def _freeze(value: Any) -> Argument:
    return tuple(value) if isinstance(value, list) else value


def _read_arguments(text: str) -> dict[str, Argument]:
    if not assignments().holds(text):
        raise ValueError(text)
    return {name: _freeze(value) for name, value in read_assignments(text).items()}


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

    None, and an argument that is not named, stand for the value of all other parameters.
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

    All learning rates are multiplied by the factor of ``schedule`` (see `make_factor`), whose
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
        check_types(self, "")
        _check_name(self.name)
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
        _check_overridden(self.arguments, self.weight_decay)
        for group in self.groups:
            _check_overridden(group.arguments, group.weight_decay)
            _check_of_group(self.name, group.arguments)
        for keywords in (self._collect_keywords(None), *map(self._collect_keywords, self.groups)):
            rate: Any = keywords["lr"]
            if not rate >= 0:
                raise ConfigError(f"learning rate must be >= 0, got {rate}")
            _check_arguments(self.name, keywords)

    def keywords(self, name: str) -> Keywords:
        """Return all arguments, ``lr`` and defaults included, for the parameter with this key."""
        return self._collect_keywords(next((g for g in self.groups if g.matches(name)), None))

    def rates(self, *, first: int = 0, batches: int = 0) -> Iterator[float]:
        """Yield the factors of a round's steps from number ``first`` on; 0 ``batches``: unknown.

        Raises ConfigError as `make_factor`.
        """
        from collapipe_flwr.pipeline.update_rules import make_factor

        total = self.total_steps or batches
        return map(make_factor(self.schedule, self.warmup_steps, total), count(first))

    def with_learning_rate(self, rate: float) -> OptimizerConfig:
        """Return a copy with another rate; those of groups keep their ratio to it.

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
        """Count the bytes of such parameters' state, without counters of a few bytes each."""
        kept = self.make_meta_states(parameters).values()
        return sum(tensor.nbytes for tensors in kept for tensor in tensors if tensor.dim())

    def make_meta_states(
        self, parameters: Mapping[str, tuple[torch.Size, torch.dtype]]
    ) -> dict[str, tuple[Tensor, ...]]:
        """Return every parameter's state as meta tensors, for its shapes and dtypes."""
        import torch

        from collapipe_flwr.pipeline.update_rules import make_meta_state

        found = {
            name: make_meta_state(self.name, self.keywords(name), shape, dtype)
            for name, (shape, dtype) in parameters.items()
        }
        if self.proximal_mu:
            for name, (shape, dtype) in parameters.items():
                found[START + name] = (torch.empty(shape, dtype=dtype, device="meta"),)
        return found

    def _collect_keywords(self, group: ParameterGroup | None) -> Keywords:
        own = {name: getattr(self, name) for name, owner in _OWNERS.items() if owner == self.name}
        # All of them: torch fills what a group lacks with the arguments of another group.
        known = _known_arguments(self.name)
        chosen = {**known, **own, **_collect_given(self)}
        if group is not None:
            chosen |= _collect_given(group)
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


def _collect_given(config: OptimizerConfig | ParameterGroup) -> dict[str, Argument]:
    found = {name: _freeze(value) for name, value in config.arguments.items()}
    named = {"lr": config.learning_rate, "weight_decay": config.weight_decay}
    return {**found, **{name: value for name, value in named.items() if value is not None}}


@cache
def list_rule_names() -> tuple[str, ...]:
    """Return the names of all optimizers that can train a model in parts."""
    listed = list_declared_names("torch", "optim/__init__.py")
    kinds = sorted(name for name in listed if name[0].isupper() and name not in _NO_RULES)
    return (*FUSED, *(name for name in kinds if name not in _REFUSED))


def _check_name(name: str) -> None:
    """Raise ConfigError for an optimizer that does not exist, or not for a model in parts."""
    if name in _REFUSED:
        raise ConfigError(f"optimizer {name} cannot train a model in parts: {_REFUSED[name]}")
    if name not in list_rule_names():
        near = get_close_matches(name, list_rule_names(), n=1)
        hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(list_rule_names())}"
        raise ConfigError(f"optimizer {name!r} is unknown; {hint}")


def _check_arguments(name: str, keywords: Keywords) -> None:
    """Raise ConfigError for arguments that the optimizer does not have, or values it refuses."""
    known = _known_arguments(name)
    for argument, value in keywords.items():
        if argument not in (*known, "lr"):
            raise ConfigError(
                f"optimizer {name} has no argument {argument!r}; it knows {', '.join(known)}"
            )
        if wanted := _explain_kind(argument, value, known.get(argument)):
            raise ConfigError(f"optimizer {name}: {argument} must be {wanted}, got {value!r}")
    usual = {**FUSED.get(name, {}), **{k: v for k, v in keywords.items() if _is_amount(k, v)}}
    if name in FUSED and keywords == usual:
        return
    from collapipe_flwr.pipeline.update_rules import try_out

    try_out(name, keywords)


def _is_amount(argument: str, value: object) -> bool:
    """Return whether it is a learning rate or a weight decay that every optimizer takes."""
    return argument in _KEYS and isinstance(value, int | float) and value >= 0


def _known_arguments(name: str) -> Keywords:
    """Return the keyword arguments of an optimizer but ``lr``, and their defaults."""
    if name in FUSED:
        return FUSED[name]
    from collapipe_flwr.pipeline.update_rules import list_arguments

    return list_arguments(name)


def _explain_kind(argument: str, value: object, default: Argument) -> str:
    """Say what an argument must be instead of a value that torch would take for another."""
    if isinstance(default, bool) or argument in _SWITCHES:
        return "" if value is None or isinstance(value, int) else "true or false"
    if isinstance(default, tuple):
        fits = isinstance(value, tuple | list) and len(value) == len(default)
        return "" if fits else f"a list of {len(default)}, such as {list(default)}"
    return ""


def _check_overridden(arguments: Keywords, weight_decay: float | None) -> None:
    """Raise ConfigError for an argument that its own field would override."""
    for argument, name in _KEYS.items():
        is_set = argument == "lr" or weight_decay is not None
        if is_set and argument in arguments:
            raise ConfigError(
                f"the optimizer's arguments may not hold {argument}={arguments[argument]!r}: set "
                f"train.{name.replace('_', '-')} instead, or in a program {name}"
            )


def _check_of_group(name: str, arguments: Keywords) -> None:
    """Raise ConfigError for an argument of a group that torch reads from the optimizer only."""
    for argument in _OF_ALL.get(name, ()):
        if argument in arguments:
            raise ConfigError(
                f"optimizer {name} has one {argument} for all parameters, and a group asks for "
                f"{arguments[argument]!r}: give it to the optimizer"
            )


def check_schedule(schedule: str) -> None:
    """Raise ConfigError unless it names a schedule or looks like ``module:function``."""
    module, colon, name = schedule.partition(":")
    path = [*module.split("."), name]
    known = LEARNING_RATE_SCHEDULES
    if schedule in known or (colon and all(part.isidentifier() for part in path)):
        return
    near = get_close_matches(schedule, known, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise ConfigError(
        f"schedule must be one of {', '.join(known)} or the path of a function, as "
        f"my_app.task:factor, got {schedule!r}{hint}"
    )

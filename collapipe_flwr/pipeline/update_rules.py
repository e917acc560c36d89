"""How gradients turn into weights: by the classes of torch.optim, whose steps they are to the bit.

``adamw`` is `torch.optim.AdamW` and ``sgd`` is `torch.optim.SGD`, each in one fused operator per
step; torch's own fused SGD refuses a parameter whose first gradient comes after that of others. The
constructors and ``step`` methods of torch's classes import a compiler (70 MB and seconds on a small
board) that neither needs; see `_light`.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim.sgd import sgd

from collapipe_flwr.core.errors import ConfigError

Argument = tuple[float | None, ...] | bool | int | float | str | None
Keywords = Mapping[str, Argument]

FUSED: Mapping[str, Keywords] = {
    "adamw": {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01},
    "sgd": {"momentum": 0.0, "nesterov": False, "weight_decay": 0.01},
}
_REFUSED = {
    "LBFGS": "it searches along all weights together, and no stage has them all",
    "SparseAdam": "it takes sparse gradients only, and stages exchange dense ones",
}
_NOT_ARGUMENTS = {"self", "params", "lr", "differentiable", "capturable"}
_OF_TORCH = {"adamw": "AdamW", "sgd": "SGD"}  # whose constructors check the arguments
_Slot = tuple[str, tuple[int, ...], torch.dtype]  # name, shape, dtype
_STEP = "step"  # in a state of torch.optim
_EXACT_FUSED = (torch.float32, torch.float64)  # others get wrong momenta of a fused SGD on CPUs
_PROBE_SIZES = (2, 3, 5, 7, 11, 13, 17, 19)


@dataclass(frozen=True, slots=True)
class Group:
    """Parameters that one set of keyword arguments, with ``lr``, holds for."""

    parameters: tuple[Tensor, ...]
    keywords: Keywords


class UpdateRule(ABC):
    """The update of the parameters in some groups, and the state that it keeps for each."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self.groups = groups

    @abstractmethod
    def step(self, factor: float) -> None:
        """Update every parameter that has a gradient; ``factor`` scales the learning rates."""

    @abstractmethod
    def state_of(self, parameter: Tensor) -> tuple[Tensor, ...] | None:
        """The tensors kept for one parameter; None before its first step."""

    @abstractmethod
    def set_state(self, parameter: Tensor, state: tuple[Tensor, ...]) -> None:
        """Continue from what `state_of` gave."""


def rule_names() -> tuple[str, ...]:
    """All names of `make_rule`."""
    return (*FUSED, *(name for name in torch_names() if name not in _REFUSED))


@cache
def torch_names() -> tuple[str, ...]:
    """The optimizers of torch.optim."""
    base, found = torch.optim.Optimizer, vars(torch.optim).items()
    kinds = {n: k for n, k in found if isinstance(k, type) and issubclass(k, base)}
    return tuple(sorted(name for name, kind in kinds.items() if kind is not base))


def make_rule(name: str, groups: Sequence[Group]) -> UpdateRule:
    """The rule of that name; raises ConfigError for arguments that torch refuses."""
    if name == "sgd":
        return FusedSgd(groups)
    if name == "adamw":
        return TorchRule("AdamW", [Group(g.parameters, _fused(g.keywords)) for g in groups])
    return TorchRule(name, groups)


def _fused(keywords: Keywords) -> Keywords:
    return {**keywords, "fused": True}


@cache
def known_arguments(name: str) -> tuple[str, ...]:
    """The keyword arguments of a rule, besides ``lr``."""
    if name in FUSED:
        return tuple(FUSED[name])
    return tuple(n for n in inspect.signature(_class(name)).parameters if n not in _NOT_ARGUMENTS)


def check_name(name: str) -> None:
    """Raise ConfigError for a rule that does not exist, or not for a model in parts."""
    if name in _REFUSED:
        raise ConfigError(f"optimizer {name} cannot train a model in parts: {_REFUSED[name]}")
    if name not in rule_names():
        near = get_close_matches(name, rule_names(), n=1)
        hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(rule_names())}"
        raise ConfigError(f"optimizer {name!r} is unknown; {hint}")


def check_arguments(name: str, keywords: Keywords) -> None:
    """Raise ConfigError for arguments that the rule does not have, or values that it refuses."""
    known = known_arguments(name)
    for argument in keywords:
        if argument not in (*known, "lr"):
            raise ConfigError(
                f"optimizer {name} has no argument {argument!r}; it knows {', '.join(known)}"
            )
    matrix = torch.nn.Parameter(torch.zeros(2, 2))  # Muon asks for one
    make_rule(_OF_TORCH.get(name, name), [Group((matrix,), keywords)])


def empty_state(
    name: str, keywords: Keywords, shape: torch.Size, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """The state of one parameter as meta tensors, for its shapes and dtypes."""
    if name == "sgd":
        return FusedSgd.initial(torch.empty(shape, dtype=dtype, device="meta"), keywords)
    if name == "adamw":
        name, keywords = "AdamW", _fused(keywords)
    kept = _kept(name, keywords, shape, dtype)
    return tuple(torch.empty(size, dtype=dtype, device="meta") for _, size, dtype in kept)


def number(keywords: Keywords, name: str) -> float:
    """An argument that is a number."""
    value = keywords[name]
    assert isinstance(value, int | float)
    return value


class FusedSgd(UpdateRule):
    """State: the momentum buffer, if there is momentum."""

    def __init__(self, groups: Sequence[Group]) -> None:
        super().__init__(groups)
        self._state: dict[Tensor, tuple[Tensor, ...]] = {}

    def step(self, factor: float) -> None:
        """One operator for all tensors of a group, dtype and device."""
        for group in self.groups:
            rate = number(group.keywords, "lr") * factor
            for weights in _alike([p for p in group.parameters if p.grad is not None]):
                self._update(weights, group.keywords, rate)

    def _update(self, weights: list[Tensor], keywords: Keywords, rate: float) -> None:
        for weight in weights:
            if weight not in self._state:
                self._state[weight] = self.initial(weight, keywords)
        sgd(
            [weight.detach() for weight in weights],
            [_grad(weight) for weight in weights],
            [buffer for weight in weights for buffer in self._state[weight]]
            or [None] * len(weights),
            fused=weights[0].dtype in _EXACT_FUSED,
            weight_decay=number(keywords, "weight_decay"),
            momentum=number(keywords, "momentum"),
            lr=rate,
            dampening=0.0,
            nesterov=bool(keywords["nesterov"]),
            maximize=False,
        )

    def state_of(self, parameter: Tensor) -> tuple[Tensor, ...] | None:
        return self._state.get(parameter)

    def set_state(self, parameter: Tensor, state: tuple[Tensor, ...]) -> None:
        self._state[parameter] = tuple(tensor.to(parameter.device) for tensor in state)

    @staticmethod
    def initial(weight: Tensor, keywords: Keywords) -> tuple[Tensor, ...]:
        """The state before the first step."""
        return (torch.zeros_like(weight),) if keywords["momentum"] else ()


class TorchRule(UpdateRule):
    """A class of torch.optim."""

    def __init__(self, name: str, groups: Sequence[Group]) -> None:
        super().__init__([group for group in groups if group.parameters])
        self._name = name
        self._keywords = {p: group.keywords for group in self.groups for p in group.parameters}
        self._optimizer: torch.optim.Optimizer | None = None
        if self.groups:  # torch refuses an optimizer of nothing
            self._optimizer = _construct(name, self.groups)

    def step(self, factor: float) -> None:
        if self._optimizer is None:
            return
        for group, given in zip(self._optimizer.param_groups, self.groups, strict=True):
            group["lr"] = number(given.keywords, "lr") * factor
        self._optimizer.step()

    def state_of(self, parameter: Tensor) -> tuple[Tensor, ...] | None:
        assert self._optimizer is not None
        found = self._optimizer.state.get(parameter)
        return tuple(_tensors(found).values()) if found else None

    def set_state(self, parameter: Tensor, state: tuple[Tensor, ...]) -> None:
        assert self._optimizer is not None
        keywords = self._keywords[parameter]
        kept = _kept(self._name, keywords, parameter.shape, parameter.dtype)
        # As torch loads them: steps are counted on the CPU, unless one operator does it all.
        counts_there = bool(keywords.get("fused"))
        self._optimizer.state[parameter] = {
            name: tensor if name == _STEP and not counts_there else tensor.to(parameter.device)
            for (name, _, _), tensor in zip(kept, state, strict=True)
        }


def _construct(name: str, groups: Sequence[Group]) -> torch.optim.Optimizer:
    given = [{"params": list(group.parameters), **group.keywords} for group in groups]
    try:
        return cast(torch.optim.Optimizer, _light(_class(name))(given, **groups[0].keywords))
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"optimizer {name}: {error}") from error


def _class(name: str) -> Any:
    return getattr(torch.optim, name)


@cache
def _light(kind: Any) -> Any:
    """A class of torch.optim without the decorators that import torch's compiler.

    They stop it from compiling an optimizer, and switch gradients off, which is done here.
    """
    step: Callable[..., Any] = inspect.unwrap(kind.step)
    members = {
        "step": torch.no_grad()(step),
        "add_param_group": inspect.unwrap(kind.add_param_group),
    }
    return type(kind.__name__, (kind,), members)


def _kept(
    name: str, keywords: Keywords, shape: torch.Size, dtype: torch.dtype
) -> tuple[_Slot, ...]:
    """All that a class of torch.optim keeps for one parameter."""
    return _probed(name, tuple(sorted(keywords.items())), tuple(shape), dtype)


@cache
def _probed(
    name: str,
    keywords: tuple[tuple[str, Argument], ...],
    shape: tuple[int, ...],
    dtype: torch.dtype,
) -> tuple[_Slot, ...]:
    """`_kept`, found by a step on a small parameter; its sizes differ from each other.

    Sizes of 1 and 0 are taken as they are.
    """
    small = dict(zip(_PROBE_SIZES, (n for n in shape if n > 1), strict=False))
    sizes = iter(small)
    probe = torch.nn.Parameter(
        torch.zeros([next(sizes) if n > 1 else n for n in shape], dtype=dtype)
    )
    probe.grad = torch.zeros_like(probe)
    optimizer = _construct(name, [Group((probe,), dict(keywords))])
    optimizer.step()
    found = _tensors(optimizer.state[probe])
    return tuple(
        (key, tuple(small.get(n, n) for n in tensor.shape), tensor.dtype)
        for key, tensor in found.items()
    )


def _tensors(state: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def _grad(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _alike(weights: Sequence[Tensor]) -> list[list[Tensor]]:
    """Those that may share one fused call: of the same dtype and device."""
    groups: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for weight in weights:
        groups.setdefault((weight.dtype, weight.device), []).append(weight)
    return list(groups.values())

"""Update rules: the optimizers of torch.optim by name, whose steps they take to the bit.

``adamw`` is `torch.optim.AdamW` and ``sgd`` is `torch.optim.SGD`, each in one fused operator per
step. The constructors and ``step`` methods of torch's classes import a compiler (70 MB and seconds
on a small board) that neither needs; see `_lighten`.

Learning rates may change from step to step. The control unit computes their factor and announces it
with the step, so that all stages use the same number. Steps count from 0 in each round of each
cluster: a batch without any label and an evaluation make none, and a step that is replayed after a
failure keeps its number.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.optim.sgd import sgd

from collapipe_flwr.core.errors import ConfigError, ModelError
from collapipe_flwr.core.imports import load_function
from collapipe_flwr.pipeline.optimizer_names import (
    FUSED,
    LEARNING_RATE_SCHEDULES,
    Argument,
    Keywords,
)

_NOT_ARGUMENTS = {"self", "params", "lr", "differentiable", "capturable"}
_STEP, _MOMENTUM = "step", "momentum_buffer"  # in a state of torch.optim
_EXACT_FUSED = (torch.float32, torch.float64)  # others get wrong momenta of a fused SGD on CPUs
_PROBE_SIZES = (2, 3, 5, 7, 11, 13, 17, 19)


class FusedSGD(torch.optim.SGD):
    """SGD in one operator for all tensors of a group, dtype and device.

    torch's own fused SGD refuses a parameter whose first gradient comes after that of others; here
    momentum buffers begin as zeros.
    """

    def step(self, closure: Any = None) -> Any:
        del closure
        for group in self.param_groups:
            kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
            for weight in group["params"]:
                if weight.grad is not None:
                    kinds.setdefault((weight.dtype, weight.device), []).append(weight)
            for weights in kinds.values():
                self._update(weights, group)

    def _update(self, weights: list[Tensor], group: Mapping[str, Any]) -> None:
        buffers: list[Any] = [None] * len(weights)
        if group["momentum"]:
            buffers = [self._get_buffer(weight) for weight in weights]
        sgd(
            [weight.detach() for weight in weights],
            [weight.grad for weight in weights if weight.grad is not None],
            buffers,
            fused=weights[0].dtype in _EXACT_FUSED,
            weight_decay=group["weight_decay"],
            momentum=group["momentum"],
            lr=group["lr"],
            dampening=0.0,
            nesterov=bool(group["nesterov"]),
            maximize=False,
        )

    def _get_buffer(self, weight: Tensor) -> Tensor:
        state = self.state[weight]
        if _MOMENTUM not in state:
            state[_MOMENTUM] = torch.zeros_like(weight)
        buffer: Tensor = state[_MOMENTUM]
        return buffer


def make_optimizer(name: str, groups: Iterable[Mapping[str, Any]]) -> torch.optim.Optimizer:
    """Make the optimizer over groups, each with its ``params`` and all keyword arguments.

    A group that lacks an argument would inherit that of the first group. Raises ConfigError for
    arguments that torch refuses.
    """
    fused = {"fused": True} if name == "adamw" else {}
    given = [{**group, **fused} for group in groups]
    defaults = {key: value for key, value in given[0].items() if key != "params"}
    with _translate_refusal(name):
        made: torch.optim.Optimizer = _lighten(_find_class(name))(given, **defaults)
    return made


@contextmanager
def _translate_refusal(name: str) -> Iterator[None]:
    """Turn what torch says of wrong arguments into a ConfigError."""
    try:
        yield
    except (LookupError, TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"optimizer {name}: {error}") from error


def name_state(
    name: str, keywords: Keywords, parameter: Tensor, state: Sequence[Tensor]
) -> dict[str, Tensor]:
    """Name a parameter's ``state`` as torch keeps it, from its tensors in order."""
    # As torch loads them: steps are counted on the CPU, unless one operator does it all.
    counts_there = name == "adamw" or bool(keywords.get("fused"))
    kept = _list_slots(name, keywords, parameter.shape, parameter.dtype)
    return {
        key: tensor if key == _STEP and not counts_there else tensor.to(parameter.device)
        for (key, _, _), tensor in zip(kept, state, strict=True)
    }


def select_tensors(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of a parameter's state; an optimizer may keep other values, too."""
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


@cache
def list_torch_names() -> tuple[str, ...]:
    """Return the names of the optimizers of torch.optim."""
    base, found = torch.optim.Optimizer, vars(torch.optim).items()
    kinds = {n: k for n, k in found if isinstance(k, type) and issubclass(k, base)}
    return tuple(sorted(name for name, kind in kinds.items() if kind is not base))


@cache
def list_arguments(name: str) -> Keywords:
    """Return the keyword arguments of a class but ``lr``, and their defaults."""
    parameters = inspect.signature(_find_class(name)).parameters.items()
    return {n: parameter.default for n, parameter in parameters if n not in _NOT_ARGUMENTS}


def try_out(name: str, keywords: Keywords) -> None:
    """Raise ConfigError for arguments whose values the optimizer refuses."""
    matrix = torch.nn.Parameter(torch.zeros(2, 2))  # Muon asks for one
    optimizer = make_optimizer(name, [{"params": [matrix], **keywords}])
    if name in FUSED:
        return  # all of theirs are checked by the constructors
    matrix.grad = torch.zeros_like(matrix)
    with _translate_refusal(name):
        for _ in range(2):  # some arguments count from the second step on
            optimizer.step()


def make_meta_state(
    name: str, keywords: Keywords, shape: torch.Size, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """Return one parameter's state as meta tensors, for its shapes and dtypes."""
    kept = _list_slots(name, keywords, shape, dtype)
    return tuple(torch.empty(size, dtype=dtype, device="meta") for _, size, dtype in kept)


def _find_class(name: str) -> Any:
    own = {"adamw": torch.optim.AdamW, "sgd": FusedSGD}
    return own.get(name) or getattr(torch.optim, name)


@cache
def _lighten(kind: Any) -> Any:
    """Make a class of torch.optim without the decorators that import torch's compiler.

    They stop it from compiling an optimizer, and switch gradients off, which is done here.
    """
    step: Callable[..., Any] = inspect.unwrap(kind.step)
    members = {
        "step": torch.no_grad()(step),
        "add_param_group": inspect.unwrap(kind.add_param_group),
    }
    return type(kind.__name__, (kind,), members)


_Slot = tuple[str, tuple[int, ...], torch.dtype]  # name, shape, dtype


def _list_slots(
    name: str, keywords: Keywords, shape: torch.Size, dtype: torch.dtype
) -> tuple[_Slot, ...]:
    """List all that an optimizer keeps for one parameter."""
    return _probe_slots(name, tuple(sorted(keywords.items())), tuple(shape), dtype)


@cache
def _probe_slots(
    name: str,
    keywords: tuple[tuple[str, Argument], ...],
    shape: tuple[int, ...],
    dtype: torch.dtype,
) -> tuple[_Slot, ...]:
    """Find the slots by one step on a small parameter, whose sizes differ from each other.

    Sizes of 1 and 0 are kept.
    """
    small = dict(zip(_PROBE_SIZES, (n for n in shape if n > 1), strict=False))
    sizes = iter(small)
    probe = torch.nn.Parameter(
        torch.zeros([next(sizes) if n > 1 else n for n in shape], dtype=dtype)
    )
    probe.grad = torch.zeros_like(probe)
    optimizer = make_optimizer(name, [{"params": [probe], **dict(keywords)}])
    optimizer.step()
    return tuple(
        (key, tuple(small.get(n, n) for n in tensor.shape), tensor.dtype)
        for key, tensor in select_tensors(optimizer.state[probe]).items()
    )


def make_factor(schedule: str, warmup: int, total: int) -> Callable[[int], float]:
    """Return the factor by step, as `transformers.get_scheduler` defines these schedules.

    ``warmup`` steps grow linearly from 0; ``linear`` and ``cosine`` fall to 0 at ``total``. A
    function that is named by its path takes the number of the step and ignores both. Raises
    ConfigError for a function that cannot be imported, and for a ``total`` of 0 that is needed.
    """
    if schedule not in LEARNING_RATE_SCHEDULES:
        return _load_factor(schedule)
    if schedule != "constant" and not total:
        raise ConfigError(
            f"schedule {schedule} needs total_steps: the number of batches of the round is not "
            "known in advance"
        )

    def factor(step: int) -> float:
        if step < warmup:
            return float(step) / float(max(1, warmup))
        if schedule == "constant":
            return 1.0
        length = float(max(1, total - warmup))
        if schedule == "linear":
            return max(0.0, float(total - step) / length)
        progress = float(step - warmup) / length
        return max(0.0, 0.5 * (1.0 + math.cos(math.pi * 0.5 * 2.0 * progress)))

    return factor


def _load_factor(path: str) -> Callable[[int], float]:
    try:
        function = load_function(path)
    except ModelError as error:
        raise ConfigError(f"schedule: {error}") from error

    def factor(step: int) -> float:
        found = function(step)
        if not isinstance(found, int | float) or not 0 <= found < math.inf:
            raise ConfigError(f"schedule {path} must return a number >= 0, got {found!r}")
        return float(found)

    return factor

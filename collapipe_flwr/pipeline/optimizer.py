"""AdamW and SGD on torch's fused operators.

Numerically `torch.optim.AdamW` and `torch.optim.SGD`, whose constructors import a compiler
(70 MB and seconds on a small board); the operators behind them need neither.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.core.keys import above, at_least, key, one_of

OPTIMIZERS = ("adamw", "sgd")


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSettings:
    """Which rule turns gradients into weights; `betas`, `eps` for adamw, `momentum` for sgd."""

    name: str = key("adamw", one_of(*OPTIMIZERS), name="optimizer")
    learning_rate: float = key(1e-3, above(0))
    weight_decay: float = key(0.01, at_least(0))
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    momentum: float = 0.0

    def __post_init__(self) -> None:
        if self.name not in OPTIMIZERS:
            raise ConfigError(f"optimizer must be one of {', '.join(OPTIMIZERS)}, got {self.name}")
        if not self.learning_rate >= 0:
            raise ConfigError(f"learning rate must be >= 0, got {self.learning_rate}")


class Optimizer:
    """Holds the state of each parameter between steps; skips parameters without gradient."""

    def __init__(self, settings: OptimizerSettings, parameters: Iterable[Tensor]) -> None:
        self.settings = settings
        self.parameters = tuple(p for p in parameters if p.requires_grad)
        self._state: dict[int, tuple[Tensor, ...]] = {}  # by position among the parameters

    def step(self) -> None:
        """Apply the accumulated gradients once."""
        ready = [i for i, p in enumerate(self.parameters) if p.grad is not None]
        for index in ready:
            if index not in self._state:
                self._state[index] = self._initial(self.parameters[index])
        weights = [self.parameters[i].detach() for i in ready]
        gradients = [_grad(self.parameters[i]) for i in ready]
        apply = self._apply_sgd if self.settings.name == "sgd" else self._apply_adamw
        for group in _groups(weights):
            states = (self._state[ready[i]] for i in group)
            columns = [list(column) for column in zip(*states, strict=True)]
            apply([weights[i] for i in group], [gradients[i] for i in group], columns)

    def zero_grad(self) -> None:
        """Free the accumulated gradients."""
        for parameter in self.parameters:
            parameter.grad = None

    def state_tensors(self) -> dict[int, tuple[Tensor, ...]]:
        """The state by position among the parameters: adamw (step, mean, square), sgd (buffer)."""
        return dict(self._state)

    def load_state_tensors(
        self, state: dict[int, tuple[Tensor, ...]], *, copy: bool = True
    ) -> None:
        """Continue from an earlier `state_tensors`; without `copy`, in the given tensors."""
        if copy:
            state = {i: tuple(t.clone() for t in tensors) for i, tensors in state.items()}
        self._state = dict(state)

    def empty_state(self, index: int) -> tuple[Tensor, ...]:
        """The state of one parameter as meta tensors, for its shapes and dtypes."""
        return self._initial(self.parameters[index].to("meta"))

    def _initial(self, weight: Tensor) -> tuple[Tensor, ...]:
        if self.settings.name == "sgd":
            return (torch.zeros_like(weight),) if self.settings.momentum else ()
        zeros = torch.zeros_like(weight, requires_grad=False)
        return torch.zeros((), dtype=torch.float32), zeros, zeros.clone()

    def _apply_sgd(
        self, weights: list[Tensor], gradients: list[Tensor], state: list[list[Tensor]]
    ) -> None:
        s = self.settings
        torch._fused_sgd_(
            weights,
            gradients,
            state[0] if s.momentum else [],
            weight_decay=s.weight_decay,
            momentum=s.momentum,
            lr=s.learning_rate,
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=False,
        )

    def _apply_adamw(
        self, weights: list[Tensor], gradients: list[Tensor], state: list[list[Tensor]]
    ) -> None:
        s = self.settings
        steps, means, squares = state
        torch._foreach_add_(steps, 1.0)
        torch._fused_adamw_(
            weights,
            gradients,
            means,
            squares,
            [],
            steps,
            lr=s.learning_rate,
            beta1=s.betas[0],
            beta2=s.betas[1],
            weight_decay=s.weight_decay,
            eps=s.eps,
            amsgrad=False,
            maximize=False,
        )


def _grad(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _groups(weights: Sequence[Tensor]) -> list[list[int]]:
    """Positions that may share one fused call: same dtype and device."""
    groups: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for index, weight in enumerate(weights):
        groups.setdefault((weight.dtype, weight.device), []).append(index)
    return list(groups.values())

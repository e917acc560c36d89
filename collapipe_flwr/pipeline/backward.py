"""A backward pass that adds the gradients of matrices in place, and can leave that for later.

Autograd computes the gradient of a weight into new memory and adds it to what micro-batches before
left: two passes over memory that a product can save by adding as it goes. And nobody waits for
gradients of weights before the optimiser does, but the stage ahead waits for that of its output; so
a pass may owe the products until that one has been sent. The same products on the same numbers:
gradients are autograd's, up to the rounding of a sum (`tests/pipeline/test_backward.py`).

This concerns linear layers in single precision; all else is autograd's.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


def add_in_place(part: nn.Module) -> None:
    """Make the linear layers of a part such that add in place; what they compute is unchanged."""
    for module in part.modules():
        if type(module) is nn.Linear:  # a class of somebody else's may compute otherwise
            module.__class__ = AddingLinear


class AddingLinear(nn.Linear):
    """A linear layer whose products add to the weight's gradient."""

    def forward(self, given: Tensor) -> Tensor:
        """(..., in) to (..., out)."""
        plain = not self.weight.requires_grad or torch.is_autocast_enabled(given.device.type)
        if plain or not torch.is_grad_enabled():
            return super().forward(given)
        product: Tensor = _Product.apply(given, self.weight, self.bias)  # type: ignore[no-untyped-call]
        return product


@dataclass(frozen=True, slots=True, kw_only=True)
class _Debt:
    """A product that is still to be added to the gradient of ``weight``."""

    weight: Tensor  # (out, in)
    gradient: Tensor  # (N, out)
    given: Tensor  # (N, in)

    def pay(self) -> None:
        with torch.no_grad():
            if self.weight.grad is None:
                self.weight.grad = self.product()
            else:
                self.weight.grad.addmm_(self.gradient.t(), self.given)

    def product(self) -> Tensor:
        return self.gradient.t().mm(self.given)


class Owed:
    """What a backward pass left for later; to be paid once."""

    def __init__(self) -> None:
        self._debts: list[_Debt] = []

    @property
    def gradients(self) -> list[Tensor]:
        """What is kept alive until then beside the saved inputs of layers."""
        return [debt.gradient for debt in self._debts]

    def note(self, debt: _Debt) -> None:
        """Add one."""
        self._debts.append(debt)

    def pay(self) -> None:
        """Add the products, in the order of the pass."""
        for debt in self._debts:
            debt.pay()
        self._debts.clear()


class _Thread(threading.local):
    owed: Owed | None = None  # what the pass of this thread leaves, if it may


_thread = _Thread()


@contextmanager
def owing() -> Iterator[Owed]:
    """Backward passes of this thread leave products of matrices for later."""
    _thread.owed = owed = Owed()
    try:
        yield owed
    finally:
        _thread.owed = None


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(given, weight)
        ctx.weight = weight  # itself, whatever hooks make of what is saved
        return functional.linear(given, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,), (given, weight) = gradients, ctx.saved_tensors
        needs_given, needs_weight, needs_bias = ctx.needs_input_grad
        rows, inputs = (t.reshape(-1, t.shape[-1]) for t in (gradient, given))
        debt = _Debt(weight=ctx.weight, gradient=rows, given=inputs)
        return (
            gradient @ weight if needs_given else None,
            _settled(debt) if needs_weight else None,
            rows.sum(0) if needs_bias else None,
        )


def _settled(debt: _Debt) -> Tensor | None:
    """Owe or add a product, or give it to autograd where somebody listens or nothing is there."""
    if debt.weight._post_accumulate_grad_hooks or debt.weight._backward_hooks:
        return debt.product()
    if _thread.owed is not None:
        _thread.owed.note(debt)
    elif debt.weight.grad is None:
        return debt.product()
    else:
        debt.pay()
    return None

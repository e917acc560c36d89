"""What a backward pass leaves for later: gradients of weights, which only the optimiser waits for.

The stage ahead waits for the gradient of its output; so a pass may owe the products that make
gradients of weights until that one has been sent. The same products on the same numbers: gradients
are autograd's (`tests/pipeline/test_backward.py`). Which layers can owe: see `adding`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor


class Debt(NamedTuple):
    """A product that is still to be added to the gradient of ``weight``."""

    weight: Tensor  # (a, b)
    left: Tensor  # (N, a)
    right: Tensor  # (N, b)

    def pay(self) -> None:
        """Add it where the gradient lies; not while autograd records."""
        gradient = self.weight.grad
        if gradient is None:
            self.weight.grad = self.product()
        else:
            gradient.addmm_(self.left.t(), self.right)

    def product(self) -> Tensor:
        """(a, b)."""
        return self.left.t().mm(self.right)


class Owed:
    """Debts of one backward pass, to be paid once."""

    def __init__(self) -> None:
        self._debts: list[Debt] = []

    @property
    def tensors(self) -> list[Tensor]:
        """What is kept alive until then."""
        return [tensor for debt in self._debts for tensor in (debt.left, debt.right)]

    def note(self, debt: Debt) -> None:
        """Add one."""
        self._debts.append(debt)

    def pay(self) -> None:
        """Add the products, in the order of the pass."""
        with torch.no_grad():
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


def settled(debt: Debt) -> Tensor | None:
    """Owe or add a product, or give it to autograd where somebody listens or nothing is there."""
    if is_heard(debt.weight):
        return debt.product()
    if _thread.owed is not None:
        _thread.owed.note(debt)
    elif debt.weight.grad is None:
        return debt.product()
    else:
        debt.pay()
    return None


def is_heard(weight: Tensor) -> bool:
    """Whether hooks wait for its gradient, which must then come through autograd."""
    return bool(weight._post_accumulate_grad_hooks or weight._backward_hooks)

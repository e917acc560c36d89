"""A slower processor, emulated: sleeping after work as long as it would have taken longer.

Sleeping frees the core, so the stages of a bench do not disturb each other more than real boards.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


class Slowed:
    """Makes the work between ``enter`` and ``leave`` take ``factor`` times as long, both ways."""

    def __init__(self, factor: float, weights: Iterable[Tensor] = ()) -> None:
        self._factor = factor
        self._backward_s = 0.0
        self._between = False  # the marks of a backward pass
        for weight in weights if factor != 1.0 else ():
            weight.register_post_accumulate_grad_hook(self.weight_done)  # type: ignore[no-untyped-call]

    @contextmanager
    def timed(self) -> Iterator[Slowed]:
        """The forward pass is the body; its backward pass is timed by the marks in it."""
        start_s = time.thread_time()
        yield self
        self._sleep(start_s)

    def enter(self, tensor: Tensor) -> Tensor:
        """Mark where the work begins: its backward pass ends here."""
        return self._marked(tensor, ends=True)

    def leave(self, tensor: Tensor) -> Tensor:
        """Mark where the work ends: its backward pass begins here."""
        return self._marked(tensor, ends=False)

    def backward_begins(self) -> None:
        """Called by the mark behind the work."""
        self._backward_s, self._between = time.thread_time(), True

    def backward_ends(self) -> None:
        """Called by the mark before the work."""
        self._sleep(self._backward_s)
        self._backward_s, self._between = time.thread_time(), False

    def weight_done(self, weight: Tensor) -> None:
        """Called when a weight has its gradient: work behind the marks is slow as well.

        That somebody listens also keeps `pipeline.backward` from leaving it for later.
        """
        del weight
        if not self._between:
            self._sleep(self._backward_s)
            self._backward_s = time.thread_time()

    def _marked(self, tensor: Tensor, *, ends: bool) -> Tensor:
        if self._factor == 1.0:
            return tensor
        marked: Tensor = _Mark.apply(tensor, self, ends)  # type: ignore[no-untyped-call]
        return marked

    def _sleep(self, start_s: float) -> None:
        if self._factor > 1.0:
            time.sleep((self._factor - 1.0) * (time.thread_time() - start_s))


class _Mark(torch.autograd.Function):
    """The identity, which tells when the backward pass comes by."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, slowed: Slowed, ends: bool) -> Tensor:
        ctx.slowed, ctx.ends = slowed, ends
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        if ctx.ends:
            ctx.slowed.backward_ends()
        else:
            ctx.slowed.backward_begins()
        return gradients[0], None, None

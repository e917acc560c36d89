"""Backward passes that compute less and send earlier, with autograd's gradients.

Fused gradient accumulation: autograd computes the gradient of a weight into new memory and adds it
to the accumulated one, two passes over memory that `addmm_` saves. For an embedding both passes
cover the whole table and a second copy of it, though few rows occur. Fused are linear layers in
single precision, the transposed ones of GPT-2 included, and embeddings; all other layers are left
to autograd.

Deferred weight gradients (the W of zero-bubble schedules): the stage ahead waits only for the
gradient of its output, the optimizer for those of weights. So a pass may defer the products of
these layers until the former has been sent.

Both compute the same products and sums of the same numbers as autograd, up to the rounding of a sum
(`tests/pipeline/test_fused_accumulation.py`, `tests/pipeline/test_backward.py`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

_CONV1D = ("transformers.pytorch_utils", "Conv1D")  # by name: a board may not have the library
WORTH = 2**18  # elements of a matrix from which fusing is faster


class WeightGradient(NamedTuple):
    """A product to be added to the gradient of ``weight``."""

    weight: Tensor  # (a, b)
    left: Tensor  # (N, a)
    right: Tensor  # (N, b)

    def add(self) -> None:
        """Add it in place; not while autograd records."""
        gradient = self.weight.grad
        if gradient is None:
            self.weight.grad = self.compute()
        else:
            gradient.addmm_(self.left.t(), self.right)

    def compute(self) -> Tensor:
        """Compute the product of shape (a, b)."""
        return self.left.t().mm(self.right)


class DeferredGradients(list[WeightGradient]):
    """Products that one backward pass left for later."""

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors kept alive until then."""
        return [tensor for gradient in self for tensor in (gradient.left, gradient.right)]

    def add(self) -> None:
        """Compute and add the products, in the order of the pass."""
        with torch.no_grad():
            for gradient in self:
                gradient.add()
        self.clear()


class _Thread(threading.local):
    deferred: DeferredGradients | None = None  # of this thread's pass, where it may defer


_thread = _Thread()


@contextmanager
def defer_products() -> Iterator[DeferredGradients]:
    """Let backward passes of this thread leave products of matrices for later."""
    _thread.deferred = deferred = DeferredGradients()
    try:
        yield deferred
    finally:
        _thread.deferred = None


def _accumulate(gradient: WeightGradient) -> Tensor | None:
    """Defer or add a product; return it to autograd for hooks, or as the first gradient."""
    if has_hooks(gradient.weight):
        return gradient.compute()
    if _thread.deferred is not None:
        _thread.deferred.append(gradient)
    elif gradient.weight.grad is None:
        return gradient.compute()
    else:
        gradient.add()
    return None


def has_hooks(weight: Tensor) -> bool:
    """Return whether hooks observe its gradient, which must then come from autograd."""
    return bool(weight._post_accumulate_grad_hooks or weight._backward_hooks)


def fuse_accumulation(part: nn.Module) -> None:
    """Make the layers of a part add weight gradients in place; their results are unchanged.

    Small matrices are left alone.
    """
    for module in part.modules():
        kind: Any = type(module)  # exactly: a user's subclass may compute something else
        if kind is nn.Embedding:
            module.__class__ = FusedEmbedding
        elif kind is nn.Linear and _is_large(module):
            module.__class__ = FusedLinear
        elif (kind.__module__, kind.__name__) == _CONV1D and _is_large(module):
            module.__class__ = _fuse_conv1d(kind)


def _is_large(module: nn.Module) -> bool:
    """Return whether fusing pays; False also for computed weights, as autograd needs those."""
    weight = module._parameters.get("weight")
    return weight is not None and weight.numel() >= WORTH


class FusedLinear(nn.Linear):
    """A linear layer whose products add to the weight's gradient."""

    def forward(self, given: Tensor) -> Tensor:
        """Map (..., in) to (..., out)."""
        weight, bias = _get_weight_and_bias(self)
        if _is_plain(weight) or torch.is_autocast_enabled(weight.device.type):
            return super().forward(given)
        return _product(given, weight, bias, False)


class FusedEmbedding(nn.Embedding):
    """A table that updates only those rows of its gradient that occur."""

    def forward(self, given: Tensor) -> Tensor:
        """Map row numbers (...) to (..., width)."""
        unusual = self.max_norm is not None or self.scale_grad_by_freq or self.sparse
        if unusual or _is_plain(self.weight) or given.numel() > self.weight.shape[0]:
            return super().forward(given)
        return _lookup(given, self.weight, self.padding_idx)


@cache
def _fuse_conv1d(kind: Any) -> Any:
    """Make a `FusedLinear` of a layer whose weight is (in, out)."""

    def forward(self: Any, given: Tensor) -> Any:
        weight, bias = _get_weight_and_bias(self)
        if _is_plain(weight) or torch.is_autocast_enabled(weight.device.type):
            return kind.forward(self, given)
        return _product(given, weight, bias, True)

    return type("FusedConv1D", (kind,), {"forward": forward})


def _get_weight_and_bias(layer: nn.Module) -> tuple[Any, Any]:
    """Read them straight from the registry, which is faster than attribute access."""
    parameters = layer._parameters
    return parameters["weight"], parameters["bias"]


def _is_plain(weight: Tensor) -> bool:
    """Return whether there is no gradient to add."""
    return not (weight.requires_grad and torch.is_grad_enabled())


class _LinearProduct(torch.autograd.Function):
    """``given @ weight.T + bias``, or with a ``turned`` weight ``given @ weight + bias``."""

    @staticmethod
    def forward(
        ctx: Any, given: Tensor, weight: Tensor, bias: Tensor | None, turned: bool
    ) -> Tensor:
        ctx.save_for_backward(given, weight)
        ctx.weight, ctx.turned = weight, turned  # itself: hooks may replace saved tensors
        return functional.linear(given, weight.t() if turned else weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,), (given, weight) = gradients, ctx.saved_tensors
        needs_given, needs_weight, needs_bias, _ = ctx.needs_input_grad
        rows, inputs = _flatten_rows(gradient), _flatten_rows(given)
        matrix, left, right = (weight, rows, inputs)
        if ctx.turned:
            matrix, left, right = weight.t(), inputs, rows
        return (
            rows.mm(matrix).view_as(given) if needs_given else None,
            _accumulate(WeightGradient(ctx.weight, left, right)) if needs_weight else None,
            rows.sum(0) if needs_bias else None,
            None,
        )


class _Lookup(torch.autograd.Function):
    """Rows of a table; that of padding is not trained."""

    @staticmethod
    def forward(ctx: Any, given: Tensor, weight: Tensor, padding_id: int | None) -> Tensor:
        ctx.save_for_backward(given)
        ctx.weight, ctx.padding_id = weight, padding_id
        return functional.embedding(given, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (given,), weight = ctx.saved_tensors, ctx.weight
        ids, rows = given.reshape(-1), _flatten_rows(gradients[0])
        if ctx.padding_id is not None:
            rows = rows * (ids != ctx.padding_id).unsqueeze(1)
        is_first = weight.grad is None or has_hooks(weight)
        total = torch.zeros_like(weight, requires_grad=False) if is_first else weight.grad
        total.index_add_(0, ids, rows)
        return None, total if is_first else None, None


def _find_quick_apply(function: type[torch.autograd.Function]) -> Callable[..., Tensor]:
    """Return ``function.apply`` without its preparations for `torch.func`, slow in every call."""
    applied: Callable[..., Tensor] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    return applied


_product, _lookup = _find_quick_apply(_LinearProduct), _find_quick_apply(_Lookup)


def _flatten_rows(tensor: Tensor) -> Tensor:
    """Flatten (..., d) to (N, d)."""
    return tensor.flatten(0, -2) if tensor.dim() > 1 else tensor.unsqueeze(0)

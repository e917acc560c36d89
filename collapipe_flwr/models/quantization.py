"""Weight-only quantization: frozen matrices are kept narrow and widened for each product.

bfloat16 halves and int8 (a scale per row) quarters what a frozen layer holds. The products
themselves run in the precision of their inputs, so this saves memory, not time; what is lost is
the rounding of the weights, nothing if the checkpoint itself is as narrow.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

_INT8_MOST = 127
_CHUNK_ROWS = 16_384  # of an output table: its wide form is never whole


class _Product(torch.autograd.Function):
    """``inputs @ matrix``; the backward pass widens the matrix again instead of keeping it."""

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, weight: Tensor, scale: Tensor | None, turn: bool
    ) -> Tensor:
        ctx.save_for_backward(weight, *(() if scale is None else (scale,)))
        ctx.turn = turn
        pieces = [inputs @ wide for wide in _wide(weight, scale, turn, inputs.dtype)]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, -1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = gradients
        weight, *scale = ctx.saved_tensors
        start, total = 0, None
        for wide in _wide(weight, scale[0] if scale else None, ctx.turn, gradient.dtype):
            stop = start + wide.shape[1]
            piece = gradient[..., start:stop] @ wide.T
            total = piece if total is None else total.add_(piece)
            start = stop
        assert total is not None
        return total, None, None, None


def _product(layer: nn.Module, inputs: Tensor, *, turn: bool) -> Tensor:
    scale = getattr(layer, "weight_scale", None)
    output: Tensor = _Product.apply(inputs, layer.weight, scale, turn)  # type: ignore[no-untyped-call]
    return output


class _QuantizedLinear(nn.Linear):
    """A frozen linear layer; its weight is (out, in)."""

    def forward(self, inputs: Tensor) -> Tensor:
        output = _product(self, inputs, turn=True)
        return output if self.bias is None else output + self.bias


class _QuantizedConv1D(Conv1D):
    """A frozen layer of GPT-2; its weight is (in, out)."""

    def forward(self, inputs: Tensor) -> Tensor:
        return _product(self, inputs, turn=False) + self.bias


class _QuantizedEmbedding(nn.Embedding):
    """A frozen table, read row by row."""

    def forward(self, ids: Tensor) -> Tensor:
        rows = functional.embedding(ids, self.weight).to(torch.float32)
        scale = getattr(self, "weight_scale", None)
        return rows if scale is None else rows * functional.embedding(ids, scale)


_QUANTIZED: dict[type, type] = {
    nn.Linear: _QuantizedLinear,
    Conv1D: _QuantizedConv1D,
    nn.Embedding: _QuantizedEmbedding,
}


def can_quantize(module: nn.Module) -> bool:
    """Whether this kind of layer can compute with a narrow weight."""
    return type(module) in _QUANTIZED or type(module) in _QUANTIZED.values()


def quantize(module: nn.Module, weight: Tensor, dtype: str) -> None:
    """Give a layer its frozen weight in ``dtype`` (bfloat16 or int8)."""
    scale = None
    if dtype == "int8":
        weight, scale = _rounded(weight, along=0 if isinstance(module, Conv1D) else 1)
    else:
        weight = weight.to(torch.bfloat16, copy=True)
    _hold(module, nn.Parameter(weight, requires_grad=False), scale)


def share_quantized(module: nn.Module, owner: nn.Module) -> None:
    """Let a tied layer use the narrow weight of another."""
    _hold(module, owner.weight, getattr(owner, "weight_scale", None))


def _hold(module: nn.Module, weight: Any, scale: Tensor | None) -> None:
    module.__class__ = _QUANTIZED.get(type(module), type(module))
    module._parameters["weight"] = weight
    if scale is not None:
        module.register_buffer("weight_scale", scale, persistent=False)


def _rounded(weight: Tensor, along: int) -> tuple[Tensor, Tensor]:
    """The matrix as int8 and its scales; tables are rounded piece by piece."""
    pieces = torch.split(weight, _CHUNK_ROWS) if along == 1 else (weight,)
    scales, narrow_pieces = [], []
    for piece in pieces:
        scale = piece.abs().amax(along, keepdim=True).float().clamp_min_(1e-12) / _INT8_MOST
        scales.append(scale)
        narrow_pieces.append((piece / scale).round_().to(torch.int8))
    return torch.cat(narrow_pieces), torch.cat(scales)


def _wide(weight: Tensor, scale: Tensor | None, turn: bool, dtype: torch.dtype) -> Iterator[Tensor]:
    """The matrix (in, out) in ``dtype``, in pieces along its outputs."""
    rows = _CHUNK_ROWS if turn else len(weight)
    for start in range(0, len(weight), rows):
        wide = weight[start : start + rows].to(dtype)
        if scale is not None:
            wide = wide.mul_((scale[start : start + rows] if turn else scale).to(dtype))
        yield wide.T if turn else wide

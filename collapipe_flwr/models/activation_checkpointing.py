"""Activation checkpointing: a block is computed again in its backward pass instead of kept.

Between forward and backward only the tensors that went in stay; in the backward pass the block
runs again, passes its gradient back, and is forgotten before the block ahead of it begins.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

Around = Callable[[], AbstractContextManager[object]]  # entered for every second computation


def checkpointed(
    block: nn.Module, around: Around, hidden_BTD: Tensor, arguments: Mapping[str, Any]
) -> Tensor:
    """What `block` makes of hidden states; gradients are those of a plain call.

    They reach its parameters, `hidden_BTD` and tensors that are themselves `arguments`, not those
    inside of one. Random numbers are drawn twice: `around` must see to it that they are the same.
    """
    tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
    others = {name: value for name, value in arguments.items() if name not in tensors}
    names = tuple(tensors)

    def run(hidden_BTD: Tensor, *values: Tensor) -> Tensor:
        output = block(hidden_BTD, **dict(zip(names, values, strict=True)), **others)
        return output if isinstance(output, Tensor) else output[0]

    inputs = (hidden_BTD, *tensors.values())
    trains = any(tensor.requires_grad for tensor in (*inputs, *block.parameters()))
    if not (trains and torch.is_grad_enabled()):
        return run(*inputs)
    # Without an input that trains, autograd would not come back for the block's own parameters.
    anchor = torch.empty(0, requires_grad=True)
    output: Tensor = _Checkpointed.apply(run, around, anchor, *inputs)  # type: ignore[no-untyped-call]
    return output


class _Checkpointed(torch.autograd.Function):
    """Saves the inputs of a call and repeats it for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, run: Callable[..., Tensor], around: Around, anchor: Tensor, *inputs: Tensor
    ) -> Tensor:
        del anchor
        ctx.run, ctx.around = run, around
        ctx.save_for_backward(*inputs)
        if not any(tensor.requires_grad for tensor in inputs[1:]):
            return run(*inputs)
        # For a mask that trains attention takes another kernel; what autograd keeps is dropped.
        with torch.enable_grad(), saved_tensors_hooks(_same, _same):  # and nobody measures it
            trains = [tensor.requires_grad for tensor in inputs]
            return run(*_leaves(inputs, trains)).detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        inputs = _leaves(ctx.saved_tensors, ctx.needs_input_grad[3:])
        with ctx.around():
            with torch.enable_grad():
                output = ctx.run(*inputs)
            torch.autograd.backward(output, gradients)
        return (None, None, None, *(tensor.grad for tensor in inputs))


def _leaves(tensors: Sequence[Tensor], trains: Sequence[bool]) -> list[Tensor]:
    """The same numbers, cut off from what they were computed from."""
    return [t.detach().requires_grad_(wants) for t, wants in zip(tensors, trains, strict=True)]


def _same(tensor: Tensor) -> Tensor:
    return tensor

"""Some blocks of a stack, run one by one with the arguments of the library's own loop.

With activation checkpointing only the inputs of a block stay between forward and backward; in the
backward pass the block runs again, passes its gradient back, and is freed before the block ahead
of it begins. A cache holds the keys and values of these blocks alone.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from functools import partial
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from transformers import DynamicCache, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPoolingAndCrossAttentions
from transformers.utils.generic import ModelOutput

from collapipe_flwr.core.errors import ModelError
from collapipe_flwr.models.families import (
    BlockArguments,
    Family,
    find_blocks,
    find_stack_path,
    token_mask,
)
from collapipe_flwr.models.module_call import (
    StopForward,
    hidden_of,
    list_arguments,
    make_forward,
    replace_forwards,
    split_arguments,
)
from collapipe_flwr.models.random_functions import leave_uncounted
from collapipe_flwr.models.skeleton import make_blank_pixels

Forward = Callable[..., Any]
Around = Callable[[], AbstractContextManager[object]]  # entered for every second computation
Perturb = Callable[[Tensor, Tensor], Tensor]  # of hidden states (B, T, D), with their mask (B, T)


def run_block(
    block: nn.Module, hidden_BTD: Tensor, arguments: Mapping[str, Any], around: Around | None
) -> Tensor:
    """Compute the block's hidden states; with `around` again in the backward pass.

    Gradients are those of a plain call. They reach its parameters, `hidden_BTD` and tensors that
    are themselves `arguments`, not those inside of one. Random numbers are drawn twice: `around`,
    entered for the second time, must make them the same.
    """
    if around is None:
        return hidden_of(block(hidden_BTD, **arguments))
    tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
    others = {name: value for name, value in arguments.items() if name not in tensors}
    names = tuple(tensors)

    def run(hidden_BTD: Tensor, *values: Tensor) -> Tensor:
        return hidden_of(block(hidden_BTD, **dict(zip(names, values, strict=True)), **others))

    inputs = (hidden_BTD, *tensors.values())
    trains = any(tensor.requires_grad for tensor in (*inputs, *block.parameters()))
    if not (trains and torch.is_grad_enabled()):
        return run(*inputs)
    # Without an input that trains, autograd would not come back for the block's own parameters.
    anchor = torch.empty(0, requires_grad=True)
    output: Tensor = _Checkpointed.apply(run, around, anchor, *inputs)  # type: ignore[no-untyped-call]
    return output


class _Checkpointed(torch.autograd.Function):
    """A call of which only the inputs are saved, repeated for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, run: Callable[..., Tensor], around: Around, anchor: Tensor, *inputs: Tensor
    ) -> Tensor:
        del anchor
        ctx.run, ctx.around = run, around
        ctx.save_for_backward(*inputs)
        if not any(tensor.requires_grad for tensor in inputs[1:]):
            return run(*inputs)
        # Attention takes another kernel if its mask trains; what autograd keeps is dropped, and
        # the hooks hide it from those of a caller.
        with torch.enable_grad(), saved_tensors_hooks(_same, _same):
            trains = [tensor.requires_grad for tensor in inputs]
            return run(*_detach(inputs, trains)).detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        inputs = _detach(ctx.saved_tensors, ctx.needs_input_grad[3:])
        with ctx.around():
            with torch.enable_grad():
                output = ctx.run(*inputs)
            torch.autograd.backward(output, gradients)
        return (None, None, None, *(tensor.grad for tensor in inputs))


def _detach(tensors: Sequence[Tensor], trains: Sequence[bool]) -> list[Tensor]:
    """Return the same values, detached."""
    return [t.detach().requires_grad_(wants) for t, wants in zip(tensors, trains, strict=True)]


def _same(tensor: Tensor) -> Tensor:
    return tensor


@dataclass(kw_only=True)
class Stack:
    """Blocks ``first_block .. stop_block - 1`` of a model, and the modules around the list.

    With ``again`` each block is recomputed in its backward pass, see ``run_block``. Hidden states
    behind a block that is ``perturbed`` are replaced. Blocks of a
    family without ``inputs`` get the arguments that the library's own loop over them passes: masks,
    positions and others are thus its own.
    """

    model: PreTrainedModel
    family: Family
    first_block: int
    stop_block: int
    again: Around | None = None
    perturbed: dict[int, Perturb] = field(default_factory=dict)  # by the number of blocks ahead
    module: nn.Module = field(init=False)  # that owns embedding and blocks
    blocks: nn.ModuleList = field(init=False)  # all of them, those of other parts hollow
    replaying: Lock = field(init=False, default_factory=Lock)  # an edge's texts share the modules

    def __post_init__(self) -> None:
        self.module = self.model.get_submodule(find_stack_path(self.model, self.family))
        self.blocks = find_blocks(self.model, self.family)

    @property
    def entrance(self) -> nn.Module:
        """The module whose first argument is the embedding's output."""
        if self.family.exit is not None:
            return self.module.get_submodule(self.family.exit)
        return self.blocks[0]

    def run_blocks(
        self,
        hidden_BTD: Tensor,
        context: Mapping[str, Tensor],
        cache: PartCache | None = None,
    ) -> Tensor:
        """Compute the hidden states (B, T, D) after the last of these blocks.

        With a ``cache`` they are those of the tokens that come next. Raises ModelError for a model
        type that has none.
        """
        if cache is not None and not self.family.caches:
            raise ModelError(
                f"model type {self.model.config.model_type!r} cannot generate token by token when "
                "split: only its training is known"
            )
        if self.first_block < self.stop_block:
            arguments = self._make_arguments(hidden_BTD, context, cache)
            for index in range(self.first_block, self.stop_block):
                output_BTD = run_block(self.blocks[index], hidden_BTD, arguments(index), self.again)
                if index == 0 and self.family.joined:
                    output_BTD = self._join(hidden_BTD, output_BTD, context)
                hidden_BTD = output_BTD
                if perturb := self.perturbed.get(index + 1):
                    hidden_BTD = perturb(hidden_BTD, token_mask(hidden_BTD, context))
        if cache is not None:
            cache.tokens += hidden_BTD.shape[1]
        return hidden_BTD

    def finish(self, hidden_BTD: Tensor) -> ModelOutput:
        """Compute the result of the library's stack from hidden states after the last block."""
        if self.family.inputs is None:
            forward = make_forward(hidden_BTD, self.family.block_results)
            output: ModelOutput = self._replay(hidden_BTD, {}, dict.fromkeys(self.blocks, forward))
            return output
        for name in self.family.after:
            hidden_BTD = self.module.get_submodule(name)(hidden_BTD)
        pooler: Any = getattr(self.module, "pooler", None)
        return BaseModelOutputWithPoolingAndCrossAttentions(
            last_hidden_state=hidden_BTD,
            pooler_output=None if pooler is None else pooler(hidden_BTD),
        )

    def _make_arguments(
        self, hidden_BTD: Tensor, context: Mapping[str, Tensor], cache: PartCache | None
    ) -> BlockArguments:
        if self.family.inputs is not None:
            caches = () if cache is None else (cache,)
            return self.family.inputs(self.module, hidden_BTD, context, *caches)
        found: list[dict[str, Any]] = []

        def note(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
            found.append(split_arguments(block, args, kwargs)[1])
            if len(found) == len(self.blocks):
                raise StopForward
            return make_forward(hidden_BTD, self.family.block_results)()

        with leave_uncounted(), suppress(StopForward):
            self._replay(
                hidden_BTD, context, {block: partial(note, block) for block in self.blocks}
            )
        return found.__getitem__

    def _replay(
        self, hidden_BTD: Tensor, context: Mapping[str, Tensor], forwards: Mapping[Any, Forward]
    ) -> Any:
        """Run the library's own forward, with these ``forwards`` in place of its blocks'.

        What it reads ahead of them has the right shape and no values, since they need not read it.
        """
        unread_BTD = torch.zeros_like(hidden_BTD)  # the library may change it in place
        if self.family.input_name == "pixel_values":
            inputs = {"pixel_values": make_blank_pixels(self.module.config, hidden_BTD)}
        else:
            inputs = {"inputs_embeds": torch.zeros_like(hidden_BTD)}
        known = {key: context[key] for key in ("attention_mask", "position_ids") if key in context}
        stack: Any = self.module  # the edge replaces this instance's own forward
        before = [stack.get_submodule(name) for name in self.family.before]
        forwards = {**dict.fromkeys(before, lambda *_, **__: unread_BTD), **forwards}
        with self.replaying, replace_forwards(forwards):
            return type(stack).forward(stack, **inputs, **known, **disable_cache(stack))

    def _join(self, before_BTD: Tensor, after_BTD: Tensor, context: Mapping[str, Tensor]) -> Tensor:
        assert self.family.joined is not None
        owner, _, name = self.family.joined.rpartition(".")
        module: Any = getattr(self.module.get_submodule(owner), name, None)
        if module is None:
            return after_BTD
        joined: Tensor = module(before_BTD, after_BTD, token_mask(before_BTD, context))
        return joined


def disable_cache(model: nn.Module) -> dict[str, bool]:
    """Return the argument that keeps a model from building a cache for generation, if it would."""
    return {"use_cache": False} if "use_cache" in list_arguments(model) else {}


def takes_any_argument(module: nn.Module) -> bool:
    """Return whether a module's own forward takes arguments that it does not name."""
    parameters = inspect.signature(type(module).forward).parameters.values()
    return any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)


class PartCache(DynamicCache):
    """The library's cache for blocks ``first_block .. stop_block - 1``, full or sliding.

    Blocks address it by their index in the whole model. It counts its tokens itself, since the
    part may hold no block.
    """

    def __init__(self, config: Any, first_block: int, stop_block: int) -> None:
        super().__init__(config=_slice_config(config, first_block, stop_block))
        self._first_block = first_block
        self.tokens = 0  # seen by the part, whose last step adds to it

    @property
    def is_compileable(self) -> bool:
        """Never: the library would prepare masks for a cache of fixed size."""
        return False

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append to a block's keys and values, and return all of them."""
        own = layer_idx - self._first_block
        both: tuple[Tensor, Tensor] = super().update(key_states, value_states, own, *args, **kwargs)
        return both

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the tokens before this step, the same for every block."""
        del layer_idx
        return self.tokens


class TopCache(PartCache):
    """The cache of the uppermost blocks, which also records how the library reorders rows.

    The devices' caches hold one row until the first step, so the first rows are all row 0.
    """

    def __init__(self, config: Any, first_block: int, stop_block: int) -> None:
        super().__init__(config, first_block, stop_block)
        self._rows: Tensor | None = None
        self._widened = False

    def reorder_cache(self, beam_idx: Any) -> None:
        """Let row i continue row ``beam_idx[i]``, a tensor (B,)."""
        super().reorder_cache(beam_idx)
        self._rows = beam_idx

    def take_rows(self, width: int) -> Tensor | None:
        """Return the rows of the last step that the next ``width`` continue; None if in order."""
        rows, self._rows = self._rows, None
        if not self._widened:
            self._widened = True
            return torch.zeros(width, dtype=torch.long) if width > 1 else None
        return rows


def _slice_config(config: Any, first_block: int, stop_block: int) -> Any:
    part = copy.deepcopy(config.get_text_config(decoder=True))
    kinds = getattr(part, "layer_types", None)
    part.num_hidden_layers = stop_block - first_block
    if kinds is not None:
        part.layer_types = kinds[first_block:stop_block]
    return part

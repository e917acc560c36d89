"""Running some blocks of a stack, with the mathematics of the library's own loop around them."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPoolingAndCrossAttentions
from transformers.utils.generic import ModelOutput

from collapipe_flwr.core.errors import ModelError
from collapipe_flwr.models.activation_checkpointing import Around, checkpointed
from collapipe_flwr.models.block_inputs import BlockArguments, token_mask
from collapipe_flwr.models.families import Family
from collapipe_flwr.models.layout import find_blocks, stack_path


class PartCache(DynamicCache):
    """The library's cache for blocks ``first_block .. stop_block - 1``, full or sliding.

    Blocks call it by their own number in the whole model. It counts its tokens itself, since the
    part may hold no block at all.
    """

    def __init__(self, config: Any, first_block: int, stop_block: int) -> None:
        super().__init__(config=_sliced(config, first_block, stop_block))
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
        """Tokens before this step, the same for every block."""
        del layer_idx
        return self.tokens


class TopCache(PartCache):
    """That of the uppermost blocks, which also remembers which rows the library went on with.

    The devices' caches hold one row until the first answer, so the first rows are all row 0.
    """

    def __init__(self, config: Any, first_block: int, stop_block: int) -> None:
        super().__init__(config, first_block, stop_block)
        self._rows: Tensor | None = None
        self._widened = False

    def reorder_cache(self, beam_idx: Any) -> None:
        """Row i goes on from row ``beam_idx[i]``, a tensor (B,)."""
        super().reorder_cache(beam_idx)
        self._rows = beam_idx

    def take_rows(self, width: int) -> Tensor | None:
        """From which rows of the last step the next ``width`` go on; None where nothing moved."""
        rows, self._rows = self._rows, None
        if not self._widened:
            self._widened = True
            return torch.zeros(width, dtype=torch.long) if width > 1 else None
        return rows


def _sliced(config: Any, first_block: int, stop_block: int) -> Any:
    part = copy.deepcopy(config.get_text_config(decoder=True))
    kinds = getattr(part, "layer_types", None)
    part.num_hidden_layers = stop_block - first_block
    if kinds is not None:
        part.layer_types = kinds[first_block:stop_block]
    return part


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """Blocks ``first_block .. stop_block - 1`` of a model and what stands around the list.

    With ``again`` each block is computed a second time in its backward pass, see ``checkpointed``.
    """

    model: PreTrainedModel
    family: Family
    first_block: int
    stop_block: int
    again: Around | None = None

    @property
    def steps_by_block(self) -> bool:
        """Whether blocks are called here, one by one, and not by the library."""
        return True

    @property
    def module(self) -> nn.Module:
        """The module that owns embedding and blocks."""
        return self.model.get_submodule(stack_path(self.model, self.family))

    @property
    def blocks(self) -> nn.ModuleList:
        """All blocks of the stack, those of other parts hollow."""
        return find_blocks(self.model, self.family)

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
        """Hidden states (B, T, D) behind the last of these blocks.

        With a ``cache`` they are those of the tokens that come next. Raises ModelError for a model
        type that has none.
        """
        if cache is not None:
            hidden_BTD = self._run_cached(hidden_BTD, context, cache)
            cache.tokens += hidden_BTD.shape[1]
            return hidden_BTD
        if self.first_block == self.stop_block:
            return hidden_BTD
        return self._run(hidden_BTD, context, self.family.inputs(self.module, hidden_BTD, context))

    def _run_cached(
        self, hidden_BTD: Tensor, context: Mapping[str, Tensor], cache: PartCache
    ) -> Tensor:
        if self.family.cached_inputs is None:
            raise ModelError(
                f"model type {self.model.config.model_type!r} cannot generate token by token when "
                "split: only its training is known"
            )
        if self.first_block == self.stop_block:
            return hidden_BTD
        arguments = self.family.cached_inputs(self.module, hidden_BTD, context, cache)
        return self._run(hidden_BTD, context, arguments)

    def _run(
        self, hidden_BTD: Tensor, context: Mapping[str, Tensor], arguments: BlockArguments
    ) -> Tensor:
        blocks = self.blocks
        for index in range(self.first_block, self.stop_block):
            output_BTD = self._call(blocks[index], hidden_BTD, arguments(index))
            if index == 0 and self.family.joined:
                output_BTD = self._join(hidden_BTD, output_BTD, context)
            hidden_BTD = output_BTD
        return hidden_BTD

    def _call(self, block: nn.Module, hidden_BTD: Tensor, arguments: dict[str, Any]) -> Tensor:
        if self.again is not None:
            return checkpointed(block, self.again, hidden_BTD, arguments)
        output = block(hidden_BTD, **arguments)
        return output if isinstance(output, Tensor) else output[0]

    def finish(self, hidden_BTD: Tensor) -> ModelOutput:
        """What the library's stack returns, from hidden states behind the last block."""
        for name in self.family.after:
            hidden_BTD = self.module.get_submodule(name)(hidden_BTD)
        pooler: Any = getattr(self.module, self.family.pooler, None)
        return BaseModelOutputWithPoolingAndCrossAttentions(
            last_hidden_state=hidden_BTD,
            pooler_output=None if pooler is None else pooler(hidden_BTD),
        )

    def _join(self, before_BTD: Tensor, after_BTD: Tensor, context: Mapping[str, Tensor]) -> Tensor:
        assert self.family.joined is not None
        owner, _, name = self.family.joined.rpartition(".")
        module: Any = getattr(self.module.get_submodule(owner), name, None)
        if module is None:
            return after_BTD
        joined: Tensor = module(before_BTD, after_BTD, token_mask(before_BTD, context))
        return joined


def without_cache(model: nn.Module) -> dict[str, bool]:
    """The argument that keeps a model from building a cache for generating, if it would."""
    return {"use_cache": False} if "use_cache" in accepted_arguments(model) else {}


def accepted_arguments(module: nn.Module) -> frozenset[str]:
    """The arguments that a module's own forward names."""
    signature = inspect.signature(type(module).forward)
    return frozenset(
        name
        for name, parameter in signature.parameters.items()
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD and name != "self"
    )


Forward = Callable[..., Any]


class _LastBlockDone(Exception):
    """Ends the library's forward behind the last block of this part."""

    def __init__(self, hidden_BTD: Tensor) -> None:
        super().__init__("last block done")
        self.hidden_BTD = hidden_BTD


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedStack(Stack):
    """A stack whose blocks run inside the library's own forward.

    The library loops over all blocks; those that this part lacks are stood in for. Blocks ahead of
    the part hand on the hidden states that came over the network, the last one jumps out of the
    loop. Masks, positions and other arguments are thus the library's own, without knowing the
    family. It serves model types without a record, and tests as the oracle of those with one.
    """

    @property
    def steps_by_block(self) -> bool:
        """See ``Stack.steps_by_block``."""
        return False

    def run_blocks(
        self,
        hidden_BTD: Tensor,
        context: Mapping[str, Tensor],
        cache: PartCache | None = None,
    ) -> Tensor:
        """See ``Stack.run_blocks``; there is no generating token by token."""
        if cache is not None:
            return Stack.run_blocks(self, hidden_BTD, context, cache)  # slots break super()
        if self.first_block == self.stop_block:
            return hidden_BTD
        try:
            self._replay(hidden_BTD, context, self._forward_of)
        except _LastBlockDone as done:
            return done.hidden_BTD
        raise AssertionError("the library's loop did not reach the last block")

    def finish(self, hidden_BTD: Tensor) -> ModelOutput:
        """What the library's stack returns, from hidden states behind the last block."""
        output: ModelOutput = self._replay(hidden_BTD, {}, lambda *_: self._handing_on(hidden_BTD))
        return output

    def _replay(
        self,
        hidden_BTD: Tensor,
        context: Mapping[str, Tensor],
        forward_of: Callable[[int, nn.Module, Tensor], Forward],
    ) -> Any:
        unread_BTD = torch.zeros_like(hidden_BTD)  # the library may change it in place
        known = {key: context[key] for key in ("attention_mask", "position_ids") if key in context}
        stack: Any = self.module  # the edge replaces this instance's own forward
        stand_ins = {
            **{
                stack.get_submodule(name): (lambda *_, **__: unread_BTD)
                for name in self.family.before
            },
            **{block: forward_of(i, block, hidden_BTD) for i, block in enumerate(self.blocks)},
        }
        try:
            for module, forward in stand_ins.items():
                module.forward = forward
            return type(stack).forward(
                stack, **self._input(hidden_BTD), **known, **without_cache(stack)
            )
        finally:
            for module in stand_ins:
                del module.forward

    def _input(self, hidden_BTD: Tensor) -> dict[str, Tensor]:
        """Anything of the right shape: the first block of this part reads ``hidden_BTD``."""
        if self.family.input_name != "pixel_values":
            return {"inputs_embeds": torch.zeros_like(hidden_BTD)}
        config: Any = self.module.config
        size = config.image_size
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        blank = torch.zeros((), device=hidden_BTD.device, dtype=hidden_BTD.dtype)
        return {"pixel_values": blank.expand(len(hidden_BTD), config.num_channels, height, width)}

    def _forward_of(self, index: int, block: nn.Module, hidden_BTD: Tensor) -> Forward:
        if index < self.first_block:
            return self._handing_on(hidden_BTD)
        is_first, is_last = index == self.first_block, index == self.stop_block - 1

        def forward(came_BTD: Tensor, *args: Any, **kwargs: Any) -> Any:
            given_BTD = hidden_BTD if is_first else came_BTD
            output = type(block).forward(block, given_BTD, *args, **kwargs)
            if is_last:
                raise _LastBlockDone(output if isinstance(output, Tensor) else output[0])
            return output

        return forward

    def _handing_on(self, hidden_BTD: Tensor) -> Forward:
        """A block that returns ``hidden_BTD`` in the form in which this family's blocks do."""
        results = self.family.block_results
        return lambda *_, **__: (hidden_BTD, *(None,) * (results - 1)) if results else hidden_BTD

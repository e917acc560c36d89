"""Running some blocks of a stack, with the mathematics of the library's own loop around them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPoolingAndCrossAttentions
from transformers.utils.generic import ModelOutput

from collapipe_flwr.core.errors import ModelError
from collapipe_flwr.models.again import Around, run_again
from collapipe_flwr.models.block_inputs import BlockArguments, token_mask
from collapipe_flwr.models.families import Family
from collapipe_flwr.models.kv_cache import PartCache
from collapipe_flwr.models.layout import find_blocks, stack_path


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """Blocks ``first_block .. stop_block - 1`` of a model and what stands around the list.

    With ``again`` each block is computed a second time in its backward pass, see ``run_again``.
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
            return run_again(block, self.again, hidden_BTD, arguments)
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

"""Running some blocks inside the library's own forward.

The library loops over all blocks; those that this part lacks are stood in for. Blocks ahead of
the part hand on the hidden states that came over the network, the last one jumps out of the
loop. Masks, positions and other arguments are thus the library's own, without knowing the
family. It serves model types without a record, and tests as the oracle of those with one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils.generic import ModelOutput

from collapipe_flwr.models.kv_cache import PartCache
from collapipe_flwr.models.stack import Stack, without_cache

Forward = Callable[..., Any]


class _LastBlockDone(Exception):
    """Ends the library's forward behind the last block of this part."""

    def __init__(self, hidden_BTD: Tensor) -> None:
        super().__init__("last block done")
        self.hidden_BTD = hidden_BTD


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedStack(Stack):
    """A stack whose blocks run inside the library's loop."""

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

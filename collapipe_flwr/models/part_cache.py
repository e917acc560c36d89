"""The caches of keys and values of a part of the blocks, while texts are generated."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache


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

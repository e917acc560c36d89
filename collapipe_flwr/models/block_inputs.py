"""What a block needs besides hidden states: masks and positions, and caches for generation.

Only the 2-D padding mask (and positions, where the user gives them) crosses the network; the
rest is rebuilt on the device that holds the block. Each builder answers, for one micro-batch, a
function from block index to keyword arguments. Hidden states lend shape, dtype and device to the
masks; their values are not read.

Shape suffixes: B examples, T tokens, D hidden size.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.masking_utils import (
    create_bidirectional_mask,
    create_bidirectional_sliding_window_mask,
    create_causal_mask,
    create_sliding_window_causal_mask,
)

Context = Mapping[str, Tensor]
BlockArguments = Callable[[int], dict[str, Any]]
InputsBuilder = Callable[..., BlockArguments]  # stack, hidden states, context, maybe a PartCache
_CAUSAL: Mapping[str, Callable[..., Any]] = {
    "full_attention": create_causal_mask,
    "sliding_attention": create_sliding_window_causal_mask,
}


def no_inputs(stack: Any, hidden_BTD: Tensor, context: Context) -> BlockArguments:
    """Vision and audio encoders: every position attends to every other."""
    del stack, hidden_BTD, context
    return lambda _: {"attention_mask": None}


def bidirectional(stack: Any, hidden_BTD: Tensor, context: Context) -> BlockArguments:
    """Encoders whose blocks take one padding mask."""
    mask = create_bidirectional_mask(**_mask_source(stack, hidden_BTD, context))
    return lambda _: {"attention_mask": mask}


def modernbert(stack: Any, hidden_BTD: Tensor, context: Context) -> BlockArguments:
    """Full and sliding attention alternate, each with its own rotary angles."""
    source = _mask_source(stack, hidden_BTD, context)
    masks = {
        "full_attention": create_bidirectional_mask(**source),
        "sliding_attention": create_bidirectional_sliding_window_mask(**source),
    }
    kinds: list[str] = stack.config.layer_types
    positions = _positions(hidden_BTD, context)
    rotary = {kind: stack.rotary_emb(hidden_BTD, positions, kind) for kind in set(kinds)}
    return lambda index: {
        "attention_mask": masks[kinds[index]],
        "position_embeddings": rotary[kinds[index]],
    }


def causal(kinds_of: Callable[[Any], Sequence[str]]) -> InputsBuilder:
    """Decoder-only models, with rotary positions where their stack has them.

    ``kinds_of`` the configuration says of each block if it sees all that came before or a window.
    """

    def build(
        stack: Any, hidden_BTD: Tensor, context: Context, cache: Any = None
    ) -> BlockArguments:
        positions, kinds = _positions(hidden_BTD, context, cache), kinds_of(stack.config)
        source = _mask_source(stack, hidden_BTD, context)
        masks = {
            kind: _CAUSAL[kind](**source, past_key_values=cache, position_ids=positions)
            for kind in set(kinds)
        }
        common = {"position_ids": positions, **_caching(cache)}
        if hasattr(stack, "rotary_emb"):
            common["position_embeddings"] = stack.rotary_emb(hidden_BTD, position_ids=positions)
        return lambda index: {"attention_mask": masks[kinds[index]], **common}

    return build


def no_window(config: Any) -> list[str]:
    """All blocks see all that came before; the library ignores a window in the configuration."""
    return ["full_attention"] * config.num_hidden_layers


def one_window(config: Any) -> list[str]:
    """All blocks see the configuration's window, if it has one (Mistral)."""
    kind = "full_attention" if config.sliding_window is None else "sliding_attention"
    return [kind] * config.num_hidden_layers


def t5(stack: Any, hidden_BTD: Tensor, context: Context) -> BlockArguments:
    """Every block adds the relative bias whose table lives in block 0."""
    mask = create_bidirectional_mask(**_mask_source(stack, hidden_BTD, context))
    length = hidden_BTD.shape[1]
    attention = stack.get_submodule("block.0.layer.0.SelfAttention")
    bias = attention.compute_bias(length, length, device=hidden_BTD.device)
    return lambda _: {"attention_mask": mask, "position_bias": bias}


def deberta_v2(stack: Any, hidden_BTD: Tensor, context: Context) -> BlockArguments:
    """Disentangled attention: every block reads the relative embeddings."""
    encoder = stack.encoder
    arguments = {
        "attention_mask": encoder.get_attention_mask(token_mask(hidden_BTD, context)),
        "relative_pos": encoder.get_rel_pos(hidden_BTD),
        "rel_embeddings": encoder.get_rel_embedding(),
    }
    return lambda _: arguments


def token_mask(hidden_BTD: Tensor, context: Context) -> Tensor:
    """The padding mask (B, T) as integers; all ones where the batch has none."""
    mask_BT = context.get("attention_mask")
    if mask_BT is None:
        return torch.ones(hidden_BTD.shape[:2], dtype=torch.long, device=hidden_BTD.device)
    return mask_BT.to(torch.long)


def _mask_source(stack: Any, hidden_BTD: Tensor, context: Context) -> dict[str, Any]:
    mask_BT = context.get("attention_mask")
    return {"config": stack.config, "inputs_embeds": hidden_BTD, "attention_mask": mask_BT}


def _caching(cache: Any) -> dict[str, Any]:
    return {"use_cache": False} if cache is None else {"use_cache": True, "past_key_values": cache}


def _positions(hidden_BTD: Tensor, context: Context, cache: Any = None) -> Tensor:
    given = context.get("position_ids")
    if given is not None:
        return given
    start = 0 if cache is None else cache.get_seq_length()
    stop = start + hidden_BTD.shape[1]
    return torch.arange(start, stop, device=hidden_BTD.device).unsqueeze(0)


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

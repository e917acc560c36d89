"""What a block needs besides hidden states, rebuilt on the device that holds it.

Only the 2-D padding mask (and positions, where the user gives them) crosses the network. Each
builder answers, for one micro-batch, a function from block index to keyword arguments. Hidden
states lend shape, dtype and device to the masks; their values are not read.

Shape suffixes: B examples, T tokens, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import (
    create_bidirectional_mask,
    create_bidirectional_sliding_window_mask,
    create_causal_mask,
    create_sliding_window_causal_mask,
)

Context = Mapping[str, Tensor]
BlockArguments = Callable[[int], dict[str, Any]]
InputsBuilder = Callable[[Any, Tensor, Context], BlockArguments]  # the stack's own type varies
CachedInputsBuilder = Callable[[Any, Tensor, Context, Any], BlockArguments]  # and a PartCache


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


def causal(stack: Any, hidden_BTD: Tensor, context: Context, cache: Any = None) -> BlockArguments:
    """Decoder-only models whose positions are embedded (GPT-2)."""
    positions = _positions(hidden_BTD, context, cache)
    source = _mask_source(stack, hidden_BTD, context)
    mask = create_causal_mask(**source, past_key_values=cache, position_ids=positions)
    return lambda _: {"attention_mask": mask, "position_ids": positions, **_caching(cache)}


def causal_rotary(
    stack: Any, hidden_BTD: Tensor, context: Context, cache: Any = None
) -> BlockArguments:
    """Decoder-only models with rotary positions whose blocks see all that came before.

    A window that their configuration may name is not theirs: the library ignores it.
    """
    return _causal_rotary(stack, hidden_BTD, context, cache, ["full_attention"] * len(stack.layers))


def windowed_rotary(
    stack: Any, hidden_BTD: Tensor, context: Context, cache: Any = None
) -> BlockArguments:
    """The same, but all blocks see the configuration's window, if it has one (Mistral)."""
    kind = "full_attention" if stack.config.sliding_window is None else "sliding_attention"
    return _causal_rotary(stack, hidden_BTD, context, cache, [kind] * len(stack.layers))


def mixed_rotary(
    stack: Any, hidden_BTD: Tensor, context: Context, cache: Any = None
) -> BlockArguments:
    """The same, but the configuration says of each block what it sees (Qwen)."""
    return _causal_rotary(stack, hidden_BTD, context, cache, stack.config.layer_types)


def _causal_rotary(
    stack: Any, hidden_BTD: Tensor, context: Context, cache: Any, kinds: list[str]
) -> BlockArguments:
    positions = _positions(hidden_BTD, context, cache)
    rotary = stack.rotary_emb(hidden_BTD, position_ids=positions)
    source = _mask_source(stack, hidden_BTD, context)
    builders = {
        "full_attention": create_causal_mask,
        "sliding_attention": create_sliding_window_causal_mask,
    }
    masks = {
        kind: builders[kind](**source, past_key_values=cache, position_ids=positions)
        for kind in set(kinds)
    }
    return lambda index: {
        "attention_mask": masks[kinds[index]],
        "position_ids": positions,
        "position_embeddings": rotary,
        **_caching(cache),
    }


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

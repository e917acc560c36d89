"""How each family of transformers splits: one small record, and how its blocks' inputs are built.

Paths are relative to the *stack*: the module that owns embedding and blocks. That is the base
model, or its encoder in encoder-decoder models, whatever task head sits on top.

Blocks need masks and positions besides hidden states. Only the 2-D padding mask (and positions,
where the user gives them) crosses the network; each device rebuilds the rest. A builder returns,
for one micro-batch, a function from block index to keyword arguments. Of hidden states it uses
shape, dtype and device, not the values.

Shape suffixes: B examples, T tokens, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import signature
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.masking_utils import (
    create_bidirectional_mask,
    create_bidirectional_sliding_window_mask,
    create_causal_mask,
    create_sliding_window_causal_mask,
)

from collapipe_flwr.core.errors import ModelError
from collapipe_flwr.models.spec import ModelSpec
from collapipe_flwr.models.tasks import is_transformers_class

Context = Mapping[str, Tensor]
BlockArguments = Callable[[int], dict[str, Any]]
InputsBuilder = Callable[..., BlockArguments]  # stack, hidden states, context, maybe a PartCache
# What the library calls a cache: the latter before version 5.24.
CACHE = "cache" if "cache" in signature(create_causal_mask).parameters else "past_key_values"
_CAUSAL: Mapping[str, Callable[..., Any]] = {
    "full_attention": create_causal_mask,
    "sliding_attention": create_sliding_window_causal_mask,
}


def no_inputs(stack: Any, hidden_BTD: Tensor, context: Context) -> BlockArguments:
    """Give blocks no mask: in vision and audio encoders, all positions attend to all."""
    del stack, hidden_BTD, context
    return lambda _: {"attention_mask": None}


def bidirectional(stack: Any, hidden_BTD: Tensor, context: Context) -> BlockArguments:
    """Give all blocks of an encoder one padding mask."""
    mask = _padding_mask(stack, hidden_BTD, context)
    return lambda _: {"attention_mask": mask}


def modernbert(stack: Any, hidden_BTD: Tensor, context: Context) -> BlockArguments:
    """Alternate full and sliding attention, each with its own rotary angles."""
    source = _mask_source(stack, hidden_BTD, context)
    masks = {
        "full_attention": _padding_mask(stack, hidden_BTD, context),
        "sliding_attention": create_bidirectional_sliding_window_mask(**source),
    }
    kinds: list[str] = stack.config.layer_types
    positions = _positions(hidden_BTD, context)
    rotary = {kind: stack.rotary_emb(hidden_BTD, positions, kind) for kind in set(kinds)}
    return lambda index: {
        "attention_mask": masks[kinds[index]],
        "position_embeddings": rotary[kinds[index]],
    }


def causal(
    kinds_of: Callable[[Any], Sequence[str]], *, rotary_per_kind: bool = False
) -> InputsBuilder:
    """Make the builder of decoder-only models, with rotary positions where they have them.

    ``kinds_of`` maps the configuration to the attention type of each block: full or sliding. With
    ``rotary_per_kind`` each type has its own rotary angles (Gemma 3).
    """

    def build(
        stack: Any, hidden_BTD: Tensor, context: Context, cache: Any = None
    ) -> BlockArguments:
        positions, kinds = _positions(hidden_BTD, context, cache), kinds_of(stack.config)
        source = {**_mask_source(stack, hidden_BTD, context), CACHE: cache}
        masks = {kind: _CAUSAL[kind](**source, position_ids=positions) for kind in set(kinds)}
        common: dict[str, Any] = {"position_ids": positions}
        if cache is not None:
            common[CACHE] = cache
        given = {kind: {"attention_mask": mask, **common} for kind, mask in masks.items()}
        for kind in given if hasattr(stack, "rotary_emb") else ():
            of_kind = (kind,) if rotary_per_kind else ()
            given[kind]["position_embeddings"] = stack.rotary_emb(hidden_BTD, positions, *of_kind)
        return lambda index: given[kinds[index]]

    return build


def no_window(config: Any) -> list[str]:
    """Use full attention in all blocks; the library ignores a window in the configuration."""
    return ["full_attention"] * config.num_hidden_layers


def one_window(config: Any) -> list[str]:
    """Use sliding attention in all blocks if the configuration has a window (Mistral, Phi-3)."""
    kind = "full_attention" if config.sliding_window is None else "sliding_attention"
    return [kind] * config.num_hidden_layers


def t5(stack: Any, hidden_BTD: Tensor, context: Context) -> BlockArguments:
    """Give every block the relative bias, whose table is in block 0."""
    mask = _padding_mask(stack, hidden_BTD, context)
    length = hidden_BTD.shape[1]
    attention = stack.get_submodule("block.0.layer.0.SelfAttention")
    bias = attention.compute_bias(length, length, device=hidden_BTD.device)
    return lambda _: {"attention_mask": mask, "position_bias": bias}


def deberta_v2(stack: Any, hidden_BTD: Tensor, context: Context) -> BlockArguments:
    """Give every block the relative embeddings, for disentangled attention."""
    encoder = stack.encoder
    arguments = {
        "attention_mask": encoder.get_attention_mask(token_mask(hidden_BTD, context)),
        "relative_pos": encoder.get_rel_pos(hidden_BTD),
        "rel_embeddings": encoder.get_rel_embedding(),
    }
    return lambda _: arguments


def token_mask(hidden_BTD: Tensor, context: Context) -> Tensor:
    """Return the padding mask (B, T) as integers; all ones where the batch has none."""
    mask_BT = context.get("attention_mask")
    if mask_BT is None:
        return torch.ones(hidden_BTD.shape[:2], dtype=torch.long, device=hidden_BTD.device)
    return mask_BT.to(torch.long)


def _mask_source(stack: Any, hidden_BTD: Tensor, context: Context) -> dict[str, Any]:
    mask_BT = context.get("attention_mask")
    return {"config": stack.config, "inputs_embeds": hidden_BTD, "attention_mask": mask_BT}


def _padding_mask(stack: Any, hidden_BTD: Tensor, context: Context) -> Any:
    """Make the library's mask of an encoder, for tokens on a CPU in a sixth of its time."""
    mask_BT = context.get("attention_mask")
    if (
        type(mask_BT) is not Tensor  # but one of a trace
        or not mask_BT.is_cpu
        or mask_BT.shape != hidden_BTD.shape[:2]
        or stack.config._attn_implementation != "sdpa"
    ):
        return create_bidirectional_mask(**_mask_source(stack, hidden_BTD, context))
    kept_BT = mask_BT.to(torch.bool)
    if kept_BT.all():
        return None
    return kept_BT[:, None, None].expand(-1, 1, hidden_BTD.shape[1], -1).contiguous()


def _positions(hidden_BTD: Tensor, context: Context, cache: Any = None) -> Tensor:
    given = context.get("position_ids")
    if given is not None:
        return given
    start = 0 if cache is None else cache.get_seq_length()
    stop = start + hidden_BTD.shape[1]
    return torch.arange(start, stop, device=hidden_BTD.device).unsqueeze(0)


_UNDERSTANDING = ("sequence-classification", "token-classification", "masked-lm")
_GENERATING = ("causal-lm", "sequence-classification", "token-classification")


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How one architecture splits.

    ``before`` are the modules that run ahead of the first block, ``after`` those that run in
    order after the last, ``shared`` the parameters that every block reads, and ``joined`` a
    module that runs after block 0 and also reads that block's input.
    """

    model_types: tuple[str, ...]
    blocks: str
    before: tuple[str, ...]
    inputs: InputsBuilder | None  # None: taken from the library's own loop (``Stack``)
    tasks: tuple[str, ...]
    stack: str = ""
    after: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()
    joined: str | None = None
    exit: str | None = None  # where the embedding ends, if modules run ahead of block 0
    settings: tuple[str, ...] = ()  # keys that the model reads but its configuration omits
    input_name: str = "input_ids"
    entry: str = "inputs_embeds"  # the argument through which a task head takes hidden states
    caches: bool = False  # its blocks generate token by token, and `inputs` takes a cache
    decodes: bool = False  # the edge holds a decoder, not blocks and a head
    block_results: int = 0  # length of the tuple that a block returns; 0: hidden states, bare


_ENCODER = Family(
    model_types=("bert", "roberta", "xlm-roberta", "camembert"),
    blocks="encoder.layer",
    before=("embeddings",),
    inputs=bidirectional,
    tasks=_UNDERSTANDING,
)
_TRANSLATOR = Family(
    model_types=("marian", "bart"),
    stack="encoder",
    decodes=True,
    blocks="layers",
    before=("embed_tokens", "embed_positions", "layernorm_embedding"),
    inputs=bidirectional,
    tasks=("seq2seq",),
)
_DECODER = Family(
    model_types=("llama", "gemma", "olmo2"),
    blocks="layers",
    before=("embed_tokens",),
    inputs=causal(no_window),
    caches=True,
    tasks=_GENERATING,
    after=("norm",),
)
_FAMILIES = (
    _ENCODER,
    replace(_ENCODER, model_types=("distilbert",), blocks="transformer.layer"),
    replace(
        _ENCODER,
        model_types=("deberta-v2",),
        inputs=deberta_v2,
        shared=("encoder.rel_embeddings", "encoder.LayerNorm"),
        joined="encoder.conv",
        exit="encoder",
        settings=(
            "position_buckets",
            "norm_rel_ebd",
            "share_att_key",
            "conv_kernel_size",
            "conv_act",
            "conv_groups",
        ),
    ),
    replace(
        _ENCODER,
        model_types=("modernbert",),
        blocks="layers",
        inputs=modernbert,
        after=("final_norm",),
    ),
    replace(
        _ENCODER,
        model_types=("vit",),
        blocks="layers",
        inputs=no_inputs,
        tasks=("image-classification",),
        after=("layernorm",),
        input_name="pixel_values",
        entry="pixel_values",
    ),
    _TRANSLATOR,
    replace(_TRANSLATOR, model_types=("mbart", "m2m_100"), after=("layer_norm",)),
    replace(
        _TRANSLATOR,
        model_types=("t5", "mt5"),
        blocks="block",
        before=("embed_tokens",),
        inputs=t5,
        after=("final_layer_norm", "dropout"),
        shared=("block.0.layer.0.SelfAttention.relative_attention_bias",),
    ),
    replace(
        _TRANSLATOR,
        model_types=("whisper",),
        before=("conv1", "conv2", "embed_positions"),
        input_name="input_features",
        inputs=no_inputs,
        after=("layer_norm",),
    ),
    replace(_DECODER, model_types=("gpt2",), blocks="h", before=("wte", "wpe"), after=("ln_f",)),
    _DECODER,
    replace(_DECODER, model_types=("mistral", "phi3"), inputs=causal(one_window)),
    replace(
        _DECODER,
        model_types=("qwen2", "qwen3", "smollm3"),
        inputs=causal(attrgetter("layer_types")),
    ),
    replace(
        _DECODER,
        model_types=("gemma3_text",),
        inputs=causal(attrgetter("layer_types"), rotary_per_kind=True),
    ),
)
FAMILIES: Mapping[str, Family] = {
    model_type: family for family in _FAMILIES for model_type in family.model_types
}


def find_stack_path(model: PreTrainedModel, family: Family) -> str:
    """Return the path of the stack in the whole model: ``bert``, ``model.encoder``, ..."""
    return join_path(find_base_path(model), family.stack)


def find_base_path(model: PreTrainedModel) -> str:
    """Return the path of the base model in one with a head; empty if it is the whole model.

    A head that is not a class of the library may have any name for it.
    """
    base = model.base_model
    if base is model and not is_transformers_class(type(model)):
        inner = (m for m in model.modules() if isinstance(m, PreTrainedModel) and m is not model)
        base = next(inner, model)
    path: str = next(name for name, module in model.named_modules() if module is base)
    return path


def find_blocks(model: PreTrainedModel, family: Family) -> nn.ModuleList:
    """Return the family's block list; raises ModelError if the model has none there."""
    path = join_path(find_stack_path(model, family), family.blocks)
    blocks = model.get_submodule(path)
    if not isinstance(blocks, nn.ModuleList) or len(blocks) == 0:
        raise ModelError(f"model type {model.config.model_type!r} has no blocks at {path!r}")
    return blocks


def join_path(*parts: str) -> str:
    """Join module names to a dotted path; empty ones are left out."""
    return ".".join(part for part in parts if part)


# mBART's decoder starts with the label's language token
_START_TOKENS = {"mbart": ("pad_token_id",)}
_ALL_START_TOKENS = ("pad_token_id", "decoder_start_token_id")
LAYERDROPS = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop")


def refuse_inexact(config: Any, family: Family, task: str) -> None:
    """Raise ModelError where a cut model would compute something else than the whole one."""
    is_encoder = not family.decodes and family.inputs is not None
    if is_encoder and getattr(config, "is_decoder", False):
        raise ModelError(f"is_decoder must be false for {config.model_type!r}: it is an encoder")
    if getattr(config, "apply_spec_augment", False):
        raise ModelError("apply_spec_augment must be false: mask the input features beforehand")
    if getattr(config, "output_router_logits", False):
        raise ModelError(
            "output_router_logits must be false: the loss that balances experts reads the routers "
            "of all blocks, which are on other machines"
        )
    if task == "masked-lm" and not getattr(config, "legacy", True):
        raise ModelError(
            f"legacy must be true for {config.model_type!r} and masked-lm: its other head reads "
            "the embedding, which is on another machine"
        )
    if family.decodes and family.inputs is not None:  # else it could not shift its labels
        for key in _START_TOKENS.get(config.model_type, _ALL_START_TOKENS):
            if getattr(config, key, None) is None:
                raise missing_token(config, key)
    pools = task == "sequence-classification" and "masked-lm" not in family.tasks
    if pools and config.get_text_config().pad_token_id is None:  # by the last token but padding
        raise missing_token(config, "pad_token_id")
    if _scales_dynamically(config.to_dict()):
        raise ModelError(
            "rope_type must not be 'dynamic': its frequencies follow the longest text that a "
            "machine has seen so far; set 'yarn' or 'linear' with the same factor"
        )
    for key in LAYERDROPS:
        if getattr(config, key, 0.0):
            raise ModelError(f"{key} must be 0: a block cannot be skipped on one machine only")


def find_rope_switch(settings: Mapping[str, Any]) -> int | None:
    """Return the tokens beyond which a text has other rotary angles from its beginning on.

    The longest text of a micro-batch decides on all of it, and cached keys have the former angles.
    """
    if settings.get("rope_type") == "longrope":
        return settings.get("original_max_position_embeddings")
    parts = (find_rope_switch(v) for v in settings.values() if isinstance(v, Mapping))
    return next((found for found in parts if found is not None), None)


def _scales_dynamically(settings: Mapping[str, Any]) -> bool:
    """Return whether rotary positions depend on earlier batches, anywhere in the settings."""
    return settings.get("rope_type") == "dynamic" or any(
        _scales_dynamically(v) for v in settings.values() if isinstance(v, Mapping)
    )


def count_device_blocks(total_blocks: int, spec: ModelSpec, family: Family) -> int:
    """Return how many of the blocks devices may hold; raises ModelError if none is left."""
    if spec.edge_blocks and family.decodes:
        raise ModelError(
            f"edge_blocks must be 0 for {spec.model_type!r}: its decoder stands at the edge"
        )
    if spec.edge_blocks >= total_blocks:
        raise ModelError(
            f"edge_blocks must be below the model's {total_blocks} blocks, got {spec.edge_blocks}"
        )
    left = total_blocks - spec.edge_blocks - spec.held_blocks
    if left < 1:
        raise ModelError(
            f"of the model's {total_blocks} blocks, {spec.held_blocks} stay at the control unit "
            f"and {spec.edge_blocks} at the edge, so none is left for devices: leave one"
        )
    return left


def missing_token(config: Any, key: str) -> ModelError:
    """Make the error for a special token that is not given; only the tokenizer knows it."""
    return ModelError(f"{config.model_type!r} models need {key}; take it from the tokenizer")


# These count positions from the padding token's id + 1.
_SHIFTED_POSITIONS = ("roberta", "xlm-roberta", "camembert")


def find_most_positions(config: Any) -> int | None:
    """Return how many tokens a sequence may have when split; None where there is no limit."""
    positions = getattr(config, "max_position_embeddings", None)
    if (switch := find_rope_switch(config.to_dict())) is not None:
        return switch
    if not isinstance(positions, int) or positions < 1:
        return None
    if config.model_type in _SHIFTED_POSITIONS:
        return positions - (config.pad_token_id or 0) - 1
    return positions

"""One small record per family: where its embedding, its blocks and its last norm live.

Paths are relative to the *stack*: the module that owns embedding and blocks. That is the base
model, or its encoder in encoder-decoder models, whatever task head sits on top.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter

from torch import nn
from transformers import PreTrainedModel

from collapipe_flwr.core.errors import ModelError
from collapipe_flwr.models import block_inputs
from collapipe_flwr.models.block_inputs import InputsBuilder
from collapipe_flwr.models.tasks import is_librarys

_UNDERSTANDING = ("sequence-classification", "token-classification", "masked-lm")
_GENERATING = ("causal-lm", "sequence-classification", "token-classification")


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How one architecture splits.

    ``before`` are the modules that run ahead of the first block, ``after`` those that run in
    order behind the last, ``shared`` the parameters that every block reads, and ``joined`` a
    module that runs behind block 0 and sees that block's input too.
    """

    model_types: tuple[str, ...]
    blocks: str
    before: tuple[str, ...]
    inputs: InputsBuilder
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
    decodes: bool = False  # a decoder, not blocks and a head, stands at the edge
    replayed: bool = False  # run inside the library's own loop (``ReplayedStack``)
    block_results: int = 0  # length of the tuple that a block returns; 0: hidden states, bare


_FAMILIES = (
    *(
        Family(
            model_types=model_types,
            blocks=blocks,
            before=("embeddings",),
            inputs=block_inputs.bidirectional,
            tasks=_UNDERSTANDING,
        )
        for model_types, blocks in (
            (("bert", "roberta", "xlm-roberta", "camembert"), "encoder.layer"),
            (("distilbert",), "transformer.layer"),
        )
    ),
    Family(
        model_types=("deberta-v2",),
        blocks="encoder.layer",
        before=("embeddings",),
        inputs=block_inputs.deberta_v2,
        tasks=_UNDERSTANDING,
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
    Family(
        model_types=("modernbert",),
        blocks="layers",
        before=("embeddings",),
        inputs=block_inputs.modernbert,
        tasks=_UNDERSTANDING,
        after=("final_norm",),
    ),
    Family(
        model_types=("vit",),
        blocks="layers",
        before=("embeddings",),
        inputs=block_inputs.no_inputs,
        tasks=("image-classification",),
        after=("layernorm",),
        input_name="pixel_values",
        entry="pixel_values",
    ),
    *(
        Family(
            model_types=model_types,
            stack="encoder",
            decodes=True,
            blocks="layers",
            before=("embed_tokens", "embed_positions", "layernorm_embedding"),
            inputs=block_inputs.bidirectional,
            tasks=("seq2seq",),
            after=after,
        )
        for model_types, after in (
            (("marian", "bart"), ()),
            (("mbart", "m2m_100"), ("layer_norm",)),
        )
    ),
    Family(
        model_types=("t5", "mt5"),
        stack="encoder",
        decodes=True,
        blocks="block",
        before=("embed_tokens",),
        inputs=block_inputs.t5,
        tasks=("seq2seq",),
        after=("final_layer_norm", "dropout"),
        shared=("block.0.layer.0.SelfAttention.relative_attention_bias",),
    ),
    Family(
        model_types=("whisper",),
        stack="encoder",
        decodes=True,
        blocks="layers",
        before=("conv1", "conv2", "embed_positions"),
        input_name="input_features",
        inputs=block_inputs.no_inputs,
        tasks=("seq2seq",),
        after=("layer_norm",),
    ),
    Family(
        model_types=("gpt2",),
        blocks="h",
        before=("wte", "wpe"),
        inputs=block_inputs.causal(block_inputs.no_window),
        caches=True,
        tasks=_GENERATING,
        after=("ln_f",),
    ),
    *(
        Family(
            model_types=model_types,
            blocks="layers",
            before=("embed_tokens",),
            inputs=block_inputs.causal(kinds_of),
            caches=True,
            tasks=_GENERATING,
            after=("norm",),
        )
        for model_types, kinds_of in (
            (("llama", "gemma"), block_inputs.no_window),
            (("mistral",), block_inputs.one_window),
            (("qwen2", "qwen3"), attrgetter("layer_types")),
        )
    ),
)
FAMILIES: Mapping[str, Family] = {
    model_type: family for family in _FAMILIES for model_type in family.model_types
}


def stack_path(model: PreTrainedModel, family: Family) -> str:
    """Where the stack stands in the whole model: ``bert``, ``model.encoder``, ..."""
    return join_path(base_path(model), family.stack)


def base_path(model: PreTrainedModel) -> str:
    """Where the base model stands in one with a head; empty if it is the whole model.

    A head that is no class of the library may keep it under any name.
    """
    base = model.base_model
    if base is model and not is_librarys(type(model)):
        inner = (m for m in model.modules() if isinstance(m, PreTrainedModel) and m is not model)
        base = next(inner, model)
    path: str = next(name for name, module in model.named_modules() if module is base)
    return path


def find_blocks(model: PreTrainedModel, family: Family) -> nn.ModuleList:
    """The family's block list; raises ModelError if the model has none there."""
    path = join_path(stack_path(model, family), family.blocks)
    blocks = model.get_submodule(path)
    if not isinstance(blocks, nn.ModuleList) or len(blocks) == 0:
        raise ModelError(f"model type {model.config.model_type!r} has no blocks at {path!r}")
    return blocks


def join_path(*parts: str) -> str:
    """Dotted path of module names, empty ones left out."""
    return ".".join(part for part in parts if part)

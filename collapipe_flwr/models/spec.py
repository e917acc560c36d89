"""The description of a model: the run-config's ``model.*`` and ``lora.*`` keys, and its spec.

The ``ModelSpec`` (of transformers) or ``ModuleSpec`` (of plain torch) travels in Flower and gRPC
messages as one JSON string.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches

from collapipe_flwr.core.errors import ModelError, ProtocolError
from collapipe_flwr.core.imports import is_spelled, list_words
from collapipe_flwr.core.json_codec import from_json, to_json
from collapipe_flwr.core.keys import (
    assignments,
    at_least,
    between,
    check_keys,
    counts,
    key,
    one_of,
    read_assignments,
    words,
)

TIE_POLICIES = ("untie", "rows")
SHARED_POLICIES = ("freeze", "sum")
MODEL_TYPES = (  # of transformers, that `families` splits by a record of their own
    *("bert", "roberta", "xlm-roberta", "camembert", "distilbert", "deberta-v2", "modernbert"),
    *("vit", "marian", "bart", "mbart", "m2m_100", "t5", "mt5", "whisper"),
    *("gpt2", "llama", "gemma", "olmo2", "mistral", "phi3", "qwen2", "qwen3", "smollm3"),
    "gemma3_text",
)
FROZEN_DTYPES = ("float32", "bfloat16", "int8", "nf4")
FACTORS, PRODUCTS = "factors", "products"  # of adapters: what is averaged across clusters
_DEMO = (
    "d_model=64 encoder_layers=6 decoder_layers=2 encoder_attention_heads=4 "
    "decoder_attention_heads=4 encoder_ffn_dim=128 decoder_ffn_dim=128 "
    "max_position_embeddings=64 scale_embedding=true init_std=0.05 dropout=0.0"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The transformer: built from a Hugging Face config, or loaded from a folder or the hub."""

    type: str = key("marian")  # a transformers model type; ignored when pretrained is set
    pretrained: str = key("")
    overrides: str = key(_DEMO, assignments())  # fields of its config; "" keeps them all
    edge_blocks: int = key(0, at_least(0))  # upper blocks that stay at the edge; no decoders
    frozen_blocks: int = key(0, at_least(0))  # lower blocks, not trained; nor is the embedding
    ties: str = key("untie", one_of(*TIE_POLICIES))  # rows: one table, lent row by row
    shared: str = key("freeze", one_of(*SHARED_POLICIES))  # parameters that every block reads

    @property
    def settings(self) -> dict[str, object]:
        """``overrides`` as a mapping; the default ones shape the demo, never a checkpoint."""
        untouched = bool(self.pretrained) and self.overrides == _DEMO
        return {} if untouched else read_assignments(self.overrides)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters on a frozen checkpoint; only they (and a new head) train and travel.

    Adapters count ``alpha / rank`` times. ``target_modules`` are ends of module names, or the one
    word ``all-linear``; ``modules_to_save`` train in full and travel with the adapters. Frozen
    matrices are kept in ``frozen_dtype`` and widened for each product. ``rank`` is that of the
    global adapters; clusters may train smaller ones if ``aggregate`` is products.
    """

    rank: int = key(0, at_least(0))  # 0: train all weights
    alpha: int = key(16, at_least(1))
    dropout: float = key(0.0, between(0, 0.99))
    target_modules: tuple[str, ...] = key((), words())  # empty: peft's choice
    modules_to_save: tuple[str, ...] = key((), words())  # empty: the head of a classifier
    frozen_dtype: str = key("float32", one_of(*FROZEN_DTYPES))  # in memory
    aggregate: str = key(FACTORS, one_of(FACTORS, PRODUCTS))  # see `models.products`
    ranks: tuple[int, ...] = key((), counts(empty=True))  # that plans choose clusters' from

    def __post_init__(self) -> None:
        check_keys(self, "lora.")


def may_be_type(name: str) -> bool:
    """Return whether transformers, which is not loaded for it, may have models of this type."""
    return bool(name) and is_spelled(name, "transformers", "models/auto/*.py")


def check_settings(settings: Iterable[str], model_type: str) -> None:
    """Raise ModelError for a setting that no model of transformers, which is not loaded, has."""
    folder = f"models/{model_type.replace('-', '_')}"
    own = list_words("transformers", f"{folder}/configuration_*.py")
    if own and (strange := [name for name in settings if name not in own]):
        others = (f"{folder}/*.py", "models/*/configuration_*.py", "configuration_utils.py")
        known = set[str]().union(*(list_words("transformers", files) for files in others))
        for name in strange:
            if name not in known:
                raise unknown_setting(name, model_type, own)


def unknown_setting(name: str, model_type: str, known: Iterable[str]) -> ModelError:
    """Make the error for an override that models of this type do not have."""
    hint = suggest(name, known) or (
        "see its configuration class in the transformers manual, and replace overrides that were "
        "made for another type"
    )
    return ModelError(f"{model_type!r} models have no setting {name!r}; {hint}")


def suggest(name: str, known: Iterable[str]) -> str | None:
    """Ask whether one of a few similar names was meant; None where none is similar."""
    near = get_close_matches(name, list(known), n=3)
    return f"did you mean {' or '.join(map(repr, near))}?" if near else None


def unknown_type(model_type: str) -> ModelError:
    """Make the error for a model type that transformers does not have."""
    near = nearest_types(model_type)
    hint = f"did you mean {' or '.join(map(repr, near))}?"
    known = f"choose one of {', '.join(MODEL_TYPES)}"
    return ModelError(f"unknown model type {model_type!r}; {hint if near else known}")


def nearest_types(name: str) -> list[str]:
    """Return the model types that may have been meant."""
    return get_close_matches(name, MODEL_TYPES, n=3)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchShape:
    """Tokens per example (patches or frames count as tokens), after padding."""

    source_length: int
    target_length: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Description:
    """What specs of both kinds say of a model and its training.

    The last ``edge_blocks`` blocks stay at the edge. ``loss`` is the import path of a function of
    outputs and batch; empty: the model's own. The mean runs over ``weight`` (see ``Objective``;
    empty: labels, or examples if the loss or the head is an own one). ``frozen`` are keys that the
    user does not train. Batches may not be cut with ``whole_batches``, nor where one of the tensors
    ``complete`` holds an ignored label (`decomposition`).
    """

    edge_blocks: int = 0
    frozen: tuple[str, ...] = ()
    loss: str = ""
    weight: str = ""
    whole_batches: bool = False
    complete: tuple[str, ...] = ()

    def to_json(self) -> str:
        """Write one string; the inverse of ``spec_of``."""
        return to_json(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec(_Description):
    """One transformer and the task it learns, without weights.

    ``config_json`` is the whole transformers configuration, ``model_type`` and labels included.
    ``pretrained`` names the folder or hub repository of the first weights; None draws them. Only a
    model without a decoder may have ``edge_blocks``.

    ``ties`` concerns a table that embedding and edge would share: ``untie`` makes
    two independent tables with equal first values, ``rows`` keeps one at the edge (``parts``).
    ``shared`` concerns parameters that every block reads (T5's relative bias, DeBERTa's relative
    embeddings): ``freeze`` never trains them, with ``sum`` the caller adds up the gradients of
    their replicas before each optimizer step. ``untied`` names keys that the architecture ties but
    the checkpoint does not (the output table of T5 1.1). The first ``held_blocks`` blocks, which
    like the embedding must be frozen, stay with it at the control unit.

    ``model_class`` is the import path of a transformers class or own head; empty: that of the
    task.

    With ``lora``, or the adapters of a user's `PeftModel` (``adapter_json``), only adapters (and
    ``modules_to_save``) train. Every part reads frozen weights from ``pretrained`` itself, but for
    the keys ``absent`` there, which travel. ``base_digests`` are those of what it must find.
    """

    task: str
    config_json: str
    pretrained: str | None = None
    ties: str = "untie"
    shared: str = "freeze"
    untied: tuple[str, ...] = ()
    held_blocks: int = 0
    lora: LoraConfig | None = None
    absent: tuple[str, ...] = ()
    adapter_json: str = ""
    base_digests: tuple[str, ...] = ()
    model_class: str = ""

    def __post_init__(self) -> None:
        for name in ("model_class", "loss", "weight"):
            if not isinstance(getattr(self, name), str):
                raise ModelError(f"{name} must be a text, got {getattr(self, name)!r}")
        for name, choices in (("ties", TIE_POLICIES), ("shared", SHARED_POLICIES)):
            if getattr(self, name) not in choices:
                raise ModelError(
                    f"{name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}"
                )
        for name in ("edge_blocks", "held_blocks"):
            if getattr(self, name) < 0:
                raise ModelError(f"{name} must be 0 or more, got {getattr(self, name)}")
        if self.lora is not None and self.lora.rank < 1:
            raise ModelError(f"the lora settings of a model need a rank >= 1, got {self.lora.rank}")
        try:
            config = json.loads(self.config_json)
        except ValueError as cause:
            raise ModelError(f"config_json is not JSON: {cause}") from cause
        if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
            raise ModelError("config_json must be an object with model_type")

    @property
    def model_type(self) -> str:
        """The transformers name of the architecture, for example ``bert``."""
        return str(json.loads(self.config_json)["model_type"])

    @property
    def adapted(self) -> bool:
        """Whether there are adapters, so that all else is frozen."""
        return self.lora is not None or bool(self.adapter_json)

    @property
    def unadapted(self) -> ModelSpec:
        """The same model without adapters."""
        return replace(self, lora=None, adapter_json="", base_digests=())

    @property
    def rank(self) -> int:
        """The rank of its adapters, 0 without any; patterns of a live model may name others."""
        if self.lora is not None:
            return self.lora.rank
        return int(json.loads(self.adapter_json)["r"]) if self.adapter_json else 0

    def with_rank(self, rank: int) -> ModelSpec:
        """Return the same model with adapters of another rank."""
        if self.lora is not None:
            return replace(self, lora=replace(self.lora, rank=rank))
        values = {**json.loads(self.adapter_json), "r": rank}
        return replace(self, adapter_json=json.dumps(values, sort_keys=True))


Example = tuple[str, str, tuple[int, ...]]  # tensor of a batch, dtype, shape
_MOST_BLOCKS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleSpec(_Description):
    """One torch module, without weights; ``build`` is the import path of its class or function.

    ``before`` are the keys that the control unit owns, ``tied`` those tables among the edge's that
    the embedding reads too, with the input that holds the ids. ``updated`` are buffers that
    training changes.

    ``inputs`` are the tensors of a batch that forward takes; ``tail`` those that travel because
    the head after the blocks reads them. ``call_json`` describes the arguments of blocks beside
    hidden states, ``results`` is the length of the tuple that they return (0: bare hidden states).
    ``example`` is the shape of one batch. All is found by a trace of the live model.
    """

    build: str
    arguments_json: str = "{}"
    blocks: str
    num_blocks: int
    before: tuple[str, ...]
    tied: tuple[tuple[str, str], ...] = ()
    updated: tuple[str, ...] = ()
    inputs: tuple[str, ...]
    tail: tuple[str, ...] = ()
    call_json: str = "{}"
    results: int = 0
    example: tuple[Example, ...]
    drops: bool = True

    def __post_init__(self) -> None:
        import torch  # slow, and the run-config is read without it

        for text in (self.arguments_json, self.call_json):
            if not isinstance(json.loads(text), dict):
                raise ModelError(f"{text[:80]!r} holds no arguments by name")
        for name, dtype, _ in self.example:
            if not isinstance(getattr(torch, dtype, None), torch.dtype):
                raise ModelError(f"the example's {name!r} is of no type that torch has: {dtype!r}")
        if not 0 < self.num_blocks <= _MOST_BLOCKS:
            raise ModelError(
                f"a module must have 1 to {_MOST_BLOCKS} blocks to be cut, got {self.num_blocks}"
            )
        if not 0 <= self.edge_blocks < self.num_blocks:
            raise ModelError(
                f"edge_blocks must be below the model's {self.num_blocks} blocks, got "
                f"{self.edge_blocks}"
            )

    @property
    def batch_size(self) -> int:
        """Examples in the example; 0 where its tensors do not agree."""
        sizes = {shape[0] if shape else 0 for _, _, shape in self.example}
        return sizes.pop() if len(sizes) == 1 else 0


def spec_of(text: str) -> ModelSpec | ModuleSpec:
    """Read the description that a string holds; raises ModelError."""
    kind: type[ModelSpec | ModuleSpec] = ModelSpec
    with suppress(ValueError, RecursionError):  # refused below
        values = json.loads(text)
        if isinstance(values, dict) and "build" in values:
            kind = ModuleSpec
    try:
        return from_json(kind, text, "it")
    except (ProtocolError, ValueError, RecursionError) as cause:  # its arguments are JSON within
        raise ModelError(f"the description of a model cannot be read: {cause}") from cause

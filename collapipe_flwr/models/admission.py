"""Which models may be cut, and how far: one clear sentence for every refusal."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from collapipe_flwr.core.errors import ModelError
from collapipe_flwr.models.discovery import discover_family
from collapipe_flwr.models.families import FAMILIES, Family
from collapipe_flwr.models.spec import ModelSpec

# mBART's decoder starts with the label's language token
_START_TOKENS = {"mbart": ("pad_token_id",)}
_ALL_START_TOKENS = ("pad_token_id", "decoder_start_token_id")
LAYERDROPS = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop")


def family_for(spec: ModelSpec) -> Family:
    """The record of the model type, or what a trace finds; raises ModelError."""
    family = FAMILIES.get(spec.model_type) or discover_family(replace(spec, lora=None))
    if spec.task not in family.tasks:
        able = f"it can do {', '.join(family.tasks)}" if family.tasks else "choose another type"
        raise ModelError(
            f"model type {spec.model_type!r} cannot do the task {spec.task!r} when split; {able}"
        )
    return family


def refuse_inexact(config: Any, family: Family, task: str) -> None:
    """Raise ModelError where a cut model would compute something else than the whole one."""
    is_encoder = not family.decodes and not family.replayed
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
    _require_start_tokens(config, family)
    for key in LAYERDROPS:
        if getattr(config, key, 0.0):
            raise ModelError(f"{key} must be 0: a block cannot be skipped on one machine only")


def blocks_for_devices(total_blocks: int, spec: ModelSpec, family: Family) -> int:
    """How many of the blocks devices may hold; raises ModelError if none is left."""
    if spec.edge_blocks and family.decodes:
        raise ModelError(
            f"edge_blocks must be 0 for {spec.model_type!r}: its decoder stands at the edge"
        )
    if spec.edge_blocks >= total_blocks:
        raise ModelError(
            f"edge_blocks must be below the model's {total_blocks} blocks, got {spec.edge_blocks}"
        )
    return total_blocks - spec.edge_blocks


def _require_start_tokens(config: Any, family: Family) -> None:
    """Raise ModelError where a decoder could not shift its labels."""
    needed = _START_TOKENS.get(config.model_type, _ALL_START_TOKENS)
    for key in needed if family.decodes and not family.replayed else ():
        if getattr(config, key, None) is None:
            raise needs_token(config, key)


def needs_token(config: Any, key: str) -> ModelError:
    """A special token that only the tokenizer knows is not given."""
    return ModelError(f"{config.model_type!r} models need {key}; take it from the tokenizer")

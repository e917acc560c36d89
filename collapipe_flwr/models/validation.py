"""Checks of a model before it is cut."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from collapipe_flwr.core.errors import ModelError
from collapipe_flwr.models.families import Family
from collapipe_flwr.models.spec import ModelSpec

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
    return total_blocks - spec.edge_blocks


def missing_token(config: Any, key: str) -> ModelError:
    """Make the error for a special token that is not given; only the tokenizer knows it."""
    return ModelError(f"{config.model_type!r} models need {key}; take it from the tokenizer")


# These count positions from the padding token's id + 1.
_SHIFTED_POSITIONS = ("roberta", "xlm-roberta", "camembert")


def most_positions(config: Any) -> int | None:
    """Return how many tokens a sequence may have when split; None where there is no limit."""
    positions = getattr(config, "max_position_embeddings", None)
    if (switch := find_rope_switch(config.to_dict())) is not None:
        return switch
    if not isinstance(positions, int) or positions < 1:
        return None
    if config.model_type in _SHIFTED_POSITIONS:
        return positions - (config.pad_token_id or 0) - 1
    return positions

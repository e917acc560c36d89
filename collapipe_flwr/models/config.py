"""What a user says about the model: the run-config's ``model.*`` and ``lora.*`` keys."""

from __future__ import annotations

from dataclasses import dataclass

from collapipe_flwr.core.errors import ModelError
from collapipe_flwr.core.keys import (
    assignments,
    at_least,
    between,
    key,
    one_of,
    read_assignments,
    words,
)

TIE_POLICIES = ("untie", "rows")
SHARED_POLICIES = ("freeze", "sum")
FROZEN_DTYPES = ("float32", "bfloat16", "int8")
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
    matrices are kept in ``frozen_dtype`` and widened for each product.
    """

    rank: int = key(0, at_least(0))  # 0: train all weights
    alpha: int = key(16, at_least(1))
    dropout: float = key(0.0, between(0, 0.99))
    target_modules: tuple[str, ...] = key((), words())  # empty: peft's choice
    modules_to_save: tuple[str, ...] = key((), words())  # empty: the head of a classifier
    frozen_dtype: str = key("float32", one_of(*FROZEN_DTYPES))  # in memory

    def __post_init__(self) -> None:
        if self.rank < 0 or self.alpha < 1:
            raise ModelError(
                f"lora needs rank >= 0 and alpha >= 1, got {self.rank} and {self.alpha}"
            )
        if not 0 <= self.dropout < 1:
            raise ModelError(f"lora dropout must be >= 0 and < 1, got {self.dropout}")
        if self.frozen_dtype not in FROZEN_DTYPES:
            raise ModelError(
                f"frozen_dtype must be one of {', '.join(FROZEN_DTYPES)}, got {self.frozen_dtype!r}"
            )

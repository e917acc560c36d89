"""The model of a simulation: a stated transformer shape instead of weights.

Per example of S tokens and width d, with feed-forward layers of width f = 4 d, the forward pass of
an encoder block costs ``2 S (4 d^2 + 2 d f) + 4 S^2 d`` FLOPs: our closed form, which agrees with
counting the operations of a BERT block. The backward pass costs twice that.
"""

from __future__ import annotations

from dataclasses import dataclass

from collapipe_flwr.core.domain import ModelProfile
from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.simulation.models import transformer_profile


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """An encoder of equal blocks, its embedding, and a shorter decoder; BERT-base by default."""

    blocks: int = 12
    width: int = 768
    tokens: int = 128
    decoder_blocks: int = 2
    vocabulary: int = 30_000
    wire_bytes: int = 2  # of one activation before a link codes it: fp16 unless codecs are named

    def __post_init__(self) -> None:
        for name in ("blocks", "width", "tokens"):
            value = getattr(self, name)
            if value < 1:
                raise ConfigError(f"--{name} must be >= 1, got {value}")

    def profile(self) -> ModelProfile:
        """Costs per example, as the schedulers see them."""
        return transformer_profile(
            blocks=self.blocks,
            width=self.width,
            tokens=self.tokens,
            decoder_blocks=self.decoder_blocks,
            vocabulary=self.vocabulary,
            wire_bytes=self.wire_bytes,
        )

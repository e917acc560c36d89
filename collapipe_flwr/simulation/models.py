"""Analytic cost profiles of transformers, for experiments without a model in memory.

Per token a block of width d does 24 d^2 multiply-add operations' worth of FLOPs in its linear
layers (four d x d projections, two d x 4d ones) and 4 T d in attention over T tokens; the
backward pass costs twice the forward pass (Kaplan et al. 2020, arXiv 2001.08361, section 2.1).
Activations kept per block are about 34 d bytes per token at 16 bits (Korthikanti et al. 2022,
arXiv 2205.05198) without the attention maps, twice that in fp32; AdamW keeps 16 bytes per weight.
"""

from __future__ import annotations

from dataclasses import dataclass

from collapipe_flwr.core.domain import BlockCost, ModelProfile
from collapipe_flwr.core.keys import at_least, between, check_keys, key

WEIGHT_BYTES = 4
STATE_BYTES = 16
STASH_BYTES_PER_UNIT = 68


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """An encoder of equal blocks, its embedding, and a shorter decoder; BERT-base by default."""

    blocks: int = key(12, between(1, 1000))
    width: int = key(768, at_least(1))
    tokens: int = key(128, at_least(1))
    decoder_blocks: int = 2
    vocabulary: int = 30_000
    wire_bytes: int = 2  # of one activation before a link codes it: fp16 unless codecs are named

    def __post_init__(self) -> None:
        check_keys(self, "--")

    def profile(self) -> ModelProfile:
        """Compute costs per example, as the schedulers see them."""
        width, tokens, depth = self.width, self.tokens, self.decoder_blocks
        cut = float(tokens * width * self.wire_bytes)
        forward = tokens * (24.0 * width**2 + 4.0 * tokens * width)
        one = _make_cost(12 * width**2, forward, tokens * width * STASH_BYTES_PER_UNIT, cut)
        table = self.vocabulary * width
        embedding = _make_cost(table, 2.0 * tokens * width, tokens * width * WEIGHT_BYTES, cut)
        head_flop = 2.0 * table * tokens
        stash = depth * one.stash_bytes + tokens * self.vocabulary * WEIGHT_BYTES
        weights = depth * one.parameter_bytes // WEIGHT_BYTES + table
        decoder = _make_cost(weights, depth * one.forward_flop + head_flop, stash, 0.0)
        return ModelProfile(embedding=embedding, blocks=(one,) * self.blocks, decoder=decoder)


def _make_cost(weights: int, forward_flop: float, stash_bytes: float, cut: float) -> BlockCost:
    return BlockCost(
        forward_flop=forward_flop,
        backward_flop=2.0 * forward_flop,
        parameter_bytes=WEIGHT_BYTES * weights,
        state_bytes=STATE_BYTES * weights,
        stash_bytes=float(stash_bytes),
        output_bytes=cut,
    )

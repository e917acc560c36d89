"""Latency: the GPipe makespan in closed form and the length of a round.

Links are stages of the flow shop. Arrays have the pipeline on their last axis and zeros where a
plan has no stage, so padding changes neither sums nor maxima. Our reconstruction.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

OPTIMISER_FLOP_PER_BYTE = 3.0  # AdamW: about 12 operations on each 4-byte parameter


@dataclass(frozen=True, slots=True, kw_only=True)
class PassTimes:
    """Seconds per micro-batch of one direction: every stage (K+2) and every hop (K+1)."""

    stage_s: Array
    hop_s: Array

    def total(self) -> Array:
        """What one micro-batch alone takes from end to end."""
        return np.asarray(self.stage_s.sum(-1) + self.hop_s.sum(-1))

    def bottleneck(self) -> Array:
        """The slowest resource: what every further micro-batch adds."""
        return np.asarray(np.maximum(self.stage_s.max(-1), self.hop_s.max(-1)))


def gpipe_makespan_s(forward: PassTimes, backward: PassTimes, micro_batches: Array) -> Array:
    """Exact makespan of one GPipe step: two permutation flow shops, one after the other."""
    further = np.asarray(micro_batches, dtype=np.float64) - 1.0
    ahead = forward.total() + further * forward.bottleneck()
    return np.asarray(ahead + backward.total() + further * backward.bottleneck())


def overlapped_makespan_s(
    forward: PassTimes, backward: PassTimes, micro_batches: Array, *, half_duplex: bool
) -> Array:
    """What a step cannot undercut when passes overlap (1F1B): trip plus J - 1 busiest periods.

    A lower bound of every schedule, approached when warm-up is deep; see ``costs.depths``.
    """
    further = np.asarray(micro_batches, dtype=np.float64) - 1.0
    hops = np.maximum(forward.hop_s, backward.hop_s)
    if half_duplex:
        hops = forward.hop_s + backward.hop_s
    period = np.maximum((forward.stage_s + backward.stage_s).max(-1), hops.max(-1))
    return np.asarray(forward.total() + backward.total() + further * period)


def optimiser_flop(parameter_bytes: Array) -> Array:
    """Floating-point operations of one optimiser step over ``parameter_bytes`` of weights."""
    return np.asarray(OPTIMISER_FLOP_PER_BYTE * parameter_bytes)


def local_steps(examples: Array, micro_batch_size: Array, micro_batches: Array) -> Array:
    """Steps of one pass over the cluster's examples: ``ceil(D / (b J))``, at least one."""
    batch = np.asarray(micro_batch_size, dtype=np.float64) * micro_batches
    return np.asarray(np.maximum(np.ceil(np.asarray(examples) / batch), 1.0))

"""How long one step takes: GPipe's closed form and 1F1B's lower bound.

Links are stages of the flow shop. Arrays have the pipeline on their last axis and zeros where a
plan has no stage, so padding changes neither sums nor maxima. Our reconstruction.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from collapipe_flwr.costs.arrays import Array
from collapipe_flwr.costs.work import PricingOptions

Both = Sequence[ArrayLike]
"""Seconds per micro-batch of the forward and the backward pass."""


def step_makespan_s(
    options: PricingOptions,
    stage_s: Both,
    hop_s: Both,
    micro_batches: Array,
    axis: int = -1,
    held: Array | None = None,
) -> Array:
    """One step's makespan by ``options.schedule``: GPipe's exactly, 1F1B's lower bound.

    ``held`` are the most micro-batches that fit on every stage, and on all ahead of it.
    """
    if options.schedule == "gpipe":
        return gpipe_makespan_s(stage_s, hop_s, micro_batches, axis)
    return _overlapped_makespan_s(options, stage_s, hop_s, micro_batches, axis, held)


def gpipe_makespan_s(stage_s: Both, hop_s: Both, micro_batches: ArrayLike, axis: int = -1) -> Array:
    """Exact makespan of one GPipe step: two permutation flow shops, one after the other.

    In either pass a micro-batch alone takes all stages (K + 2 along ``axis``) and hops (K + 1),
    and every further one as long as the slowest of them.
    """
    further = np.asarray(micro_batches, dtype=np.float64) - 1.0
    makespan = np.zeros(())
    for stage, hop in zip(map(np.asarray, stage_s), map(np.asarray, hop_s), strict=True):
        makespan = makespan + (stage.sum(axis) + hop.sum(axis))
        makespan = makespan + further * np.maximum(stage.max(axis), hop.max(axis))
    return makespan


def _overlapped_makespan_s(
    options: PricingOptions,
    stage_s: Both,
    hop_s: Both,
    micro_batches: Array,
    axis: int,
    held: Array | None,
) -> Array:
    """What a step cannot undercut when passes overlap (1F1B), and nearly takes.

    A stage works J times both passes; before, the first micro-batch has passed what stands ahead of
    it, and after, the last gradient passes it. It idles while all that it can hold is on the way to
    the edge and back. In one direction, a stage or a link works J times within a trip of its own.
    See ``warm_up`` and docs/theory.md, 5.5.
    """
    both = [np.moveaxis(np.asarray(each), axis, 0) for each in stage_s]
    there, home = (np.moveaxis(np.asarray(each), axis, 0) for each in hop_s)
    stage, hop = both[0] + both[1], there + home
    steps = np.cumsum(stage[:-1] + hop, axis=0)  # past each stage and the hop behind it
    whole, work = steps[-1] + stage[-1], stage * micro_batches
    longest = np.maximum(work[0], (work[1:] + steps).max(0))
    if held is not None:
        begun = np.zeros_like(stage)
        begun[1:] = steps
        tail = whole - begun - stage
        most = np.clip(np.moveaxis(held, axis, 0), 1.0, micro_batches)
        idle = [np.maximum(tail - (most - 1.0) * passes, 0.0) for passes in both]
        rest = np.where(most < micro_batches, idle[0] + idle[1], np.maximum(*idle))
        least = np.maximum(work + rest, np.ceil(micro_batches / most) * (stage + tail))
        least += begun
        least *= stage > 0.0
        longest = np.maximum(longest, least.max(0))
    single = np.maximum(both[0].max(0), both[1].max(0))
    single = np.maximum(single, np.maximum(there, home).max(0))
    longest = np.maximum(longest, whole + (micro_batches - 1.0) * single)
    if options.half_duplex:
        longest = np.maximum(longest, (steps + (micro_batches - 1.0) * hop).max(0))
    return np.asarray(longest)

"""The duration of one step: GPipe's closed form and 1F1B's lower bound.

Links count as stages of a flow shop. Arrays have the pipeline on their last axis, and zeros where a
plan has no stage: padding changes neither sums nor maxima. Our reconstruction.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from collapipe_flwr.costs.arrays import Array
from collapipe_flwr.costs.work import PricingOptions

TINY = 1e-300
Both = Sequence[ArrayLike]
"""Seconds per micro-batch of the forward and the backward pass."""


def compute_step_makespan_s(
    options: PricingOptions,
    stage_s: Both,
    hop_s: Both,
    micro_batches: Array,
    axis: int = -1,
    held: Array | None = None,
) -> Array:
    """Compute a step's makespan by ``options.schedule``: GPipe's exactly, 1F1B's lower bound.

    ``held`` are the most micro-batches that fit on every stage, and on all ahead of it.
    """
    if options.schedule == "gpipe":
        return compute_gpipe_makespan_s(stage_s, hop_s, micro_batches, axis)
    return _bound_overlapped_s(stage_s, hop_s, micro_batches, axis, held)


def compute_gpipe_makespan_s(
    stage_s: Both, hop_s: Both, micro_batches: ArrayLike, axis: int = -1
) -> Array:
    """Compute the exact makespan of a GPipe step: two permutation flow shops, one after another.

    In either pass a micro-batch alone takes all stages (K + 2 along ``axis``) and hops (K + 1),
    and every further one as long as the slowest of them.
    """
    further = np.asarray(micro_batches, dtype=np.float64) - 1.0
    makespan = np.zeros(())
    for stage, hop in zip(map(np.asarray, stage_s), map(np.asarray, hop_s), strict=True):
        makespan = makespan + (stage.sum(axis) + hop.sum(axis))
        makespan = makespan + further * np.maximum(stage.max(axis), hop.max(axis))
    return makespan


def _bound_idle_s(
    passes: Sequence[Array], hops: Sequence[Array], tail: Array, most: Array, micro_batches: Array
) -> Array:
    """Bound from below how long every stage idles, at any depth up to ``most``; (K + 2, ...).

    A stage of depth d makes d forward passes, as fast as they come, before its first backward pass,
    which waits for ``tail``; and d backward passes after its last forward pass, as fast as the
    stages ahead take gradients. Both waits are convex in d: their least sum is where one begins to
    rise.
    """
    slower, rises = [], []
    for own, hop in zip(passes, hops, strict=True):
        pace = own.copy()  # of the slowest pass or hop up to here
        np.maximum(pace[1:], np.maximum.accumulate(np.maximum(own[:-1], hop)), out=pace[1:])
        slower.append(pace - own)
        rises.append(np.minimum(tail / np.maximum(pace, TINY), most - 1.0))
    last = (
        micro_batches - 1.0
    )  # if all forward passes come first, the stage waits once for the tail
    once = np.maximum(tail - last * np.minimum(*passes), last * (slower[0] + slower[1]))
    idle = np.where(most < micro_batches, np.inf, once)
    for more in rises:
        waits = [
            np.maximum(tail - more * own, more * s) for own, s in zip(passes, slower, strict=True)
        ]
        np.minimum(idle, waits[0] + waits[1], out=idle)
    return idle


def _time_turns_s(stage: Array, tail: Array, most: Array, micro_batches: Array) -> Array:
    """Bound the seconds in which every micro-batch is here for its passes and ``tail``.

    Only ``most`` are here at once. Where those cannot hide the tail, the remaining micro-batches
    add their own passes one after the other.
    """
    over = (micro_batches - 1.0) % most
    over[(most >= micro_batches) | (tail < (most - 1.0) * stage)] = 0.0
    return np.asarray(np.ceil(micro_batches / most) * (stage + tail) + over * stage)


def _bound_overlapped_s(
    stage_s: Both, hop_s: Both, micro_batches: Array, axis: int, held: Array | None
) -> Array:
    """Bound a step from below when passes overlap (1F1B); the bound is nearly reached.

    A stage works J times both passes; before, the first micro-batch has passed the stages ahead of
    it, and after, the last gradient passes them. It idles while all micro-batches that it can hold
    are on the way to the edge and back, and while its first ones arrive. In one direction, a stage
    or a link works J times within one trip. See ``warm_up`` and docs/theory-appendix.md, 5.5.
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
        idle = _bound_idle_s(both, (there, home), tail, most, micro_batches)
        least = np.maximum(work + idle, _time_turns_s(stage, tail, most, micro_batches))
        least += begun
        least *= stage > 0.0
        longest = np.maximum(longest, least.max(0))
    single = np.maximum(both[0].max(0), both[1].max(0))
    single = np.maximum(single, np.maximum(there, home).max(0))
    longest = np.maximum(longest, whole + (micro_batches - 1.0) * single)
    return np.asarray(longest)

"""How long one step takes: GPipe's closed form, 1F1B's lower bound, and warm-up depths.

Links are stages of the flow shop. Arrays have the pipeline on their last axis and zeros where a
plan has no stage, so padding changes neither sums nor maxima. Our reconstruction.

Warm-up depths say how many micro-batches each stage has in flight under 1F1B; replays judge them. A
stage that may go deeper than the textbook's hides slow links and waits less for slower stages
behind it; one that goes too deep keeps activations for nothing, and holds gradients back for the
stages ahead. The last stage has its gradient at once and stays at 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from collapipe_flwr.core.replay import StepTimes, replay
from collapipe_flwr.costs.arrays import Array
from collapipe_flwr.costs.work import PricingOptions

AS_GOOD = 1e-3  # relative makespan
Depths = tuple[int, ...]


Both = Sequence[ArrayLike]
"""Seconds per micro-batch of the forward and the backward pass."""


def step_makespan_s(
    options: PricingOptions, stage_s: Both, hop_s: Both, micro_batches: Array, axis: int = -1
) -> Array:
    """One step's makespan by ``options.schedule``: GPipe's exactly, 1F1B's lower bound."""
    if options.schedule == "gpipe":
        return gpipe_makespan_s(stage_s, hop_s, micro_batches, axis)
    return _overlapped_makespan_s(options, stage_s, hop_s, micro_batches, axis)


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
    options: PricingOptions, stage_s: Both, hop_s: Both, micro_batches: Array, axis: int
) -> Array:
    """What a step cannot undercut when passes overlap (1F1B), and nearly takes if warm-up is deep.

    A stage works J times both passes; before, the first micro-batch has passed what stands ahead of
    it, and after, the last gradient passes it. In one direction, a stage or a link works J times
    within a trip of its own. See ``choose_warm_up``.
    """
    (ahead, back), (there, home) = map(np.asarray, stage_s), map(np.asarray, hop_s)
    stage, hop = np.moveaxis(ahead + back, axis, 0), np.moveaxis(there + home, axis, 0)
    steps = np.cumsum(stage[:-1] + hop, axis=0)  # past each stage and the hop behind it
    busiest = np.maximum(stage[0] * micro_batches, (stage[1:] * micro_batches + steps).max(0))
    single = np.maximum(ahead.max(axis), back.max(axis))
    single = np.maximum(single, np.maximum(there, home).max(axis))
    longest = np.maximum(busiest, steps[-1] + stage[-1] + (micro_batches - 1.0) * single)
    if options.half_duplex:
        longest = np.maximum(longest, (steps + (micro_batches - 1.0) * hop).max(0))
    return np.asarray(longest)


class WarmUp(NamedTuple):
    """Micro-batches in flight per stage, and how long a step then takes."""

    depths: Depths
    makespan_s: float


def choose_warm_up(step: StepTimes, limit: Sequence[int], micro_batches: int) -> WarmUp:
    """Depths that make a step short, none deeper than needed; ``limit`` must not rise.

    A few combinations are tried, which `tests/costs/test_warm_up.py` compares with all that exist.
    """
    search = _Search(step, micro_batches)
    # Where memory is short for some, forwards on the stages behind cost those the gradients they
    # wait for: the second look lets every stage have less in flight than the one ahead of it.
    falling = list(accumulate(limit, lambda ahead, here: max(min(here, ahead - 1), 1)))
    best = min(search.deepened(limit), search.deepened(falling), key=lambda found: found.makespan_s)
    return search.trimmed(best)


def one_f_one_b_makespan_s(step: StepTimes, depths: Depths, micro_batches: int) -> float:
    """What `replay` says of a step, by recurrence where that is possible: ten times as fast.

    Over full-duplex links stages and links serve micro-batches in order, so every end is the later
    of two ends plus a time. Backward j of a stage of depth d waits for its forward j + d - 1, and
    forward j + d for backward j: in waves over j, where depths do not rise, forwards go down the
    pipeline and backwards come up again. Raises ScheduleError on deadlock.
    """
    if step.half_duplex or step.weights_s or list(depths) != sorted(depths, reverse=True):
        return replay(step, depths, micro_batches).makespan_s
    depths = tuple(min(depth, micro_batches) for depth in depths)
    (ahead_s, back_s), (there_s, home_s) = step.stage_s, step.hop_s
    stages, last = range(step.stages), step.stages - 1
    free = [0.0] * step.stages  # when each stage has done what it has been given so far
    down, up = [0.0] * step.stages, [0.0] * step.stages  # when its links are free again
    here: list[list[float]] = [[0.0] * micro_batches, *([] for _ in range(last))]
    for wave in range(micro_batches):
        for k in stages:
            first = 0 if wave == 0 else wave + depths[k] - 1
            for j in range(first, min(wave + depths[k], micro_batches)):
                free[k] = max(free[k], here[k][j]) + ahead_s[k]
                if k < last:
                    down[k] = max(down[k], free[k]) + there_s[k]
                    here[k + 1].append(down[k])
        gradient = 0.0
        for k in reversed(stages):
            free[k] = max(free[k], gradient) + back_s[k]
            if k:
                gradient = up[k] = max(up[k], free[k]) + home_s[k - 1]
    return free[0]


class _Search:
    """Plays every combination of depths once at most."""

    def __init__(self, step: StepTimes, micro_batches: int) -> None:
        self._step, self._micro_batches = step, micro_batches
        self._known: dict[Depths, WarmUp] = {}

    def deepened(self, limit: Sequence[int]) -> WarmUp:
        """From the textbook's depths on, one more in flight per hop as long as that pays."""
        best = self._played(_with_slack(limit, 0))
        for slack in range(1, self._micro_batches):
            deeper = self._played(_with_slack(limit, slack))
            if deeper.makespan_s >= best.makespan_s * (1.0 - AS_GOOD):
                break
            best = deeper
        return best

    def trimmed(self, found: WarmUp) -> WarmUp:
        """Less on every stage, from the last one on, where a step takes no longer for it."""
        shortest_s = found.makespan_s
        for stage in reversed(range(self._step.stages - 1)):
            least = found.depths[stage + 1]
            while least < found.depths[stage]:
                depth = (least + found.depths[stage]) // 2
                fewer = self._played(_with_depth(found.depths, stage, depth))
                if fewer.makespan_s > shortest_s * (1.0 + AS_GOOD):
                    least = depth + 1
                else:
                    found, shortest_s = fewer, min(shortest_s, fewer.makespan_s)
        return found

    def _played(self, depths: Depths) -> WarmUp:
        if depths not in self._known:
            makespan_s = one_f_one_b_makespan_s(self._step, depths, self._micro_batches)
            self._known[depths] = WarmUp(depths, makespan_s)
        return self._known[depths]


def _with_slack(limit: Sequence[int], slack: int) -> Depths:
    """From the end: 1, and with every stage one more and ``slack``, as far as the limits go."""
    depths = [1]
    for most in reversed(limit[:-1]):
        depths.append(max(min(most, depths[-1] + 1 + slack), depths[-1]))
    return tuple(reversed(depths))


def _with_depth(depths: Depths, stage: int, depth: int) -> Depths:
    return (*depths[:stage], depth, *depths[stage + 1 :])

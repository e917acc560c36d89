"""Warm-up depths: how many micro-batches each stage has in flight under 1F1B.

A stage that is deeper than in the textbook's schedule hides slow links and waits less for slower
stages behind it; one that is too deep keeps activations for nothing and delays gradients for the
stages ahead. The last stage has its gradient at once and stays at 1. Depths are judged by
replaying a step with them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

from collapipe_flwr.core.replay import StepTimes, replay

AS_GOOD = 1e-3  # relative makespan
STEPS_KEPT = 20_000  # cached results: a search prices many rows repeatedly
Depths = tuple[int, ...]


class WarmUp(NamedTuple):
    """Micro-batches in flight per stage, and how long a step then takes."""

    depths: Depths
    makespan_s: float

    def is_near(self, other_s: float) -> bool:
        """Return whether it takes at most `AS_GOOD` longer than another."""
        return other_s >= self.makespan_s * (1.0 - AS_GOOD)


_Play = Callable[[Depths], float]  # the makespan of a step with these depths


@lru_cache(maxsize=STEPS_KEPT)
def choose_warm_up(
    step: StepTimes, limit: Depths, micro_batches: int, least_s: float = -math.inf
) -> WarmUp:
    """Choose depths that make a step short, none deeper than needed; limits must not rise.

    A few combinations are tried; `tests/costs/test_warm_up.py` compares them with all that exist.
    Once a step is near ``least_s``, a lower bound for all depths, depths are not trimmed.
    """
    play = cache(lambda depths: compute_one_f_one_b_s(step, depths, micro_batches))
    found = _search(play, limit, micro_batches, least_s)
    if found.is_near(least_s):
        return found
    return _raise_depths(play, _trim(play, found), limit, micro_batches, least_s)


def _search(play: _Play, limit: Sequence[int], micro_batches: int, least_s: float) -> WarmUp:
    first = _deepen(play, limit, micro_batches, least_s)
    if first.is_near(least_s):
        return first
    # Where memory is short for some, forwards on the stages behind cost those the gradients they
    # wait for: the second look lets every stage have less in flight than the one ahead of it.
    falling = list(accumulate(limit, lambda ahead, here: max(min(here, ahead - 1), 1)))
    second = _deepen(play, falling, micro_batches, least_s)
    return min(first, second, key=lambda found: found.makespan_s)


def _deepen(play: _Play, limit: Sequence[int], micro_batches: int, least_s: float) -> WarmUp:
    """Deepen the textbook's depths by one more in flight per hop as long as that pays."""
    depths = _add_slack(limit, 0)
    best = WarmUp(depths, play(depths))
    for slack in range(1, micro_batches):
        if best.is_near(least_s):
            break
        depths = _add_slack(limit, slack)
        deeper = WarmUp(depths, play(depths))
        if best.is_near(deeper.makespan_s):
            break
        best = deeper
    return best


def _trim(play: _Play, found: WarmUp) -> WarmUp:
    """Lower the depth of every stage, from the last one on, as far as the step takes no longer."""
    shortest_s = found.makespan_s
    for stage in reversed(range(len(found.depths) - 1)):
        least = found.depths[stage + 1]
        while least < found.depths[stage]:
            depth = (least + found.depths[stage]) // 2
            depths = (*found.depths[:stage], depth, *found.depths[stage + 1 :])
            makespan_s = play(depths)
            if makespan_s > shortest_s * (1.0 + AS_GOOD):
                least = depth + 1
            else:
                found, shortest_s = WarmUp(depths, makespan_s), min(shortest_s, makespan_s)
    return found


def _raise_depths(
    play: _Play, found: WarmUp, limit: Sequence[int], micro_batches: int, least_s: float
) -> WarmUp:
    """Raise the depth of a stage, or of all stages down to it, by one as long as that pays.

    This comes after `_trim`: a stage that is too deep hides the gain of more depth ahead of it.
    """
    most = [min(each, micro_batches) for each in limit]
    while not found.is_near(least_s):
        now, trials = found.depths, []
        room = [k for k in range(len(now) - 1) if now[k] < most[k]]
        for k in room:
            ahead = [min(each + 1, top) for each, top in zip(now[: k + 1], most, strict=False)]
            trials.append((*ahead, *now[k + 1 :]))
        trials += [(*now[:k], now[k] + 1, *now[k + 1 :]) for k in room if k and now[k - 1] > now[k]]
        tried = [WarmUp(depths, play(depths)) for depths in trials]
        best = min(tried, key=lambda one: one.makespan_s, default=found)
        if found.is_near(best.makespan_s):
            break
        found = best
    return found


def _add_slack(limit: Sequence[int], slack: int) -> Depths:
    """Count from the end: 1, then one more and ``slack`` per stage, as far as limits allow."""
    depths = [1]
    for most in reversed(limit[:-1]):
        depths.append(max(min(most, depths[-1] + 1 + slack), depths[-1]))
    return tuple(reversed(depths))


def compute_one_f_one_b_s(step: StepTimes, depths: Depths, micro_batches: int) -> float:
    """Compute the makespan of `replay`, by recurrence if possible; ScheduleError on deadlock."""
    if not step.weights_s and all(a >= b for a, b in pairwise(depths)):
        return _play_waves_s(step, depths, micro_batches)
    return replay(step, depths, micro_batches).makespan_s


def _play_waves_s(step: StepTimes, depths: Depths, micro_batches: int) -> float:
    """Play one step by recurrence.

    Stages and links serve micro-batches in order, so every end is the later
    of two ends plus a time. Backward j of a stage of depth d waits for its forward j + d - 1, and
    forward j + d for backward j: in waves over j, where depths do not rise, forwards go down the
    pipeline and backwards come up again.
    """
    # Decisions spend most of their time here: no call of `max`, no look-up that can be done before.
    (ahead_s, back_s), (there_s, home_s) = step.stage_s, step.hop_s
    stages = range(step.stages)
    flight = [min(depth, micro_batches) for depth in depths]
    free, down, up = ([0.0] * step.stages for _ in range(3))  # until when stages and links work
    arrivals: list[list[float]] = [[0.0] * micro_batches, *([] for _ in stages)]
    there_s = (*there_s, 0.0)
    for k in stages:  # what needs no gradient
        end = link = 0.0
        for arrived in arrivals[k][: flight[k]]:
            end = (arrived if arrived > end else end) + ahead_s[k]
            link = (end if end > link else link) + there_s[k]
            arrivals[k + 1].append(link)
        free[k], down[k] = end, link
    forwards = [*zip(stages, flight, arrivals, ahead_s, there_s, arrivals[1:], strict=False)]
    backwards = [*zip(stages[:0:-1], back_s[:0:-1], home_s[::-1], strict=True)]
    for wave in range(micro_batches):
        gradient = 0.0
        for k, back, home in backwards:
            end = free[k]
            free[k] = end = (gradient if gradient > end else end) + back
            link = up[k]
            up[k] = gradient = (end if end > link else link) + home
        end = free[0]
        free[0] = (gradient if gradient > end else end) + back_s[0]
        for k, depth, arrived_s, ahead, there, behind in forwards:
            if wave + depth < micro_batches:
                end, arrived = free[k], arrived_s[wave + depth]
                free[k] = end = (arrived if arrived > end else end) + ahead
                link = down[k]
                down[k] = link = (end if end > link else link) + there
                behind.append(link)
    return free[0]

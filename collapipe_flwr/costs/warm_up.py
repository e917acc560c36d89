"""Warm-up depths: how many micro-batches each stage has in flight under 1F1B.

A stage that may go deeper than the textbook's hides slow links and waits less for slower stages
behind it; one that goes too deep keeps activations for nothing, and holds gradients back for the
stages ahead. The last stage has its gradient at once and stays at 1. Steps judge depths: they are
played, those of many pipelines side by side.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple, TypeAlias

import numpy as np

from collapipe_flwr.core.replay import StepTimes, replay
from collapipe_flwr.costs.arrays import Array, Ints

AS_GOOD = 1e-3  # relative makespan
MANY = 12  # pipelines from which on arrays are faster than one after the other
Depths = tuple[int, ...]


class WarmUp(NamedTuple):
    """Micro-batches in flight per stage, and how long a step then takes."""

    depths: Depths
    makespan_s: float


_Search: TypeAlias = Generator[Depths, float, WarmUp]  # yields depths to play, is sent the makespan


def choose_warm_ups(
    steps: Sequence[StepTimes], limits: Sequence[Sequence[int]], micro_batches: int
) -> list[WarmUp]:
    """For each step depths that make it short, none deeper than needed; limits must not rise.

    A few combinations are tried, which `tests/costs/test_warm_up.py` compares with all that exist.
    """
    searches = [_search(limit, micro_batches) for limit in limits]
    asked = {row: next(search) for row, search in enumerate(searches)}
    known: list[dict[Depths, float]] = [{} for _ in steps]
    found: dict[int, WarmUp] = {}
    played = _Play(steps, micro_batches)
    while asked:
        for row, makespan_s in zip(list(asked), played.makespans_s(asked), strict=True):
            depths = asked.pop(row)
            known[row][depths] = makespan_s
            try:
                while depths in known[row]:
                    depths = searches[row].send(known[row][depths])
                asked[row] = depths
            except StopIteration as end:
                found[row] = end.value
    return [found[row] for row in range(len(steps))]


def _search(limit: Sequence[int], micro_batches: int) -> _Search:
    # Where memory is short for some, forwards on the stages behind cost those the gradients they
    # wait for: the second look lets every stage have less in flight than the one ahead of it.
    falling = list(accumulate(limit, lambda ahead, here: max(min(here, ahead - 1), 1)))
    first = yield from _deepened(limit, micro_batches)
    second = yield from _deepened(falling, micro_batches)
    return (yield from _trimmed(min(first, second, key=lambda found: found.makespan_s)))


def _deepened(limit: Sequence[int], micro_batches: int) -> _Search:
    """From the textbook's depths on, one more in flight per hop as long as that pays."""
    depths = _with_slack(limit, 0)
    best = WarmUp(depths, (yield depths))
    for slack in range(1, micro_batches):
        depths = _with_slack(limit, slack)
        deeper = WarmUp(depths, (yield depths))
        if deeper.makespan_s >= best.makespan_s * (1.0 - AS_GOOD):
            break
        best = deeper
    return best


def _trimmed(found: WarmUp) -> _Search:
    """Less on every stage, from the last one on, where a step takes no longer for it."""
    shortest_s = found.makespan_s
    for stage in reversed(range(len(found.depths) - 1)):
        least = found.depths[stage + 1]
        while least < found.depths[stage]:
            depth = (least + found.depths[stage]) // 2
            depths = (*found.depths[:stage], depth, *found.depths[stage + 1 :])
            makespan_s = yield depths
            if makespan_s > shortest_s * (1.0 + AS_GOOD):
                least = depth + 1
            else:
                found, shortest_s = WarmUp(depths, makespan_s), min(shortest_s, makespan_s)
    return found


def _with_slack(limit: Sequence[int], slack: int) -> Depths:
    """From the end: 1, and with every stage one more and ``slack``, as far as the limits go."""
    depths = [1]
    for most in reversed(limit[:-1]):
        depths.append(max(min(most, depths[-1] + 1 + slack), depths[-1]))
    return tuple(reversed(depths))


def one_f_one_b_makespans_s(
    steps: Sequence[StepTimes], depths: Sequence[Depths], micro_batches: int
) -> list[float]:
    """What `replay` says of each step, ten times as fast. Raises ScheduleError on deadlock."""
    return _Play(steps, micro_batches).makespans_s(dict(enumerate(depths)))


class _Play:
    """Plays one step of pipelines, by recurrence where that is possible.

    Over full-duplex links stages and links serve micro-batches in order, so every end is the later
    of two ends plus a time. Backward j of a stage of depth d waits for its forward j + d - 1, and
    forward j + d for backward j: in waves over j, where depths do not rise, forwards go down the
    pipeline and backwards come up again.
    """

    def __init__(self, steps: Sequence[StepTimes], micro_batches: int) -> None:
        self._steps, self._count = steps, micro_batches
        self._in_order = not any(step.half_duplex or step.weights_s for step in steps)
        self._stage_s = self._hop_s = np.zeros((2, 0, 0))
        if self._in_order and len(steps) >= MANY:
            most = max(step.stages for step in steps)
            self._stage_s = _padded([step.stage_s for step in steps], most)
            self._hop_s = _padded([step.hop_s for step in steps], most - 1)

    def makespans_s(self, asked: Mapping[int, Depths]) -> list[float]:
        """Of the steps with these numbers, with these depths, in the mapping's order."""
        depths = list(asked.values())
        if not self._in_order or any(a < b for each in depths for a, b in pairwise(each)):
            played = (replay(self._steps[row], d, self._count) for row, d in asked.items())
            return [trace.makespan_s for trace in played]
        if len(asked) < MANY or not self._stage_s.size:
            return [_waves_s(self._steps[row], d, self._count) for row, d in asked.items()]
        rows = np.fromiter(asked, np.int64, len(asked))
        stages = self._stage_s.shape[1]
        padded = [(each[0],) * (stages - len(each)) + each for each in depths]
        flight = np.minimum(np.array(padded, dtype=np.int64).T, self._count)
        return _many_waves_s(
            self._stage_s[:, :, rows], self._hop_s[:, :, rows], flight, self._count
        )


def _padded(times: Sequence[tuple[tuple[float, ...], tuple[float, ...]]], length: int) -> Array:
    """(2, length, R), with stages and hops that take no time ahead of the others."""
    rows = [[(0.0,) * (length - len(one)) + one for one in both] for both in times]
    return np.ascontiguousarray(np.array(rows).transpose(1, 2, 0))


def _waves_s(step: StepTimes, depths: Depths, micro_batches: int) -> float:
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


def _many_waves_s(stage_s: Array, hop_s: Array, depths: Ints, micro_batches: int) -> list[float]:
    """`_waves_s` of pipelines side by side on the last axis, to the same bits."""
    (ahead_s, back_s), (there_s, home_s) = stage_s, hop_s
    stages, many = depths.shape
    rows, last = np.arange(many), stages - 1
    free, down, up = np.zeros((3, stages, many))
    here = np.zeros((stages, micro_batches + 1, many))  # the last is of no micro-batch
    deepest = depths.max(1)
    for wave in range(micro_batches):
        for k in range(stages):
            for j in range(deepest[k]) if wave == 0 else (wave + depths[k] - 1,):
                works = j < (depths[k] if wave == 0 else micro_batches)
                at = np.where(works, j, micro_batches)
                ends = np.maximum(free[k], here[k, at, rows]) + ahead_s[k]
                free[k] = np.where(works, ends, free[k])
                if k < last:
                    arrives = np.maximum(down[k], ends) + there_s[k]
                    down[k] = np.where(works, arrives, down[k])
                    here[k + 1, at, rows] = arrives
        gradient = np.zeros(many)
        for k in reversed(range(stages)):
            free[k] = np.maximum(free[k], gradient) + back_s[k]
            if k:
                gradient = up[k] = np.maximum(up[k], free[k]) + home_s[k - 1]
    return [float(end_s) for end_s in free[0]]

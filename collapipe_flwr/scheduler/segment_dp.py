"""Exact segmentation of one cluster: shortest paths under bottleneck caps.

Minimise ``sum of stage and hop costs + pace * (slowest forward + slowest backward resource)`` over
contiguous segments on distinct devices. For caps on the two bottlenecks the rest is additive: a
shortest path over (devices used so far, last device, blocks covered). Caps are swept best first
over the values that cheapest paths attain, and the sweep stops when its lower bound passes the
best path: exact. Under overlapping passes (1F1B) one bottleneck counts; then the backward arrays
hold zeros.

Suffixes: ``_i`` member (0 control unit, n devices, last index the edge where it receives),
``_n`` device (member n + 1), ``_l`` blocks covered before, ``_k`` blocks covered after.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import count

import numpy as np

from collapipe_flwr.core.errors import InfeasibleError
from collapipe_flwr.costs.arrays import Array, Places


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentProblem:
    """One cluster's segmentation for given micro-batches, prices and hop times."""

    stage_cost_nlk: Array  # inf where memory forbids it or k <= l
    stage_forward_nlk: Array
    stage_backward_nlk: Array
    hop_cost_ijl: Array  # (N + 1, N + 2, L + 1)
    hop_forward_ijl: Array
    hop_backward_ijl: Array
    pace: float  # objective per second of each bottleneck
    floor: tuple[float, float]  # bottlenecks that control unit and edge cause anyway
    fixed_cost: float  # what does not depend on the segments

    @property
    def devices(self) -> int:
        return int(self.stage_cost_nlk.shape[0])

    @property
    def blocks(self) -> int:
        return int(self.stage_cost_nlk.shape[1]) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """Devices (from 0) in order, and the first block behind each one's segment."""

    devices: tuple[int, ...]
    stops: tuple[int, ...]
    cost: float  # without the bottlenecks
    forward_s: float  # slowest forward resource
    backward_s: float

    def value(self, problem: SegmentProblem) -> float:
        pace = problem.pace * (self.forward_s + self.backward_s)
        return self.cost + pace + problem.fixed_cost


Shortest = Callable[[SegmentProblem], "tuple[tuple[int, ...], tuple[int, ...]] | None"]


def best_path(problem: SegmentProblem, shortest: Shortest) -> Path:
    """Find the optimum, best first over pairs of caps; raises InfeasibleError without any path.

    A path that beats the cheapest one under some caps must undercut one of its two bottlenecks,
    so each pair of caps branches into two; its cheapest cost bounds everything beyond.
    """
    best: Path | None = None
    limit, serial = np.inf, count()
    queue = [(-np.inf, next(serial), (np.inf, np.inf))]
    seen = {queue[0][2]}
    while queue:
        bound, _, caps = heappop(queue)
        if bound >= limit:
            break
        found = shortest(_cap(problem, caps))
        if found is None:
            continue
        path = describe(problem, *found)
        if path.value(problem) < limit:
            best, limit = path, path.value(problem)
        bound = path.cost + problem.pace * sum(problem.floor) + problem.fixed_cost
        for after in _branch(problem, caps, path):
            if bound < limit and after not in seen:
                seen.add(after)
                heappush(queue, (bound, next(serial), after))
    if best is None:
        raise InfeasibleError("no segmentation fits the devices' memories")
    return best


def _branch(
    problem: SegmentProblem, caps: tuple[float, float], path: Path
) -> list[tuple[float, float]]:
    """Return the two pairs of caps that exclude ``path``, where its bottlenecks can be undercut."""
    after = []
    if path.forward_s > problem.floor[0]:
        after.append((path.forward_s, caps[1]))
    if path.backward_s > problem.floor[1]:
        after.append((caps[0], path.backward_s))
    return after


def _cap(problem: SegmentProblem, caps: tuple[float, float]) -> SegmentProblem:
    """Make resources that are not faster than the caps infinitely dear."""
    stage = (problem.stage_forward_nlk >= caps[0]) | (problem.stage_backward_nlk >= caps[1])
    hop = (problem.hop_forward_ijl >= caps[0]) | (problem.hop_backward_ijl >= caps[1])
    return replace(
        problem,
        stage_cost_nlk=np.where(stage, np.inf, problem.stage_cost_nlk),
        hop_cost_ijl=np.where(hop, np.inf, problem.hop_cost_ijl),
    )


def describe(problem: SegmentProblem, devices: Sequence[int], stops: Sequence[int]) -> Path:
    """Compute costs and bottlenecks of a path."""
    p, members = problem, [0, *(device + 1 for device in devices), problem.devices + 1]
    hops = list(zip(members, members[1:], (0, *stops), strict=False))
    stages = list(zip(devices, (0, *stops), stops, strict=False))
    cost = 0.0
    for hop, stage in zip(hops, stages, strict=False):
        cost += float(p.hop_cost_ijl[hop] + p.stage_cost_nlk[stage])
    forward = [p.hop_forward_ijl[hop] for hop in hops] + [p.stage_forward_nlk[s] for s in stages]
    backward = [p.hop_backward_ijl[hop] for hop in hops] + [p.stage_backward_nlk[s] for s in stages]
    return Path(
        devices=tuple(devices),
        stops=tuple(stops),
        cost=cost + float(p.hop_cost_ijl[hops[-1]]),
        forward_s=float(max(problem.floor[0], *forward)),
        backward_s=float(max(problem.floor[1], *backward)),
    )


def in_order(order: Sequence[int]) -> Shortest:
    """Make the search for the shortest path through devices in this order, or some of them."""

    def shortest(p: SegmentProblem) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        blocks = p.blocks
        reached = np.full((len(order), blocks + 1), np.inf)
        came: list[tuple[Places, Places]] = []
        for position, device in enumerate(order):
            start = np.full(blocks + 1, np.inf)
            start[0] = p.hop_cost_ijl[0, device + 1, 0]
            earlier = [start] + [
                reached[q] + p.hop_cost_ijl[order[q] + 1, device + 1] for q in range(position)
            ]
            entered = np.stack(earlier)
            source = entered.argmin(0)
            through = entered.min(0)[:, None] + p.stage_cost_nlk[device]
            reached[position] = through.min(0)
            came.append((source, through.argmin(0)))
        ends = reached[:, blocks] + p.hop_cost_ijl[np.array(order) + 1, p.devices + 1, blocks]
        last = int(ends.argmin())
        if not np.isfinite(ends[last]):
            return None
        devices, stops, at = [], [], blocks
        while True:
            devices.append(order[last])
            stops.append(at)
            source, first = came[last]
            at = int(first[at])
            if source[at] == 0:
                break
            last = int(source[at]) - 1
        return tuple(reversed(devices)), tuple(reversed(stops))

    return shortest


def any_order(p: SegmentProblem) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Find the shortest path over all orders and subsets, by dynamic programming over sets."""
    table = _SubsetTable(p)
    table.fill()
    return table.path()


class _SubsetTable:
    """Cheapest cost of (set of devices used, last device, blocks covered), layer by layer."""

    def __init__(self, p: SegmentProblem) -> None:
        self.p, self.n = p, p.devices
        shape = (1 << self.n, self.n, p.blocks + 1)
        self.reached = np.full(shape, np.inf)
        self.source = np.full(shape, -1, dtype=np.int8)  # previous device when entering at l
        self.first = np.zeros(shape, dtype=np.int16)
        masks = np.arange(1 << self.n)
        self.sizes = np.array([int(mask).bit_count() for mask in masks])

    def fill(self) -> None:
        """Fill all layers up to as many devices as there are blocks."""
        p = self.p
        for device in range(self.n):
            through = p.hop_cost_ijl[0, device + 1, 0] + p.stage_cost_nlk[device, 0]
            self.reached[1 << device, device] = through
        for size in range(1, min(self.n, p.blocks)):
            masks = np.flatnonzero(self.sizes == size)
            for device in range(self.n):
                self._extend(masks[(masks >> device) & 1 == 0], device)

    def _extend(self, masks: Places, device: int) -> None:
        """Append ``device`` to every path over ``masks``."""
        p = self.p
        if not len(masks):
            return
        options = self.reached[masks] + p.hop_cost_ijl[None, 1 : self.n + 1, device + 1]
        source = options.argmin(1)
        entered = options.min(1)
        through = entered[:, :, None] + p.stage_cost_nlk[device][None]
        after = masks | (1 << device)
        first = through.argmin(1)
        self.reached[after, device] = through.min(1)
        self.first[after, device] = first
        self.source[after, device] = np.take_along_axis(source, first, axis=1)

    def path(self) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Walk back from the cheapest end."""
        p = self.p
        ends = self.reached[:, :, p.blocks] + p.hop_cost_ijl[1 : self.n + 1, -1, p.blocks][None]
        mask, last = divmod(int(ends.argmin()), self.n)
        if not np.isfinite(ends[mask, last]):
            return None
        devices, stops, at = [], [], p.blocks
        while last >= 0:
            devices.append(last)
            stops.append(at)
            state = (mask, last, at)
            mask ^= 1 << last
            at, last = int(self.first[state]), int(self.source[state])
        return tuple(reversed(devices)), tuple(reversed(stops))

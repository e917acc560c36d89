"""Local search over layouts: moves, neighbourhoods, and the descent of many candidates at once.

A candidate is one layout of one cluster. A sweep tries one kind of move on every candidate that
still improves and takes each one's best: the kinds in turn cost as much as trying all moves at
once and take several steps instead of one. A candidate is done when every kind in a row has failed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from collapipe_flwr.costs.arrays import Array, Ints, Mask
from collapipe_flwr.costs.layouts import UNUSED, Layouts, replaced, stack
from collapipe_flwr.scheduler.dual_prices import best_of

SAME = 1e-9  # relative differences below this count as none
FEW = 24  # so few candidates try everything at once: their sweeps cost the same, long or short
SIZE_STEPS = np.array([-1, 1, 0, 0, -1, 1])
COUNT_STEPS = np.array([0, 0, -1, 1, 1, -1])
Neighbours = tuple[Ints, Layouts]
"""Whose neighbour each row is, and the rows."""
Kind = Callable[["Moves"], Neighbours]
Score = Callable[[Layouts], Array]


class Moves:
    """Neighbours of every row by kind of move.

    Shift a cut; swap, replace, drop or insert a device.
    """

    def __init__(self, rows: Layouts, cost_mi: Array, most: int) -> None:
        """Only the ``most`` members of least cost may come in; infinite cost bars a member."""
        self.rows = rows
        self.depth = rows.depth_r
        width = max(int(self.depth.max()), 1)
        self.members = _wider(rows.member_rs[:, :width], UNUSED)
        self.stops = _wider(rows.stop_rs[:, :width], int(rows.stop_rs.max()))
        self.slots = np.arange(width + 1)
        self.cost_mi, self.most = cost_mi, most

    def all(self) -> Layouts:
        """Every valid neighbour."""
        return stack([kind(self)[1] for kind in MOVE_KINDS])

    def _spare(self) -> Mask:
        """Members that may come in, (R, I)."""
        cost = self.cost_mi[self.rows.cluster_r]
        row, slot = np.nonzero(self.members != UNUSED)
        cost[row, self.members[row, slot]] = np.inf
        last = min(self.most, cost.shape[1]) - 1
        limit = np.partition(cost, last, axis=1)[:, [last]]
        return np.asarray(np.isfinite(cost) & (cost <= limit))

    def _rows(self, parent: Ints, members: Ints, stops: Ints) -> Neighbours:
        return parent, Layouts(
            cluster_r=self.rows.cluster_r[parent],
            member_rs=members,
            stop_rs=stops,
            micro_batch_size_r=self.rows.micro_batch_size_r[parent],
            micro_batches_r=self.rows.micro_batches_r[parent],
        )

    def shifts(self) -> Neighbours:
        """A cut moves by one or two blocks."""
        change = np.array([-2, -1, 1, 2])
        moved = self.stops[:, :-1, None] + change
        firsts = np.concatenate([np.zeros_like(self.stops[:, :1]), self.stops[:, :-2]], axis=1)
        inner = self.slots[None, :-1] < (self.depth - 1)[:, None]
        valid = (moved > firsts[:, :, None]) & (moved < self.stops[:, 1:, None])
        parent, slot, which = np.nonzero(valid & inner[:, :, None])
        stops = self.stops[parent]
        stops[np.arange(len(parent)), slot] += change[which]
        return self._rows(parent, self.members[parent], stops)

    def swaps(self) -> Neighbours:
        """Two devices change places."""
        left, right = np.triu_indices(len(self.slots), 1)
        parent, pair = np.nonzero(right[None, :] < self.depth[:, None])
        members, at = self.members[parent], np.arange(len(parent))
        members[at, left[pair]] = self.members[parent, right[pair]]
        members[at, right[pair]] = self.members[parent, left[pair]]
        return self._rows(parent, members, self.stops[parent])

    def replacements(self) -> Neighbours:
        """A spare device takes over a whole segment."""
        active = self.slots[None, :] < self.depth[:, None]
        parent, slot, spare = np.nonzero(active[:, :, None] & self._spare()[:, None, :])
        members = self.members[parent]
        members[np.arange(len(parent)), slot] = spare
        return self._rows(parent, members, self.stops[parent])

    def drops(self) -> Neighbours:
        """A device leaves; its blocks go to the next one or to the previous one."""
        active = (self.slots[None, :] < self.depth[:, None]) & (self.depth > 1)[:, None]
        parent, slot = np.nonzero(active)
        at, end = np.arange(len(parent)), len(self.slots) - 1

        def without(table: Ints, gone: Ints) -> Ints:
            source = np.minimum(self.slots + (self.slots >= gone[:, None]), end)
            return np.asarray(table[parent][at[:, None], source])

        members, options = without(self.members, slot), []
        members[:, -1] = UNUSED
        for gone, keep in ((slot, slot >= 0), (slot - 1, slot > 0)):
            stops = without(self.stops, gone)
            stops[at, self.depth[parent] - 2] = self.stops[parent, -1]
            options.append((parent[keep], members[keep], stops[keep]))
        return self._rows(*(np.concatenate(column) for column in zip(*options, strict=True)))

    def insertions(self) -> Neighbours:
        """A spare device takes half of a segment, before or behind its owner."""
        firsts = np.concatenate([np.zeros_like(self.stops[:, :1]), self.stops[:, :-1]], axis=1)
        active = (self.slots[None, :] < self.depth[:, None]) & (self.stops - firsts > 1)
        parent, slot, spare = np.nonzero(active[:, :, None] & self._spare()[:, None, :])
        at = np.arange(len(parent))
        middle = (firsts[parent, slot] + self.stops[parent, slot]) // 2
        source = self.slots[None, :] - (self.slots[None, :] > slot[:, None])
        base = self.members[parent[:, None], source]
        stops = self.stops[parent[:, None], source]
        stops[at, slot] = middle
        before, behind = base, base.copy()
        before[at, slot] = spare
        behind[at, slot + 1] = spare
        parent = np.concatenate([parent, parent])
        return self._rows(parent, np.concatenate([before, behind]), np.concatenate([stops, stops]))


def _wider(table: Ints, padding: int) -> Ints:
    """One slot more."""
    return np.concatenate([table, np.full_like(table[:, :1], padding)], axis=1)


MOVE_KINDS: tuple[Kind, ...] = (
    Moves.replacements,
    Moves.shifts,
    Moves.drops,
    Moves.insertions,
    Moves.swaps,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbourhood:
    """The moves that are tried from a row."""

    cost_mi: Array  # of working there, infinite where nothing can work
    spares: int  # so many of the cheapest devices without a segment are tried
    sizes: Ints  # the grid of micro-batches, ascending
    counts: Ints

    def near(self, rows: Layouts, kinds: list[int]) -> Neighbours:
        """Neighbours by those kinds of move; the last kind changes micro-batches."""
        moves = Moves(rows, self.cost_mi, self.spares)
        found = [
            self._batches(rows) if kind == len(MOVE_KINDS) else MOVE_KINDS[kind](moves)
            for kind in kinds
        ]
        return np.concatenate([parent for parent, _ in found]), stack([part for _, part in found])

    def _batches(self, rows: Layouts) -> Neighbours:
        """One step on the grid of (size, count), or one up on one axis and down on the other."""
        size = np.searchsorted(self.sizes, rows.micro_batch_size_r)[:, None] + SIZE_STEPS
        count = np.searchsorted(self.counts, rows.micro_batches_r)[:, None] + COUNT_STEPS
        inside = (size >= 0) & (size < len(self.sizes)) & (count >= 0) & (count < len(self.counts))
        parent, step = np.nonzero(inside)
        sizes, counts = self.sizes[size[parent, step]], self.counts[count[parent, step]]
        return parent, rows.take(parent).with_batches(sizes, counts)


KINDS = len(MOVE_KINDS) + 1  # the last one changes micro-batches
TURNS = [[len(MOVE_KINDS)], *([k] for k in range(len(MOVE_KINDS)))]
AT_ONCE = [list(range(KINDS))]


@dataclass(slots=True)
class Candidates:
    """Layouts that improve step by step, and what each is worth."""

    rows: Layouts
    values: Array
    least: Array  # gains up to this are not worth a step

    def step(self, moving: Ints, near: Neighbours, score: Score) -> Mask:
        """Move to better neighbours; says which of ``moving`` did."""
        parent, rows = near
        if not len(parent):
            return np.zeros(len(moving), bool)
        values = score(rows)
        best = best_of(values, parent, len(moving))
        here = self.values[moving]
        known = np.isfinite(here)
        least = np.maximum(self.least[moving], SAME * np.abs(np.where(known, here, 0.0)))
        worth = np.where(known, here, np.inf) - least
        better = np.where(best >= 0, values[best], np.inf) < worth
        if better.any():
            self.rows = replaced(self.rows, moving[better], rows.take(best[better]))
            self.values[moving[better]] = values[best[better]]
        return np.asarray(better)


def descend(
    candidates: Candidates, score: Score, neighbourhood: Neighbourhood, sweeps: int
) -> None:
    """Improve ``candidates`` until none gains any more, in at most ``sweeps`` sweeps."""
    failures = np.zeros(len(candidates.rows), np.int64)
    moving = np.arange(len(candidates.rows))
    for sweep in range(sweeps):
        turns = AT_ONCE if len(moving) <= FEW else TURNS
        near = neighbourhood.near(candidates.rows.take(moving), turns[sweep % len(turns)])
        better = candidates.step(moving, near, score)
        failures[moving] = np.where(better, 0, failures[moving] + KINDS // len(turns))
        moving = moving[failures[moving] < KINDS]
        if not len(moving):
            break


def every_batch(rows: Layouts, batches: Ints) -> Neighbours:
    """Every row with every (size, count) pair."""
    parent = np.repeat(np.arange(len(rows)), len(batches))
    grid = np.tile(batches, (len(rows), 1))
    return parent, rows.take(parent).with_batches(grid[:, 0], grid[:, 1])

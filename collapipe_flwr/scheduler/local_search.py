"""Neighbours of layouts: rows one move away, and rows with every pair of micro-batches."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from collapipe_flwr.costs.arrays import Array, Ints, Mask
from collapipe_flwr.costs.layouts import UNUSED, Layouts, stack_layouts

Neighbours = tuple[Ints, Layouts]
"""The parent of every row, and the rows."""
Kind = Callable[["Moves"], Neighbours]


class Moves:
    """Neighbours of every row by kind of move.

    Shift a cut; swap, replace, drop or insert a device.
    """

    def __init__(self, rows: Layouts, cost_mi: Array, most: int) -> None:
        """Let only the ``most`` members of least cost come in; infinite cost bars a member."""
        self.rows = rows
        self.depth = rows.depth_r
        width = max(int(self.depth.max()), 1)
        self.members = _widen(rows.member_rs[:, :width], UNUSED)
        self.stops = _widen(rows.stop_rs[:, :width], int(rows.stop_rs.max()))
        self.slots = np.arange(width + 1)
        self.cost_mi, self.most = cost_mi, most

    def all(self) -> Layouts:
        return stack_layouts([kind(self)[1] for kind in MOVE_KINDS])

    def _spare(self) -> Mask:
        """Return the members that may come in, (R, I)."""
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
        """Move a block from a slot to another, or two to the next; cuts in between move along."""
        width = len(self.slots)
        giver, taker = np.nonzero(~np.eye(width, dtype=bool))
        near = np.abs(giver - taker) == 1
        giver, taker = np.append(giver, giver[near]), np.append(taker, taker[near])
        amount = np.where(np.arange(len(giver)) < width * (width - 1), 1, 2)
        valid = (taker < self.depth[:, None]) & (self._blocks()[:, giver] > amount)
        parent, move = np.nonzero(valid)
        change = amount * np.sign(giver - taker)
        between = (self.slots >= np.minimum(giver, taker)[:, None]) & (
            self.slots < np.maximum(giver, taker)[:, None]
        )
        stops = self.stops[parent] + (change[:, None] * between)[move]
        return self._rows(parent, self.members[parent], stops)

    def _blocks(self) -> Ints:
        """Count the blocks of every slot, (R, S)."""
        return np.diff(self.stops, axis=1, prepend=0)

    def swaps(self) -> Neighbours:
        """Let two devices change places, with or without their blocks."""
        left, right = np.triu_indices(len(self.slots), 1)
        parent, pair = np.nonzero(right[None, :] < self.depth[:, None])
        members, at = self.members[parent], np.arange(len(parent))
        members[at, left[pair]] = self.members[parent, right[pair]]
        members[at, right[pair]] = self.members[parent, left[pair]]
        blocks = self._blocks()
        taken = blocks[parent]
        taken[at, left[pair]] = blocks[parent, right[pair]]
        taken[at, right[pair]] = blocks[parent, left[pair]]
        moves = np.flatnonzero((taken != blocks[parent]).any(1))
        stops = np.concatenate([self.stops[parent], np.cumsum(taken[moves], axis=1)])
        members = np.concatenate([members, members[moves]])
        return self._rows(np.concatenate([parent, parent[moves]]), members, stops)

    def replacements(self) -> Neighbours:
        """Let a spare device take over a whole segment."""
        active = self.slots[None, :] < self.depth[:, None]
        parent, slot, spare = np.nonzero(active[:, :, None] & self._spare()[:, None, :])
        members = self.members[parent]
        members[np.arange(len(parent)), slot] = spare
        return self._rows(parent, members, self.stops[parent])

    def drops(self) -> Neighbours:
        """Drop a device; its blocks go to the next one or to the previous one."""
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
        """Give a spare device half of a segment or one block, before or behind its owner."""
        blocks = self._blocks()
        active = (self.slots[None, :] < self.depth[:, None]) & (blocks > 1)
        parent, slot, spare = np.nonzero(active[:, :, None] & self._spare()[:, None, :])
        at, have = np.arange(len(parent)), blocks[parent, slot]
        source = self.slots[None, :] - (self.slots[None, :] > slot[:, None])
        base, kept = self.members[parent[:, None], source], self.stops[parent[:, None], source]
        before, behind = base, base.copy()
        before[at, slot] = spare
        behind[at, slot + 1] = spare
        first = self.stops[parent, slot] - have
        options = []
        for members, one in ((before, first + 1), (behind, first + have - 1)):
            for cut, new in ((first + have // 2, at), (one, np.flatnonzero(have > 3))):
                stops = kept.copy()
                stops[at, slot] = cut
                options.append((parent[new], members[new], stops[new]))
        return self._rows(*(np.concatenate(column) for column in zip(*options, strict=True)))


def _widen(table: Ints, padding: int) -> Ints:
    """Widen ``table`` by one slot."""
    return np.concatenate([table, np.full_like(table[:, :1], padding)], axis=1)


MOVE_KINDS: tuple[Kind, ...] = (
    Moves.replacements,
    Moves.shifts,
    Moves.drops,
    Moves.insertions,
    Moves.swaps,
)


def pair_batches(rows: Layouts, batches: Ints) -> Neighbours:
    """Pair every row with every (size, count)."""
    parent = np.repeat(np.arange(len(rows)), len(batches))
    grid = np.tile(batches, (len(rows), 1))
    return parent, rows.take(parent).with_batches(grid[:, 0], grid[:, 1])


def recut_batches(rows: Layouts, batches: Ints) -> Layouts:
    """Pair every row with every (size, count) of its own batch."""
    parent, moved = pair_batches(rows, batches)
    return moved.take(moved.batch_r == rows.batch_r[parent])

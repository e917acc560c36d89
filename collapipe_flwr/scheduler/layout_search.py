"""All layouts of small clusters, and the moves of the local search for larger ones."""

from __future__ import annotations

from functools import lru_cache
from itertools import combinations, permutations
from math import comb, perm

import numpy as np
from numpy.typing import NDArray

from collapipe_flwr.costs.layouts import UNUSED, Layouts

Ints = NDArray[np.int64]


def count_layouts(devices: int, blocks: int) -> int:
    """How many ordered subsets of devices with contiguous non-empty segments exist."""
    depth = min(devices, blocks)
    return sum(perm(devices, k) * comb(blocks - 1, k - 1) for k in range(1, depth + 1))


@lru_cache(maxsize=32)
def all_layouts(devices: int, blocks: int) -> tuple[Ints, Ints]:
    """Every layout: members (C, S) from 1, and stops (C, S)."""
    width = min(devices, blocks)
    members, stops = [], []
    for depth in range(1, width + 1):
        cuts = [(*c, blocks) for c in combinations(range(1, blocks), depth - 1)]
        for order in permutations(range(1, devices + 1), depth):
            for cut in cuts:
                members.append(order + (UNUSED,) * (width - depth))
                stops.append(cut + (blocks,) * (width - depth))
    return np.array(members, dtype=np.int64), np.array(stops, dtype=np.int64)


def rows_for(cluster: int, members: Ints, stops: Ints, batches: Ints) -> Layouts:
    """The product of layouts and (size, count) pairs for one cluster."""
    layouts, grid = len(members), len(batches)
    return Layouts(
        cluster_r=np.full(layouts * grid, cluster, dtype=np.int64),
        member_rs=np.repeat(members, grid, axis=0),
        stop_rs=np.repeat(stops, grid, axis=0),
        micro_batch_size_r=np.tile(batches[:, 0], layouts),
        micro_batches_r=np.tile(batches[:, 1], layouts),
    )


class Moves:
    """Neighbours of every row: shift a cut; swap, replace, drop or insert a device."""

    def __init__(self, rows: Layouts, devices_r: Ints) -> None:
        self.rows = rows
        width = rows.member_rs.shape[1]
        self.members = np.pad(rows.member_rs, ((0, 0), (0, 1)), constant_values=UNUSED)
        self.stops = np.pad(rows.stop_rs, ((0, 0), (0, 1)), mode="edge")
        self.depth, self.devices = rows.depth_r, devices_r
        self.slots = np.arange(width + 1)
        most = int(devices_r.max())
        there = np.zeros((len(rows), most + 2), dtype=bool)
        np.put_along_axis(there, np.maximum(self.members, 0), True, axis=1)
        self.spare = ~there[:, : most + 1]
        self.spare[:, 0] = False
        self.spare &= np.arange(most + 1)[None, :] <= devices_r[:, None]
        self.parts: list[tuple[Ints, Ints, Ints]] = []

    def all(self) -> Layouts:
        """Every valid neighbour."""
        self._shifts()
        self._swaps()
        self._replacements()
        self._drops()
        self._insertions()
        parent = np.concatenate([p for p, _, _ in self.parts])
        return Layouts(
            cluster_r=self.rows.cluster_r[parent],
            member_rs=np.concatenate([m for _, m, _ in self.parts]),
            stop_rs=np.concatenate([s for _, _, s in self.parts]),
            micro_batch_size_r=self.rows.micro_batch_size_r[parent],
            micro_batches_r=self.rows.micro_batches_r[parent],
        )

    def _add(self, parent: Ints, members: Ints, stops: Ints) -> None:
        self.parts.append((parent, members, stops))

    def _shifts(self) -> None:
        firsts = np.pad(self.stops[:, :-1], ((0, 0), (1, 0)))
        for change in (-2, -1, 1, 2):
            moved = self.stops + change
            following = np.pad(self.stops[:, 1:], ((0, 0), (0, 1)), mode="edge")
            inner = self.slots[None, :] < (self.depth - 1)[:, None]
            parent, slot = np.nonzero(inner & (moved > firsts) & (moved < following))
            stops = self.stops[parent]
            stops[np.arange(len(parent)), slot] += change
            self._add(parent, self.members[parent], stops)

    def _swaps(self) -> None:
        width = len(self.slots)
        left, right = np.triu_indices(width, 1)
        valid = right[None, :] < self.depth[:, None]
        parent, pair = np.nonzero(valid)
        members, at = self.members[parent], np.arange(len(parent))
        members[at, left[pair]] = self.members[parent, right[pair]]
        members[at, right[pair]] = self.members[parent, left[pair]]
        self._add(parent, members, self.stops[parent])

    def _replacements(self) -> None:
        active = self.slots[None, :] < self.depth[:, None]
        parent, slot, spare = np.nonzero(active[:, :, None] & self.spare[:, None, :])
        members = self.members[parent]
        members[np.arange(len(parent)), slot] = spare
        self._add(parent, members, self.stops[parent])

    def _drops(self) -> None:
        """A device leaves; its blocks go to the next one or to the previous one."""
        active = (self.slots[None, :] < self.depth[:, None]) & (self.depth > 1)[:, None]
        parent, slot = np.nonzero(active)
        at, end = np.arange(len(parent)), len(self.slots) - 1

        def without(table: Ints, gone: Ints) -> Ints:
            source = np.minimum(self.slots + (self.slots >= gone[:, None]), end)
            return np.asarray(table[parent][at[:, None], source])

        members = without(self.members, slot)
        members[:, -1] = UNUSED
        for gone, keep in ((slot, slot >= 0), (slot - 1, slot > 0)):
            stops = without(self.stops, gone)
            stops[at, self.depth[parent] - 2] = self.stops[parent, -1]
            self._add(parent[keep], members[keep], stops[keep])

    def _insertions(self) -> None:
        """A spare device takes half of a segment, before or behind its owner."""
        room = np.diff(np.pad(self.stops, ((0, 0), (1, 0))), axis=1) > 1
        active = (self.slots[None, :] < self.depth[:, None]) & room
        active &= (self.depth < len(self.slots))[:, None]
        parent, slot, spare = np.nonzero(active[:, :, None] & self.spare[:, None, :])
        at = np.arange(len(parent))
        first = np.pad(self.stops[:, :-1], ((0, 0), (1, 0)))[parent, slot]
        middle = (first + self.stops[parent, slot]) // 2
        source = np.maximum(self.slots[None, :] - (self.slots[None, :] > slot[:, None]), 0)
        base = self.members[parent][at[:, None], source]
        stops = self.stops[parent][at[:, None], source]
        stops[at, slot] = middle
        for where in (slot, slot + 1):
            members = base.copy()
            members[at, where] = spare
            self._add(parent, members, stops)

"""Layouts to start from: cut in proportion to weights, filled by memory, or all that exist."""

from __future__ import annotations

from functools import lru_cache
from itertools import combinations, permutations
from math import comb, perm

import numpy as np

from collapipe_flwr.costs.arrays import Array, Ints
from collapipe_flwr.costs.layouts import UNUSED, Layouts, stack
from collapipe_flwr.costs.tables import Tables
from collapipe_flwr.costs.work import PricingOptions, kept_bytes


def spread(weights_rs: Array, blocks: int) -> Ints:
    """Stops of contiguous segments in proportion to weights, each at least one block, (R, S).

    Slots of weight 0 stand last and are unused; there must be at most ``blocks`` used ones.
    """
    used = weights_rs > 0
    depth = used.sum(1, keepdims=True)
    total = weights_rs.sum(1, keepdims=True)
    stops = np.round(np.cumsum(weights_rs, axis=1) / total * blocks).astype(np.int64)
    slot = np.arange(weights_rs.shape[1])[None, :]
    least = slot + 1
    most = blocks - (depth - 1 - slot)
    for k in range(1, stops.shape[1]):
        stops[:, k] = np.maximum(stops[:, k], stops[:, k - 1] + 1)
    stops = np.minimum(np.maximum(stops, least), most)
    return np.where(slot < depth - 1, stops, blocks)


def rows_from_weights(
    cluster_r: Ints, member_rs: Ints, weights_rs: Array, blocks: int, batches_r2: Ints
) -> Layouts:
    """Rows with segments in proportion to weights."""
    return Layouts(
        cluster_r=cluster_r,
        member_rs=np.where(weights_rs > 0, member_rs, UNUSED),
        stop_rs=spread(weights_rs, blocks),
        micro_batch_size_r=batches_r2[:, 0],
        micro_batches_r=batches_r2[:, 1],
    )


def rows_by_weight(
    cluster_r: Ints, weight_rn: Array, most: int, blocks: int, batch: tuple[int, int]
) -> Layouts:
    """Rows over the ``most`` devices of most weight, with segments in proportion to it."""
    order = np.argsort(-weight_rn, axis=1, kind="stable")[:, :most]
    ranked = np.take_along_axis(weight_rn, order, axis=1)
    batches = np.tile(batch, (len(cluster_r), 1))
    return rows_from_weights(cluster_r, order + 1, ranked, blocks, batches)


def starting_rows(tables: Tables, which: Ints, devices_m: Ints, batches: Ints) -> Layouts:
    """For each of ``which``: the fastest or largest k devices for every k, shares by either.

    Every (size, count) pair is tried with each.
    """
    width = min(int(devices_m[which].max()), tables.num_blocks)
    speed, memory = tables.members.speed_mi[which, 1:], tables.members.memory_mi[which, 1:]
    present = tables.members.present_mi[which, 1:]
    members, weights = [], []
    for key, weight in ((speed, speed), (memory, memory), (speed, memory)):
        order = np.argsort(np.where(present, -key, np.inf), axis=1, kind="stable")[:, :width]
        ranked = np.take_along_axis(np.where(present, weight, 0.0), order, axis=1)
        for depth in range(1, width + 1):
            members.append(order + 1)
            weights.append(np.where(np.arange(width) < depth, ranked, 0.0))
    owner = np.tile(which, len(members))
    repeat = np.repeat(np.arange(len(owner)), len(batches))
    return rows_from_weights(
        owner[repeat],
        np.concatenate(members)[repeat],
        np.concatenate(weights)[repeat],
        tables.num_blocks,
        np.tile(batches, (len(owner), 1)),
    )


def filling_rows(tables: Tables, options: PricingOptions, which: Ints, batches_b2: Ints) -> Layouts:
    """For each of ``which`` and each batch: devices filled up, the largest first.

    Where all blocks are equal and this fits no cluster, nothing does.
    """
    kept_l, once = kept_bytes(tables.blocks, options)
    state, kept = np.diff(tables.blocks.state_bytes_l).max(), np.diff(kept_l).max()
    room = np.where(tables.members.present_mi, tables.members.memory_mi, 0.0)[which, 1:]
    room = (1.0 - options.memory_margin) * room
    parts, blocks = [], tables.num_blocks
    for size, count in batches_b2:
        flight = count if options.schedule == "gpipe" else 1
        holds = np.floor(np.maximum(room - size * once, 0.0) / (state + size * flight * kept))
        order = np.argsort(-holds, axis=1, kind="stable")[:, :blocks]
        most = np.take_along_axis(holds, order, axis=1).astype(np.int64)
        stops = np.minimum(np.cumsum(most, axis=1), blocks)
        used = np.concatenate([np.ones_like(most[:, :1]), stops[:, :-1] < blocks], axis=1)
        used = (used > 0) & (most > 0)
        used[:, 0] = True  # a row needs a device, fitting or not
        last = used & ~np.concatenate([used[:, 1:], np.zeros_like(used[:, :1])], axis=1)
        parts.append(
            Layouts(
                cluster_r=which,
                member_rs=np.where(used, order + 1, UNUSED),
                stop_rs=np.where(used & ~last, stops, blocks),
                micro_batch_size_r=np.full(len(which), size),
                micro_batches_r=np.full(len(which), count),
            )
        )
    return stack(parts)


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

"""Layouts to start from: cut in proportion to weights, filled to a bottleneck, or all there are."""

from __future__ import annotations

from functools import lru_cache
from itertools import combinations, permutations
from math import comb, perm

import numpy as np

from collapipe_flwr.costs.arrays import Array, Ints
from collapipe_flwr.costs.layouts import UNUSED, Layouts, stack_layouts
from collapipe_flwr.costs.tables import Tables
from collapipe_flwr.costs.work import PricingOptions, count_kept_bytes, count_share_bytes
from collapipe_flwr.scheduler.problem import PlanningProblem

CAPS = 12  # bottlenecks that devices are filled up to
LONGEST = 4.0  # the largest of them over the smallest
SHARES = (1.0, 0.2, 0.04)  # of a second's price: clusters that need not hurry save energy


def spread(weights_rs: Array, blocks: int) -> Ints:
    """Return stops of contiguous segments in proportion to weights, at least a block each, (R, S).

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


def rows_by_weight(
    tables: Tables, cluster_r: Ints, weight_rn: Array, most: int, batch: tuple[int, int]
) -> Layouts:
    """Rows over the ``most`` devices of most weight, with segments in proportion to it.

    Trusted devices hold the trusted blocks, in front of all others, if any is among them.
    """
    blocks, first_rn = tables.num_blocks, tables.members.first_mi[cluster_r, 1:]
    order = np.argsort(-weight_rn, axis=1, kind="stable")[:, :most]
    ranked = np.take_along_axis(weight_rn, order, axis=1)
    stops = spread(ranked, blocks)
    for row in np.flatnonzero(first_rn.any(1)):
        ahead, behind = _trusted_first(weight_rn[row], first_rn[row], most, blocks)
        if len(ahead):
            used = len(ahead) + len(behind)
            order[row, :used] = np.concatenate([ahead, behind])
            ranked[row, :used] = weight_rn[row, order[row, :used]]
            ranked[row, used:] = 0.0
            stops[row] = _parted(ranked[row], len(ahead), int(first_rn[row].max()), blocks)
    return Layouts(
        cluster_r=cluster_r,
        member_rs=np.where(ranked > 0, order + 1, UNUSED),
        stop_rs=stops,
        micro_batch_size_r=np.full(len(cluster_r), batch[0]),
        micro_batches_r=np.full(len(cluster_r), batch[1]),
    )


def _trusted_first(weight_n: Array, first_n: Ints, most: int, blocks: int) -> tuple[Ints, Ints]:
    """Split the ``most`` devices of most weight into those that may hold every block and others.

    One that may is among them wherever there is any; of the others no more than they have blocks.
    """
    order = np.argsort(-weight_n, kind="stable")
    order = order[weight_n[order] > 0]
    trusted = first_n[order] == 0
    if not trusted[:most].any() and trusted.any():
        order = np.insert(order, most - 1, order[trusted.argmax()])
    order = order[:most]
    trusted = first_n[order] == 0
    return order[trusted], order[~trusted][: blocks - int(first_n.max())]


def _parted(weight_s: Array, ahead: int, least: int, blocks: int) -> Ints:
    """Place stops in proportion to weights; the first ``ahead`` devices get ``least`` or more."""
    behind = int(np.count_nonzero(weight_s)) - ahead
    share = round(blocks * float(weight_s[:ahead].sum() / weight_s.sum()))
    cut: int = min(max(share, least, ahead), blocks - behind)
    stops = np.full(len(weight_s), blocks)
    stops[:ahead] = spread(weight_s[None, :ahead], cut)[0]
    if behind:
        here = slice(ahead, ahead + behind)
        stops[here] = cut + spread(weight_s[None, here], blocks - cut)[0]
    return stops


def filled_rows(
    tables: Tables,
    options: PricingOptions,
    which: Ints,
    order_cn: Ints,
    cap_c: Array,
    batch: tuple[int, int],
) -> Layouts:
    """Devices in a given order, each with as many blocks as ``cap_c`` seconds and memory allow.

    Row c is of cluster ``which[c]``; seconds are those of both passes of one example. Rows in which
    the devices do not hold all blocks are left out. Under 1F1B blocks are handed out from the last
    one on: what a stage has in flight depends on the stages behind it.
    """
    if len(here := np.unique(tables.model_m[which])) > 1:
        groups = [tables.model_m[which] == model for model in here]
        return stack_layouts(
            [filled_rows(tables, options, which[g], order_cn[g], cap_c[g], batch) for g in groups]
        )
    (size, count), gpipe = batch, options.schedule == "gpipe"
    table = tables.blocks.of(int(here[0]) if len(here) else 0)
    flop_l = table.forward_flop_l + table.backward_flop_l
    kept_l, once = count_kept_bytes(table, options)
    flop_l, state_l, kept_l = (
        sum_l if gpipe else sum_l[-1] - sum_l[::-1]
        for sum_l in (flop_l, table.state_bytes_l, kept_l)
    )
    members, blocks = tables.members, tables.num_blocks
    room = np.where(members.present_mi, (1.0 - options.memory_margin) * members.memory_mi, 0.0)
    share = count_share_bytes(tables, np.arange(len(room)), size, count, options)
    room = np.minimum(room, share[:, None])
    at, depth = np.zeros(len(which), np.int64), np.zeros(len(which), np.int64)
    parts = []
    for device in order_cn.T:
        most = cap_c * members.speed_mi[which, device + 1] * (1.0 + 1e-9)
        flight = np.full(len(which), count) if gpipe else np.minimum(depth + 2, count)
        left, stop = room[which, device + 1] - size * once, _reached(flop_l, at, most)
        for number in np.unique(flight):
            of = flight == number
            by_memory = _reached(state_l + size * number * kept_l, at[of], left[of])
            stop[of] = np.minimum(stop[of], by_memory)
        first = members.first_mi[which, device + 1]
        stop = np.where(at < first, at, stop) if gpipe else np.minimum(stop, blocks - first)
        stop = np.maximum(stop, at)
        parts.append(stop - at)
        at, depth = stop, depth + (stop > at)
    part = np.stack(parts, axis=1)
    slot, last = np.arange(part.shape[1])[None, :], depth[:, None] - 1
    front = np.argsort(part == 0, axis=1, kind="stable")
    if not gpipe:
        front = np.take_along_axis(front, np.where(slot <= last, last - slot, slot), axis=1)
    full, width = at == blocks, max(int(depth.max(initial=1)), 1)
    member = np.where(slot <= last, np.take_along_axis(order_cn, front, axis=1) + 1, UNUSED)
    return Layouts(
        cluster_r=which[full],
        member_rs=member[full, :width],
        stop_rs=np.cumsum(np.take_along_axis(part, front, axis=1), axis=1)[full, :width],
        micro_batch_size_r=np.full(int(full.sum()), size),
        micro_batches_r=np.full(int(full.sum()), count),
    )


def _reached(sum_l: Array, at: Ints, most: Array) -> Ints:
    """How far from ``at`` sums grow by no more than ``most``."""
    return np.asarray(np.searchsorted(sum_l, sum_l[at] + most, side="right") - 1)


def first_rows(problem: PlanningProblem, which: Ints, batch: tuple[int, int]) -> Layouts:
    """For each of ``which``: devices filled up to several bottlenecks, and to their memories.

    In order of what an operation costs there, a second at several prices, and of memory.
    """
    members, blocks = problem.tables.members, problem.tables.blocks
    present = members.present_mi[which, 1:]
    speed = np.where(present, members.speed_mi[which, 1:], 1e-9)
    room = np.where(present, members.memory_mi[which, 1:], 0.0)
    joule = (problem.price_mi * members.energy_per_flop_mi)[which, 1:]
    keys = [problem.latency_price * share / speed + joule for share in SHARES]
    orders = [np.argsort(key, axis=1, kind="stable") for key in (*keys, -room)]
    if members.guarded:
        # Those that must not hold the first blocks are given theirs at the other end.
        late = members.first_mi[which, 1:] > 0
        late = late if problem.settings.schedule == "gpipe" else ~late
        for order in tuple(orders):
            end = np.argsort(np.take_along_axis(late, order, axis=1), axis=1, kind="stable")
            orders.append(np.take_along_axis(order, end, axis=1))
    orders = [o for k, o in enumerate(orders) if not any((o == p).all() for p in orders[:k])]
    flop_wl = (blocks.forward_flop_l + blocks.backward_flop_l)[problem.tables.model_m[which]]
    all_w, least_w, fastest = flop_wl[:, -1], np.diff(flop_wl).min(1), speed.max(1)
    low = np.maximum(all_w / speed.sum(1), least_w / fastest)
    high = np.maximum(all_w / fastest, LONGEST * low)
    caps = [low * (high / low) ** share for share in np.linspace(0.0, 1.0, CAPS)]
    caps.append(np.full(len(which), np.inf))
    return filled_rows(
        problem.tables,
        problem.settings,
        np.tile(which, len(orders) * len(caps)),
        np.concatenate([np.tile(order, (len(caps), 1)) for order in orders]),
        np.tile(np.concatenate(caps), len(orders)),
        batch,
    )


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
    """Combine every layout of one cluster with every (size, count) pair."""
    layouts, grid = len(members), len(batches)
    return Layouts(
        cluster_r=np.full(layouts * grid, cluster, dtype=np.int64),
        member_rs=np.repeat(members, grid, axis=0),
        stop_rs=np.repeat(stops, grid, axis=0),
        micro_batch_size_r=np.tile(batches[:, 0], layouts),
        micro_batches_r=np.tile(batches[:, 1], layouts),
    )

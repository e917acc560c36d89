"""For many clusters side by side, the cheapest row that ends in time: dynamic programming.

Devices stand in an order, slow ones first, and any of them may be left out. If no stage may take
longer than what a given length of the round leaves it, a row's cost at dual prices is a sum over
stages and hops, and the cheapest row is a shortest path over (device, blocks from here to the end).

Near enough for rows to start from, not exact: how much time stages ahead take, and how many
micro-batches a stage has in flight, depends on the rest of the path. The former is taken from the
row in place, the latter from the path that is the cheapest so far. Our own method.

Suffixes: ``_c`` search, ``_n`` place in the order, ``_l`` blocks from here to the end, (L + 1).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from collapipe_flwr.costs.arrays import Array, Ints
from collapipe_flwr.costs.layouts import UNUSED, Layouts, stack
from collapipe_flwr.costs.work import (
    AHEAD,
    OPTIMISER_FLOP_PER_BYTE,
    computing_of,
    kept_bytes,
    share_bytes,
    steps_of,
)
from collapipe_flwr.scheduler.scorer import Scorer

HURRY = 0.1  # of a second's price: rows end in time anyway
AT_A_TIME = 1000  # searches: caches hold them
SAME = 1e-9  # relative


def cheapest_rows(scorer: Scorer, like: Layouts, late_c: Array) -> Layouts:
    """Rows of the clusters and with the micro-batches of ``like`` that last about ``late_c`` s.

    Where no devices can hold or pay for all blocks in that time, there is none.
    """
    parts = []
    for first in range(0, len(like), AT_A_TIME):
        some = slice(first, first + AT_A_TIME)
        rows = like.take(np.arange(len(like))[some])
        parts.append(_Searches(scorer, rows, late_c[some]).rows())
    return stack(parts)


@dataclass(frozen=True, slots=True)
class _Stage:
    """A device of every search with the last ``l`` blocks, (C, L + 1), and what it has, (C, 1)."""

    cost: Array
    seconds: Array  # of both passes of a micro-batch
    joule: Array  # of a round
    room_j: Array
    memory: Array  # bytes


class _Searches:
    """Searches side by side, one for every row of ``like``."""

    def __init__(self, scorer: Scorer, like: Layouts, late_c: Array) -> None:
        self.scorer, self.like, self.tables = scorer, like, scorer.tables
        blocks, again = self.tables.blocks, float(scorer.options.recompute)

        def last(sum_l: Array) -> Array:
            return np.asarray(sum_l[-1] - sum_l[::-1])

        self.flop_l = last((1.0 + again) * blocks.forward_flop_l + blocks.backward_flop_l)
        self.starts_l = (1.0 + AHEAD * again) * last(blocks.count_l)  # of operations
        self.weights_l = last(blocks.parameter_bytes_l)
        kept_l, self.once = kept_bytes(blocks, scorer.options)
        self.state_l, self.kept_l = last(blocks.state_bytes_l), last(kept_l)
        self.size = like.micro_batch_size_r[:, None].astype(np.float64)
        self.count = like.micro_batches_r[:, None].astype(np.float64)
        self.steps = steps_of(self.tables, like)[:, None]
        self.second = HURRY * scorer.slope_m[like.cluster_r][:, None]
        self.bits_cl = np.maximum(8.0 * self.size * blocks.cut_bytes_l[::-1], 1.0)
        self.most_cl = self._stage_seconds(late_c)
        which = np.searchsorted(scorer.counts, like.micro_batches_r)
        self.calm = scorer.links.calm(which)
        self.calm_at = self.tables.gain_mij.size * which[:, None]

    def _stage_seconds(self, late_c: Array) -> Array:
        """How long both passes of a stage may take that stands behind all but ``l`` blocks.

        What else a round takes, and how long stages ahead do for a block, is as in ``like``.
        """
        like, options = self.like, self.scorer.options
        ahead, back, _, _ = computing_of(self.tables, like, options)
        stage = (ahead + back)[:, :-1]
        total = stage.sum(1, keepdims=True)
        before = total if options.schedule == "gpipe" else np.cumsum(stage, axis=1) - stage
        longest = (self.count * stage + before).max(1, keepdims=True)
        rest = self.scorer.estimates(like).latency[:, None] / self.steps - longest
        blocks = self.tables.blocks.count_l
        part = np.ones_like(blocks) if options.schedule == "gpipe" else blocks[::-1] / blocks[-1]
        return np.asarray((late_c[:, None] / self.steps - rest - part * total) / self.count)

    def _order(self) -> Ints:
        """Members, (C, N), in the order in which they stand in a pipeline.

        Under 1F1B a round waits for a slow stage and for what stands ahead of it, not behind it.
        """
        members, cluster = self.tables.members, self.like.cluster_r
        speed = np.where(members.present_mi, members.speed_mi, np.inf)[cluster, 1:]
        return np.asarray(np.argsort(speed, axis=1, kind="stable") + 1)

    def rows(self) -> Layouts:
        """The cheapest row of every search that finds one; devices are added from the edge on."""
        order_cn, blocks = self._order(), self.tables.num_blocks
        searches, places = order_cn.shape
        shape = (searches, blocks + 1)
        cost_ncl, depth_ncl = np.full((places + 1, *shape), np.inf), np.zeros((places + 1, *shape))
        cost_ncl[0, :, 0] = 0.0  # the edge, which has all blocks ahead of it
        number_ncl, behind_ncl = np.zeros((2, places + 1, *shape), np.int64)
        nodes = [np.full(searches, self.tables.edge), *order_cn.T[::-1]]
        for n in range(1, places + 1):
            entered, depth = np.full(shape, np.inf), np.zeros(shape)
            for q in range(n):
                cost = cost_ncl[q] + self._hop(nodes[n], nodes[q])
                less = cost < entered
                np.copyto(entered, cost, where=less)
                np.copyto(behind_ncl[n], q, where=less)
                np.copyto(depth, depth_ncl[q], where=less)
            number_ncl[n] = self._extend(self._stage(nodes[n]), entered, depth, cost_ncl[n])
            before = np.arange(blocks + 1) - number_ncl[n]
            depth_ncl[n] = np.take_along_axis(depth, before, axis=1) + 1.0
            behind_ncl[n] = np.take_along_axis(behind_ncl[n], before, axis=1)
        own = np.zeros(searches, np.int64)
        ends = [cost_ncl[n, :, -1] + self._hop(own, nodes[n])[:, -1] for n in range(1, places + 1)]
        return self._followed(np.stack(ends), np.stack(nodes), number_ncl, behind_ncl)

    def _extend(self, stage: _Stage, entered: Array, depth: Array, reached: Array) -> Ints:
        """Set ``reached`` to what it costs with a stage added; its number of blocks, (C, L + 1)."""
        before, number = entered - stage.cost, np.zeros(entered.shape, np.int64)
        least = stage.seconds - self.most_cl * (1.0 + SAME)
        joule = stage.joule - stage.room_j
        gpipe = self.scorer.options.schedule == "gpipe"
        each = self.size * (self.count if gpipe else np.minimum(depth + 2.0, self.count))
        each = np.broadcast_to(each, entered.shape)
        for blocks in range(1, entered.shape[1]):
            here, there = slice(blocks, None), slice(None, -blocks)
            fits = joule[:, here] <= stage.joule[:, there]
            kept, state = (sum_l[here] - sum_l[there] for sum_l in (self.kept_l, self.state_l))
            fits &= each[:, there] * kept + state <= stage.memory
            if not fits.any():  # nor would more blocks fit
                break
            fits &= least[:, here] <= stage.seconds[:, there]
            fits &= before[:, there] < reached[:, here]
            np.copyto(reached[:, here], before[:, there], where=fits)
            np.copyto(number[:, here], blocks, where=fits)
        reached += stage.cost
        return number

    def _stage(self, member_c: Ints) -> _Stage:
        scorer, tables, own = self.scorer, self.tables, (self.like.cluster_r, member_c)
        members, prices = tables.members, scorer.members
        at = self.like.cluster_r * tables.edge + member_c

        def of(values: Array) -> Array:
            return np.asarray(values[at][:, None])

        slowness, overhead, weights = of(prices.slowness), of(prices.overhead), self.weights_l
        seconds = self.size * self.flop_l * slowness + self.starts_l * overhead
        update = OPTIMISER_FLOP_PER_BYTE * weights
        flop = self.size * self.count * self.flop_l + update
        flop = self.steps * (flop + self.count * self.starts_l * overhead / slowness)
        bulk = self.second * of(prices.bulk_seconds) + of(prices.bulk_worth)
        cost = self.second * self.steps * (seconds + update * slowness)
        share = share_bytes(
            tables, self.like.cluster_r[:, None], self.size, self.count, scorer.options
        )
        room = np.inf if scorer.room is None else of(scorer.room)
        return _Stage(
            cost=cost + of(prices.flop_worth) * flop + bulk * weights,
            seconds=seconds,
            joule=of(prices.joule_per_flop) * flop,
            room_j=np.where(members.present_mi[own][:, None], room, -1.0),
            memory=np.minimum(of(prices.room), share) - self.size * self.once,
        )

    def _hop(self, sender_c: Ints, receiver_c: Ints) -> Array:
        """What a hop costs behind which ``l`` blocks stand, (C, L + 1)."""
        edge, links, like = self.tables.edge, self.scorer.links, self.like
        link = ((like.cluster_r * edge + sender_c) * (edge + 1) + receiver_c)[:, None]
        calm, (ahead, back) = link + self.calm_at, self.calm
        second = self.second * self.steps
        each = second * (ahead.seconds[calm] + back.seconds[calm])
        each += self.steps * self.count * (ahead.worth[calm] + back.worth[calm])
        quick = np.maximum(*(point.seconds[link] for point in links.quick))
        late = np.maximum(quick * self.bits_cl - self.most_cl, 0.0)
        return np.asarray(each * self.bits_cl + (self.count - 1.0) * second * late)

    def _followed(self, ends: Array, node_nc: Ints, number_ncl: Ints, behind_ncl: Ints) -> Layouts:
        """The rows of the cheapest ``ends``, from their first device to the edge."""
        blocks = self.tables.num_blocks
        found = np.flatnonzero(np.isfinite(ends.min(0)))
        node, left = ends.argmin(0)[found] + 1, np.full(len(found), blocks)
        members, stops = [], []
        while (node > 0).any():
            members.append(np.where(node > 0, node_nc[node, found], UNUSED))
            number = number_ncl[node, found, left]
            node = behind_ncl[node, found, left]
            left = left - number
            stops.append(blocks - left)
        width = max(len(members), 1)
        like = self.like.take(found)
        return Layouts(
            cluster_r=like.cluster_r,
            member_rs=np.reshape(members, (width, len(found))).T,
            stop_rs=np.reshape(stops, (width, len(found))).T,
            micro_batch_size_r=like.micro_batch_size_r,
            micro_batches_r=like.micro_batches_r,
        )

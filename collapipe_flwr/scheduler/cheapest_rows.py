"""For many clusters side by side, the cheapest rows that end in time: dynamic programming.

Devices stand in an order, slow ones first, and any of them may be left out. If no stage may take
longer than what a given length of the round leaves it, a row's cost at dual prices is a sum over
stages and hops, and the cheapest row is a shortest path over (device, blocks from here to the end).

Near enough for rows to start from, not exact: how much time stages ahead take, and how many
micro-batches a stage has in flight, depends on the rest of the path. The former is taken from the
row in place, the latter from the path that is the cheapest so far. Our own method.

Suffixes: ``_l`` blocks from here to the end, (L + 1), ``_t`` length of the round, ``_c`` cluster,
``_n`` place in the order. Single precision is enough for a choice.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from collapipe_flwr.costs.arrays import Array, Ints
from collapipe_flwr.costs.layouts import UNUSED, Layouts, stack_layouts
from collapipe_flwr.costs.work import (
    AHEAD,
    OPTIMISER_FLOP_PER_BYTE,
    count_kept_bytes,
    count_share_bytes,
    count_steps,
    price_computing,
)
from collapipe_flwr.scheduler.scorer import Scorer

HURRY = 0.1  # of a second's price: rows end in time anyway
AT_A_TIME = 2000  # clusters times lengths: caches hold them
SAME = 1e-5  # relative

Singles = NDArray[np.float32]
Shorts = NDArray[np.int16]


def cheapest_rows(scorer: Scorer, like: Layouts, late_t: Array) -> Layouts:
    """For every length of a round in seconds, rows of all clusters that last about as long.

    ``like`` has a row of every cluster, whose micro-batches they have. Where no devices can hold or
    pay for all blocks in that time, there is none.
    """
    parts, width = [], max(AT_A_TIME // len(late_t), 1)
    for first in range(0, len(like), width):
        some = like.take(np.arange(len(like))[first : first + width])
        parts.append(_Searches(scorer, some, late_t).rows())
    return stack_layouts(parts)


@dataclass(frozen=True, slots=True)
class _Stage:
    """A device of every cluster with the last ``l`` blocks, (L + 1, C)."""

    cost: Singles
    seconds: Singles  # of both passes of a micro-batch
    joule: Array  # of a round
    room_j: Array  # (C,)
    memory: Array  # bytes that it has, (C,)
    most: Ints  # of these blocks that it may hold, (C,)


class _Searches:
    """Searches side by side, one for every length of the round and row of ``like``."""

    def __init__(self, scorer: Scorer, like: Layouts, late_t: Array) -> None:
        self.scorer, self.like, self.tables = scorer, like, scorer.tables
        blocks, again = self.tables.blocks, float(scorer.options.recompute)
        model_c = self.tables.model_m[like.cluster_r]
        if len(self.tables.models) == 1:
            model_c = model_c[:1]  # one column for all

        def last(sum_l: Array) -> Array:
            return np.asarray(sum_l[:, -1:] - sum_l[:, ::-1])[model_c].T

        self.flop_l = last((1.0 + again) * blocks.forward_flop_l + blocks.backward_flop_l)
        self.starts_l = (1.0 + AHEAD * again) * last(blocks.count_l)  # of operations
        self.weights_l = last(blocks.trained_bytes_l)
        kept_l, once = count_kept_bytes(blocks, scorer.options)
        self.once = once[model_c]
        self.state_l, self.kept_l = last(blocks.state_bytes_l), last(kept_l)
        self.size = like.micro_batch_size_r.astype(np.float64)
        self.count = like.micro_batches_r.astype(np.float64)
        self.steps = count_steps(self.tables, like)
        self.second = HURRY * scorer.slope_m[like.cluster_r]
        self.bits_lc = np.maximum(8.0 * self.size * blocks.cut_bytes_l[model_c, ::-1].T, 1.0)
        self.late_cost = (self.count - 1.0) * self.second * self.steps  # of a hop's second
        most_ltc = self._stage_seconds(late_t)
        self.spared_ltc = (self.late_cost * most_ltc).astype(np.float32)
        self.most_ltc = (most_ltc * (1.0 + SAME)).astype(np.float32)
        which = np.searchsorted(scorer.counts, like.micro_batches_r)
        self.calm = scorer.links.calm(which)
        self.calm_at = self.tables.gain_mij.size * which

    def _stage_seconds(self, late_t: Array) -> Array:
        """How long both passes of a stage may take that has all but ``l`` blocks ahead of it.

        What else a round takes, and how long stages ahead do for a block, is as in ``like``.
        """
        like, options = self.like, self.scorer.options
        ahead, back, _, _ = price_computing(self.tables, like, options)
        stage = (ahead + back)[:, :-1]
        total = stage.sum(1)
        before = total[:, None] if options.schedule == "gpipe" else np.cumsum(stage, axis=1) - stage
        longest = (self.count[:, None] * stage + before).max(1)
        rest = self.scorer.estimate(like).latency / self.steps - longest
        blocks = self.tables.blocks.count_l[0]
        part = np.ones_like(blocks) if options.schedule == "gpipe" else blocks[::-1] / blocks[-1]
        ahead_lc = part[:, None] * total
        return np.asarray((late_t[:, None] / self.steps - rest - ahead_lc[:, None, :]) / self.count)

    def _order(self) -> Ints:
        """Members, (C, N), in the order in which they stand in a pipeline.

        Under 1F1B a round waits for a slow stage and for what stands ahead of it, not behind it.
        Those that may hold every block come first.
        """
        members, cluster = self.tables.members, self.like.cluster_r
        speed = np.where(members.present_mi, members.speed_mi, np.inf)[cluster, 1:]
        return np.asarray(np.lexsort((speed, members.first_mi[cluster, 1:]), axis=1) + 1)

    def rows(self) -> Layouts:
        """Return the cheapest row of every search that has one, adding devices from the edge on."""
        order_cn, shape = self._order(), self.most_ltc.shape
        places, edge = order_cn.shape[1], np.full(len(order_cn), self.tables.edge)
        node_nc = np.stack([edge, *order_cn.T[::-1]])
        cost_nltc = np.full((places + 1, *shape), np.inf, np.float32)
        cost_nltc[0, 0] = 0.0  # the edge, which has all blocks ahead of it
        depth_nltc = np.zeros((places + 1, *shape), np.float32)
        number_nltc, behind_nltc = np.zeros((2, places + 1, *shape), np.int16)
        width = shape[1] * shape[2]
        every = np.arange(self.most_ltc.size, dtype=np.int32).reshape(shape)
        for n in range(1, places + 1):
            entered, depth = np.full(shape, np.inf, np.float32), np.zeros(shape, np.float32)
            least_qlc, late_qlc = self._hops(node_nc[n], node_nc[:n])
            for q in range(n):
                cost = late_qlc[q][:, None, :] - self.spared_ltc
                np.maximum(cost, least_qlc[q][:, None, :], out=cost)
                cost += cost_nltc[q]
                less = cost < entered
                np.minimum(cost, entered, out=entered)
                np.maximum(behind_nltc[n], less * np.int16(q), out=behind_nltc[n])
                np.copyto(depth, depth_nltc[q], where=less)
            number = self._extend(self._stage(node_nc[n]), entered, depth, cost_nltc[n])
            number_nltc[n] = number
            depth_nltc[n] = depth.take(every - number * np.int32(width)) + np.float32(1.0)
        least_nlc, late_nlc = self._hops(np.zeros_like(edge), node_nc[1:])
        last_ntc = late_nlc[:, -1, None, :] - self.spared_ltc[-1]
        ends_ntc = cost_nltc[1:, -1] + np.maximum(last_ntc, least_nlc[:, -1, None, :])
        return self._followed(ends_ntc, node_nc, number_nltc, behind_nltc)

    def _extend(self, stage: _Stage, entered: Singles, depth: Singles, reached: Singles) -> Shorts:
        """Set ``reached`` to what it costs with a stage added; its number of blocks.

        All are (L + 1, T, C).
        """
        cost, seconds = stage.cost[:, None, :], stage.seconds[:, None, :]
        before, number = entered - cost, np.zeros(entered.shape, np.int16)
        least, least_j = seconds - self.most_ltc, stage.joule - stage.room_j
        held, count = depth + np.float32(2.0), self.count.astype(np.float32)
        if self.scorer.options.schedule == "gpipe":
            held[:] = count
        np.minimum(held, count, out=held)
        for blocks in range(1, len(entered)):
            here, there = slice(blocks, None), slice(None, -blocks)
            kept, state = (sum_l[here] - sum_l[there] for sum_l in (self.kept_l, self.state_l))
            most = (stage.memory - state) / (self.size * np.maximum(kept, 1.0))
            most[least_j[here] > stage.joule[there]] = -1.0
            if self.tables.members.guarded:
                most[np.arange(len(entered))[here, None] > stage.most] = -1.0
            fits = held[there] <= most.astype(np.float32)[:, None, :]
            if not fits.any():  # nor would more blocks fit
                break
            fits &= least[here] <= seconds[there]
            fits &= before[there] < reached[here]
            np.copyto(reached[here], before[there], where=fits)
            np.maximum(number[here], fits * np.int16(blocks), out=number[here])
        reached += cost
        return number

    def _stage(self, member_c: Ints) -> _Stage:
        scorer, tables, own = self.scorer, self.tables, (self.like.cluster_r, member_c)
        members, prices = tables.members, scorer.members
        at = self.like.cluster_r * tables.edge + member_c
        slowness, overhead = prices.slowness[at], prices.overhead[at]
        seconds = self.size * self.flop_l * slowness + self.starts_l * overhead
        update = OPTIMISER_FLOP_PER_BYTE * self.weights_l
        flop = self.size * self.count * self.flop_l + update
        flop = self.steps * (flop + self.count * self.starts_l * overhead / slowness)
        bulk = self.second * prices.bulk_seconds[at] + prices.bulk_worth[at]
        cost = self.second * self.steps * (seconds + update * slowness)
        cost += prices.flop_worth[at] * flop + bulk * self.weights_l
        share = count_share_bytes(
            tables, self.like.cluster_r, self.size, self.count, scorer.options
        )
        room = np.inf if scorer.room is None else scorer.room[at]
        return _Stage(
            cost=cost.astype(np.float32),
            seconds=seconds.astype(np.float32),
            joule=prices.joule_per_flop[at] * flop,
            room_j=np.where(members.present_mi[own], room, -1.0),
            memory=np.minimum(prices.room[at], share) - self.size * self.once,
            most=tables.num_blocks - members.first_mi[own],
        )

    def _hops(self, sender_c: Ints, receiver_qc: Ints) -> tuple[Singles, Singles]:
        """Price hops that have ``l`` blocks behind them, (Q, L + 1, C).

        First the least price, then the one where stages hide nothing of the hops' time.
        """
        edge, links, like = self.tables.edge, self.scorer.links, self.like
        link = (like.cluster_r * edge + sender_c) * (edge + 1) + receiver_qc
        calm, (ahead, back) = link + self.calm_at, self.calm
        each = self.second * self.steps * (ahead.seconds[calm] + back.seconds[calm])
        each += self.steps * self.count * (ahead.worth[calm] + back.worth[calm])
        late = each + self.late_cost * np.maximum(*(way.seconds[link] for way in links.quick))
        least_qlc, late_qlc = (cost[:, None, :] * self.bits_lc for cost in (each, late))
        return least_qlc.astype(np.float32), late_qlc.astype(np.float32)

    def _followed(
        self, ends_ntc: Singles, node_nc: Ints, number_nltc: Shorts, behind_nltc: Shorts
    ) -> Layouts:
        """Trace the rows of the cheapest ends, from their first device to the edge."""
        blocks = self.tables.num_blocks
        length, cluster = np.nonzero(np.isfinite(ends_ntc.min(0)))
        node = ends_ntc.argmin(0)[length, cluster] + 1
        left = np.full(len(node), blocks)
        members, stops = [], []
        while (node > 0).any():
            members.append(np.where(node > 0, node_nc[node, cluster], UNUSED))
            left = left - number_nltc[node, left, length, cluster]
            node = behind_nltc[node, left, length, cluster].astype(np.int64)
            stops.append(blocks - left)
        width = max(len(members), 1)
        like = self.like.take(cluster)
        return Layouts(
            cluster_r=like.cluster_r,
            member_rs=np.array(members, np.int64).reshape(width, len(node)).T,
            stop_rs=np.array(stops, np.int64).reshape(width, len(node)).T,
            micro_batch_size_r=like.micro_batch_size_r,
            micro_batches_r=like.micro_batches_r,
        )

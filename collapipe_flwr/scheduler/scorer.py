"""The cluster-wise objective of many candidate rows, fast.

Given dual prices, everything about links is a table (`LinkTable`) and everything about segments
a sum over blocks: scoring a row is a handful of look-ups per slot. A row slows its links from quick
to calm as far as its own bottleneck allows, energy interpolated linearly in between (convexity
makes that an upper bound). Inside, slots come first, (S, R): sums and maxima over a leading axis
are much faster. Suffixes as in ``costs.layouts``.
"""

from __future__ import annotations

import numpy as np

from collapipe_flwr.costs.arrays import Array, Ints, Mask
from collapipe_flwr.costs.layouts import Layouts, sum_spans
from collapipe_flwr.costs.makespan import compute_step_makespan_s
from collapipe_flwr.costs.radio import compute_rate_bit_per_s
from collapipe_flwr.costs.tables import Tables
from collapipe_flwr.costs.work import (
    AHEAD,
    BACK,
    NO_ROOM,
    OPTIMISER_FLOP_PER_BYTE,
    PricingOptions,
    compute_edge_speeds,
    compute_server_s,
    count_end_bytes,
    count_kept_bytes,
    count_share_bytes,
    count_steps,
    find_busier_ends,
)
from collapipe_flwr.scheduler.dual_prices import LEAST_SLOPE, DualPrices, LinkTable, overdrawn
from collapipe_flwr.scheduler.problem import Estimates, PlanningProblem, join_estimates

NORM = 8  # a power of two: the soft maximum's exponent
TRUST = 0.1  # share of the ceiling down to which dual prices are trusted
BLOCK = 1000  # rows of similar depth scored at a time: few unused slots, and caches hold them


class Scorer:
    """Scores rows under given dual prices; build once, call often."""

    def __init__(self, problem: PlanningProblem, prices: DualPrices) -> None:
        self.problem, self.prices = problem, prices
        self.tables, self.options = tables, options = problem.tables, problem.settings
        price_mi, least = problem.price_mi, LEAST_SLOPE * problem.latency_price
        self.slope_m = np.maximum(prices.slack_price_m, least)  # what a second costs each
        self.counts = np.unique(np.array(options.micro_batches))
        self.links = LinkTable(tables, price_mi, self.slope_m, prices.edge_hz_m, self.counts)
        self.spans = SpanTable(tables, options)
        self.members = MemberPrices(tables, options, price_mi)
        limited = bool(np.isfinite(problem.room_mi).any())
        self.room = problem.room_mi.ravel() if limited else None
        self.budget = tables.members.budget_mi.ravel()
        own_m = tables.members.overhead_mi[:, 0]
        self.overhead_2m = np.stack([own_m, tables.edges.overhead_m])
        self._price_ends()
        self.late = bool(self.overhead_2m.any() or self.members.overhead.any())

    def _price_ends(self) -> None:
        """Seconds of control unit and edge, (2, M) per example, and of their updates."""
        tables, (first, last) = self.tables, self.tables.ends
        own, edge_m = tables.members.speed_mi[:, 0], compute_edge_speeds(tables, self.options)
        self.forward_2m = np.stack([first.forward_flop / own, last.forward_flop / edge_m])
        self.backward_2m = np.stack([first.backward_flop / own, last.backward_flop / edge_m])
        home = tables.edges.home_m
        busier = find_busier_ends(tables)[home]
        for both in (self.forward_2m, self.backward_2m, self.overhead_2m):
            both[busier, home] = both.sum(0)[home]
        update = first.trained_bytes / own + last.trained_bytes / edge_m
        self.update_s_m = OPTIMISER_FLOP_PER_BYTE * update

    def score(self, rows: Layouts, now: Layouts) -> Array:
        """Compute every row's cluster-wise objective, infinite where memory forbids it, (R,).

        The other clusters are as in ``now``.
        """
        prices, costs = self.prices, self.estimate(rows)
        rho_r = self.problem.learning.compute_row_rhos(self.tables, rows, now)
        ceiling = prices.ceiling_m[rows.cluster_r]
        late = self.problem.latency_price * rho_r * np.maximum(costs.latency, ceiling)
        spare = np.clip(ceiling - costs.latency, 0.0, TRUST * ceiling)
        return np.asarray(late - prices.slack_price_m[rows.cluster_r] * spare + costs.worth)

    def estimate(self, rows: Layouts) -> Estimates:
        """Price every row."""
        if not len(rows):
            return Estimates(np.zeros(0), np.zeros(0), np.zeros(0))
        if len(rows) <= BLOCK:
            return self._estimate(rows)
        parts = np.array_split(np.argsort(rows.depth_r, kind="stable"), round(len(rows) / BLOCK))
        found = [self._estimate(rows.take(part)) for part in parts]
        back = np.argsort(np.concatenate(parts), kind="stable")
        return join_estimates(found).take(back)

    def _estimate(self, rows: Layouts) -> Estimates:
        batch = _Batch(self.tables, rows)
        slots = _Slots(rows, self.tables)
        held = self._held(rows, batch, slots)
        costs = self._price(rows, batch, slots, held)
        worth = np.where(self._fits(batch, slots, held), costs.worth, np.inf)
        return Estimates(costs.latency, costs.soft, worth)

    def _price(self, rows: Layouts, batch: _Batch, slots: _Slots, held: Array) -> Estimates:
        """Price rows as if memory forbade none of them."""
        members, spans, at = self.members, self.spans, slots.member_at_sr
        slowness = members.slowness.take(at)
        ahead, back = spans.forward_lk.take(slots.span_sr), spans.backward_lk.take(slots.span_sr)
        weights = spans.weights_lk.take(slots.span_sr)
        cluster = rows.cluster_r
        ends_f, ends_b = self.forward_2m.take(cluster, 1), self.backward_2m.take(cluster, 1)
        forward = np.concatenate([ends_f, ahead * slowness]) * batch.size
        backward = np.concatenate([ends_b, back * slowness]) * batch.size
        overhead_flop: Array | float = 0.0
        if self.late:
            ahead_s, back_s, overhead_flop = self._overheads(cluster, slots)
            forward, backward = forward + ahead_s, backward + back_s
        hop_s, hop_worth = self._hops(rows, batch, slots, (forward.max(0), backward.max(0)))
        most = None if self.tables.few else np.minimum.accumulate(held, axis=0)
        makespan = compute_step_makespan_s(
            self.options, (forward, backward), hop_s, batch.count, axis=0, held=most
        )
        update = OPTIMISER_FLOP_PER_BYTE * weights
        fixed = (weights * members.bulk_seconds.take(at)).sum(0) + compute_server_s(
            self.tables, cluster
        )
        if self.members.round_s.any():
            fixed += (self.members.round_s.take(at) * slots.used).max(0)
        fixed += batch.steps * ((update * slowness).sum(0) + self.update_s_m[cluster])
        flop = batch.examples * (ahead + back) + update + batch.count * overhead_flop
        joule = batch.steps * flop * members.joule_per_flop.take(at)
        worth = batch.steps * (flop * members.flop_worth.take(at)).sum(0)
        worth += (weights * members.bulk_worth.take(at)).sum(0)
        worth += batch.steps * (self._own_worth(rows, batch) + batch.count * hop_worth)
        latency = fixed + batch.steps * makespan
        if self.room is not None:
            over = overdrawn(joule, self.room.take(at), self.budget.take(at)) * slots.used
            worth += self.problem.latency_price * latency * over.sum(0)
        crowd = self._crowding((forward, backward), hop_s) * (batch.count - 1.0)
        return Estimates(latency, latency + batch.steps * crowd, worth)

    def _crowding(self, stage_s: tuple[Array, Array], hop_s: list[Array]) -> Array:
        """By how much the norms of all stages' and hops' times exceed the slowest's, (R,)."""
        if self.options.schedule == "1f1b":
            stage_s = (stage_s[0] + stage_s[1],) * 2
            hop_s = [np.maximum(*hop_s)] * 2
        excess = np.zeros(stage_s[0].shape[1])
        for stage, hop in zip(stage_s, hop_s, strict=True):
            slowest = np.maximum(stage.max(0), hop.max(0))
            total = np.zeros_like(slowest)
            for times in (stage, hop):
                share = times / slowest
                for _ in range(NORM.bit_length() - 1):
                    share *= share
                total += share.sum(0)
            excess += slowest * (total ** (1.0 / NORM) - 1.0)
        return excess if self.options.schedule == "gpipe" else 0.5 * excess

    def _overheads(self, cluster: Ints, slots: _Slots) -> tuple[Array, Array, Array]:
        """Overheads of a micro-batch: seconds, (S + 2, R), both ways, and as operations, (S, R)."""
        each = self.members.overhead.take(slots.member_at_sr)
        ahead = self.spans.ahead_lk.take(slots.span_sr) * each
        back = self.spans.back_lk.take(slots.span_sr) * each
        ends = self.overhead_2m.take(cluster, 1)
        flop = (ahead + back) / self.members.slowness.take(slots.member_at_sr)
        return (np.concatenate([AHEAD * ends, ahead]), np.concatenate([BACK * ends, back]), flop)

    def _own_worth(self, rows: Layouts, batch: _Batch) -> Array:
        """Price the energy that a step costs the control unit."""
        first, last = (end.of(rows.cluster_r) for end in self.tables.ends)
        home = self.tables.edges.home_m[rows.cluster_r]
        own = rows.cluster_r * self.tables.edge
        overhead = self.members.overhead.take(own) / self.members.slowness.take(own)
        flop = batch.count * overhead
        for part, here in ((first, True), (last, home)):
            passes = batch.examples * (part.forward_flop + part.backward_flop)
            flop = flop + here * (passes + OPTIMISER_FLOP_PER_BYTE * part.trained_bytes)
        return np.asarray(flop * self.members.flop_worth.take(own))

    def _hops(
        self, rows: Layouts, batch: _Batch, slots: _Slots, slowest: tuple[Array, Array]
    ) -> tuple[list[Array], Array]:
        """Seconds of hops forward and backward, (S + 1, R), and energy's price, (R,)."""
        link = slots.links()
        bits = self.tables.blocks.cut_bytes_l[slots.model_r, slots.cuts()]
        bits = np.maximum(8.0 * batch.size * bits, 1.0) * slots.hop_used
        which = np.searchsorted(self.counts, rows.micro_batches_r)
        calm_link = link + self.tables.gain_mij.size * which
        quick = [bits * point.seconds.take(link) for point in self.links.quick]
        pace = [np.maximum(s, q.max(0)) for s, q in zip(slowest, quick, strict=True)]
        if self.options.schedule == "1f1b":
            pace = [np.maximum(slowest[0] + slowest[1], np.maximum(*pace))] * 2
        single = rows.micro_batches_r == 1
        worth, times = np.zeros(len(rows)), []
        slow_points = self.links.calm(which)
        for way in (0, 1):
            calm = bits * slow_points[way].seconds.take(calm_link)
            bound = np.where(single, np.inf, pace[way])
            time = np.minimum(calm, np.maximum(quick[way], bound))
            share = (time - quick[way]) / np.maximum(calm - quick[way], 1e-300)
            fast = self.links.quick[way].worth.take(link)
            slow = slow_points[way].worth.take(calm_link)
            worth += (bits * (fast + share * (slow - fast))).sum(0)
            times.append(time)
        return times, worth

    def _held(self, rows: Layouts, batch: _Batch, slots: _Slots) -> Array:
        """Count the micro-batches that fit on every stage, slots first; below 1 where none does.

        Infinite on unused slots. As ``costs.work.count_most_in_flight`` has them, each for itself.
        """
        spans, (first, last) = self.spans, (end.of(rows.cluster_r) for end in self.tables.ends)
        cap = count_share_bytes(self.tables, rows.cluster_r, batch.size, batch.count, self.options)
        room = np.minimum(self.members.room.take(slots.member_at_sr), cap)
        if self.tables.members.guarded:
            room[slots.first_sr < self.members.first.take(slots.member_at_sr)] = NO_ROOM
        room -= spans.state_lk.take(slots.span_sr) + batch.size * spans.once[slots.model_r]
        room /= np.maximum(batch.size * spans.kept_lk.take(slots.span_sr), 1.0)
        held = np.empty((len(room) + 2, len(batch.size)))
        np.floor(room, out=held[1:-1])
        held[1:-1][~slots.used] = np.inf
        own = self.members.room.take(rows.cluster_r * self.tables.edge)
        edge = (1.0 - self.options.memory_margin) * self.tables.edges.memory_m[rows.cluster_r]
        for place, room_r, part in ((0, own, first), (-1, edge, last)):
            each = batch.size * np.maximum(part.stash_bytes, 1.0)
            held[place] = np.floor((room_r - count_end_bytes(part, batch.size, 0.0)) / each)
        return held

    def _fits(self, batch: _Batch, slots: _Slots, held: Array) -> Mask:
        """As ``costs.work.fits``: what the schedule cannot do without may be ``held``."""
        if self.options.schedule == "gpipe":
            return np.asarray((held >= batch.count).all(0))
        behind = slots.depth_r + 1.0 - np.arange(-1.0, len(held) - 1)[:, None]
        behind[-1] = 1.0
        return np.asarray((held >= np.clip(behind, 1.0, batch.count)).all(0))


class _Batch:
    """Micro-batches of rows as floats."""

    def __init__(self, tables: Tables, rows: Layouts) -> None:
        self.size = rows.micro_batch_size_r.astype(np.float64)
        self.count = rows.micro_batches_r.astype(np.float64)
        self.examples = self.size * self.count
        self.steps = count_steps(tables, rows)


class SpanTable:
    """Sums over blocks ``l .. k-1`` of every model, (K, L + 1, L + 1)."""

    def __init__(self, tables: Tables, options: PricingOptions) -> None:
        blocks = tables.blocks
        kept_l, self.once = count_kept_bytes(blocks, options)
        self.forward_lk = sum_spans(blocks.forward_flop_l)
        self.backward_lk = sum_spans(blocks.backward_flop_l)
        count_lk = sum_spans(blocks.count_l)
        self.ahead_lk, self.back_lk = AHEAD * count_lk, BACK * count_lk
        if options.recompute:
            self.backward_lk = self.backward_lk + self.forward_lk
            self.back_lk = self.back_lk + self.ahead_lk
        self.weights_lk = sum_spans(blocks.trained_bytes_l)
        self.state_lk, self.kept_lk = sum_spans(blocks.state_bytes_l), sum_spans(kept_l)


class MemberPrices:
    """Per member, flat over (m, i): seconds per operation, bytes to use, and what things cost."""

    def __init__(self, tables: Tables, options: PricingOptions, price_mi: Array) -> None:
        members = tables.members
        self.slowness = 1.0 / members.speed_mi.ravel()
        self.overhead = members.overhead_mi.ravel()
        self.round_s = members.round_mi.ravel()
        self.room = (1.0 - options.memory_margin) * members.memory_mi.ravel()
        self.first = members.first_mi.ravel()
        self.flop_worth = (price_mi * members.energy_per_flop_mi).ravel()
        self.joule_per_flop = members.energy_per_flop_mi.ravel()
        noise = tables.snapshot.radio.noise_w_per_hz
        width, watt, gain = tables.d2d_hz_mij[:, 0, :-1], members.power_max_mi, tables.gain_mij
        bits = 8.0 / tables.share_mij[:, 0, :-1]
        out = bits / compute_rate_bit_per_s(width, watt[:, :1] * gain[:, 0, :-1] / noise)
        home = bits / compute_rate_bit_per_s(width, watt * gain[:, :, 0] / noise)
        # Per byte of weights, handed out and collected.
        self.bulk_seconds = (out + home).ravel()
        self.bulk_worth = ((price_mi * watt)[:, :1] * out + price_mi * watt * home).ravel()


class _Slots:
    """A batch of rows with the slot axis in front, no wider than its deepest row."""

    def __init__(self, rows: Layouts, tables: Tables) -> None:
        self.edge, self.model_r = tables.edge, tables.model_m[rows.cluster_r]
        self.depth_r = rows.depth_r
        width = max(int(self.depth_r.max()), 1)
        self.member_sr = np.maximum(np.ascontiguousarray(rows.member_rs[:, :width].T), 0)
        self.stop_sr = np.ascontiguousarray(rows.stop_rs[:, :width].T)
        self.base_r = rows.cluster_r * self.edge
        self.member_at_sr = self.member_sr + self.base_r
        self.used = np.arange(width)[:, None] < self.depth_r
        self.hop_used = np.arange(width + 1)[:, None] <= self.depth_r
        self.span_sr = self.stop_sr.copy()
        spans = tables.num_blocks + 1
        self.span_sr[1:] += self.stop_sr[:-1] * spans
        self.span_sr += self.model_r * spans**2

    @property
    def first_sr(self) -> Ints:
        """The first block of every slot, (S, R)."""
        return np.concatenate([np.zeros_like(self.stop_sr[:1]), self.stop_sr[:-1]])

    def links(self) -> Ints:
        """Flat index of (cluster, sender, receiver) of every hop, (S + 1, R)."""
        sender = np.concatenate([self.base_r[None, :], self.member_at_sr])
        receiver = np.concatenate([self.member_sr, np.zeros_like(self.member_sr[:1])])
        receiver[self.depth_r, np.arange(len(self.depth_r))] = self.edge
        return np.asarray(sender * (self.edge + 1) + receiver)

    def cuts(self) -> Ints:
        """Return the cut that every hop crosses, (S + 1, R)."""
        return np.concatenate([np.zeros_like(self.stop_sr[:1]), self.stop_sr])

"""The cluster-wise objective of many candidate rows, fast.

Given a market, the best time per bit of a transmission depends only on its two parties and on J,
not on the payload: everything about links is a table of seconds and priced joules per bit, and
scoring a row is a handful of look-ups. Each link has two operating points: ``quick`` as if it
were its pass's bottleneck (a second of it counts J times) and ``calm`` as if it were not (once).
A row slows its links from quick to calm as far as its own bottleneck allows, energy interpolated
linearly in between (convexity makes that an upper bound).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from collapipe_flwr.costs.compute import Options, steps_of
from collapipe_flwr.costs.latency import OPTIMISER_FLOP_PER_BYTE
from collapipe_flwr.costs.layouts import Layouts
from collapipe_flwr.costs.memory import fits
from collapipe_flwr.costs.radio import LN2, exponent_near, power_for_time_w, rate_bit_per_s
from collapipe_flwr.costs.tables import Tables
from collapipe_flwr.scheduler.market import Market

Array = NDArray[np.float64]
Ints = NDArray[np.int64]

QUICK, CALM = 0, 1
LEAST_SLOPE = 0.02  # of the latency price: even idle clusters do not waste time without limit


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkTable:
    """Per bit, flat over (cluster, sender, receiver, J); [QUICK or CALM][forward or backward]."""

    seconds: list[list[Array]]
    worth: list[list[Array]]  # objective


class Scorer:
    """Scores rows under one market; build once, call often."""

    def __init__(self, tables: Tables, options: Options, market: Market, counts: Ints) -> None:
        self.tables, self.options, self.market = tables, options, market
        self.counts = np.unique(counts)
        self.shape = (*tables.gain_mij.shape, len(self.counts))
        self.slope_m = np.maximum(market.slack_price_m, LEAST_SLOPE * market.latency_price)
        self.links = self._links()
        self._bulk()
        edge = tables.snapshot.edge.speed_flop_per_s
        self.edge_speed = edge / tables.num_clusters if options.edge_shared else edge

    # -- tables -----------------------------------------------------------------------------

    def _links(self) -> LinkTable:
        """Operating points of every link in both directions for every J."""
        tables, market = self.tables, self.market
        noise = (tables.snapshot.radio.noise_w_per_hz / tables.gain_mij)[:, :, :, None, None]
        width = np.broadcast_to(tables.d2d_hz_m[:, None, None], tables.gain_mij.shape).copy()
        width[:, :, -1] = market.edge_hz_m[:, None]
        width = width[:, :, :, None, None]
        watt, price = self._senders(tables.members.power_max_mi, market.price_mi)
        per_send = self.slope_m[:, None, None, None, None] / np.maximum(price, 1e-30)
        fastest = 1.0 / rate_bit_per_s(width, watt / noise)
        seconds, worth = [], []
        counts = self.counts.astype(np.float64)[None, None, None, :, None]
        for times in (np.ones_like(counts), 1.0 / counts):
            ratio = per_send * times / (noise * width)
            slow = LN2 / (width * exponent_near(ratio))
            time = np.where(price > 0, np.maximum(slow, fastest), fastest)
            joule = np.minimum(power_for_time_w(1.0, width, noise, time), watt) * time
            seconds.append(self._by_way(time))
            worth.append(self._by_way(price * joule))
        return LinkTable(seconds=seconds, worth=worth)

    def _by_way(self, values: Array) -> list[Array]:
        whole = np.broadcast_to(values, (*self.shape, 2))
        return [np.ascontiguousarray(whole[..., way]).ravel() for way in (0, 1)]

    def _senders(self, watt_mi: Array, price_mi: Array) -> tuple[Array, Array]:
        """Power limits and prices of (forward, backward) senders, (M, I, I + 1, 1, 2)."""
        clusters, members, receivers = self.tables.gain_mij.shape
        result = []
        ends = (self.tables.snapshot.edge.tx_power_w, 0.0)
        for values, edge in ((watt_mi, ends[0]), (price_mi, ends[1])):
            back = np.concatenate([values, np.full((clusters, 1), edge)], axis=1)
            pair = np.empty((clusters, members, receivers, 1, 2))
            pair[..., 0, 0] = values[:, :, None]
            pair[..., 0, 1] = back[:, None, :]
            result.append(pair)
        return result[0], result[1]

    def _bulk(self) -> None:
        """Per bit of a segment's weights: seconds and worth of hand-out and collection, (M, I)."""
        tables, members = self.tables, self.tables.members
        noise = tables.snapshot.radio.noise_w_per_hz
        width, watt, price = tables.d2d_hz_m[:, None], members.power_max_mi, self.market.price_mi
        gain_out, gain_home = tables.gain_mij[:, 0, :-1], tables.gain_mij[:, :, 0]
        out = 1.0 / rate_bit_per_s(width, watt[:, :1] * gain_out / noise)
        home = 1.0 / rate_bit_per_s(width, watt * gain_home / noise)
        self.bulk_seconds = out + home
        self.bulk_worth = (price * watt)[:, :1] * out + price * watt * home
        self.flop_worth = price * members.energy_per_flop_mi

    # -- rows -------------------------------------------------------------------------------

    def values(self, rows: Layouts, rho_r: Array) -> Array:
        """The objective of every row, infinite where memory forbids it."""
        tables, market, cluster = self.tables, self.market, rows.cluster_r
        latency, worth = self._price(rows)
        ceiling = market.ceiling_m[cluster]
        late = market.latency_price * rho_r * np.maximum(latency, ceiling)
        early = market.slack_price_m[cluster] * np.maximum(ceiling - latency, 0.0)
        keep = fits(tables, rows, self.options)
        return np.where(keep, late - early + worth, np.inf)

    def _price(self, rows: Layouts) -> tuple[Array, Array]:
        """Round latency and priced energy of every row.

        Inside, slots come first, (S, R): sums and maxima over a leading axis are much faster.
        """
        tables, blocks, model = self.tables, self.tables.blocks, self.tables.snapshot.model
        chain = _Slots(rows, self.flop_worth.shape[1])
        size = rows.micro_batch_size_r.astype(np.float64)
        count = rows.micro_batches_r.astype(np.float64)
        steps = steps_of(tables, rows)
        speed = tables.members.speed_mi.ravel()[chain.slot_sr]
        ahead, back = chain.sums(blocks.forward_flop_l), chain.sums(blocks.backward_flop_l)
        if self.options.recompute:
            back = back + ahead
        weights = chain.sums(blocks.parameter_bytes_l)
        update = OPTIMISER_FLOP_PER_BYTE * weights
        ends = self._ends(rows)
        forward = np.concatenate([ends[0], ahead / speed]) * size
        backward = np.concatenate([ends[1], back / speed]) * size
        hop_s, hop_worth = self._hops(rows, chain, forward.max(0), backward.max(0))
        makespan = self._makespan(forward, backward, hop_s, count)
        fixed = 8.0 * (weights * self.bulk_seconds.ravel()[chain.slot_sr]).sum(0)
        fixed += self._server(rows) + steps * ((update / speed).sum(0) + ends[2])
        flop = size * count * (ahead + back) + update
        worth = steps * (flop * self.flop_worth.ravel()[chain.slot_sr]).sum(0)
        worth += 8.0 * (weights * self.bulk_worth.ravel()[chain.slot_sr]).sum(0)
        head = model.embedding.forward_flop + model.embedding.backward_flop
        own = size * count * head + OPTIMISER_FLOP_PER_BYTE * model.embedding.parameter_bytes
        worth += steps * own * self.flop_worth[rows.cluster_r, 0] + steps * count * hop_worth
        return fixed + steps * makespan, worth

    def _ends(self, rows: Layouts) -> tuple[Array, Array, Array]:
        """Seconds per example of control unit and edge, (2, R) twice, and of their optimisers."""
        model = self.tables.snapshot.model
        own = self.tables.members.speed_mi[rows.cluster_r, 0]
        edge = np.full(len(rows), self.edge_speed)
        first, last = model.embedding, model.decoder
        forward = np.stack([first.forward_flop / own, last.forward_flop / edge])
        backward = np.stack([first.backward_flop / own, last.backward_flop / edge])
        update = first.parameter_bytes / own + last.parameter_bytes / edge
        return forward, backward, OPTIMISER_FLOP_PER_BYTE * update

    def _server(self, rows: Layouts) -> Array:
        whole = self.tables.snapshot.model.embedding.parameter_bytes
        whole_bits = 16.0 * (whole + self.tables.blocks.parameter_bytes_l[-1])
        return np.asarray(whole_bits / self.tables.server_rate_m[rows.cluster_r])

    def _hops(
        self, rows: Layouts, chain: _Slots, ahead_r: Array, back_r: Array
    ) -> tuple[tuple[Array, Array], Array]:
        """Seconds of hops forward and backward, (S + 1, R), and energy's price, (R,)."""
        index, bits = self._link_index(rows, chain)
        ways = (0, 1)
        quick = [bits * self.links.seconds[QUICK][way][index] for way in ways]
        calm = [bits * self.links.seconds[CALM][way][index] for way in ways]
        slowest = [np.maximum(ahead_r, quick[0].max(0)), np.maximum(back_r, quick[1].max(0))]
        if self.options.schedule == "1f1b":
            slowest = [np.maximum(ahead_r + back_r, np.maximum(*slowest))] * 2
        single = rows.micro_batches_r == 1
        worth, times = np.zeros(len(rows)), []
        for way in ways:
            bound = np.where(single, np.inf, slowest[way])
            time = np.minimum(calm[way], np.maximum(quick[way], bound))
            share = (time - quick[way]) / np.maximum(calm[way] - quick[way], 1e-300)
            fast = self.links.worth[QUICK][way][index]
            slow = self.links.worth[CALM][way][index]
            worth += (bits * (fast + share * (slow - fast))).sum(0)
            times.append(time)
        return (times[0], times[1]), worth

    def _link_index(self, rows: Layouts, chain: _Slots) -> tuple[Ints, Array]:
        """Flat table index and bits of every hop, (S + 1, R); unused hops carry no bits."""
        tables = self.tables
        _, members, receivers, counts = self.shape
        zero = np.zeros((1, len(rows)), np.int64)
        hop = np.arange(len(chain.member_sr) + 1)[:, None]
        sender = np.concatenate([zero, chain.member_sr])
        receiver = np.concatenate([chain.member_sr, zero])
        receiver = np.where(hop == chain.depth_r, tables.edge, receiver)
        bits = tables.blocks.cut_bytes_l[np.concatenate([zero, chain.stop_sr])]
        bits = np.maximum(8.0 * rows.micro_batch_size_r * bits, 1.0) * (hop <= chain.depth_r)
        which = np.searchsorted(self.counts, rows.micro_batches_r)
        flat = (rows.cluster_r * members + sender) * receivers + receiver
        return flat * counts + which, bits

    def _makespan(
        self, forward: Array, backward: Array, hop_s: tuple[Array, Array], count: Array
    ) -> Array:
        total = forward.sum(0) + backward.sum(0) + hop_s[0].sum(0) + hop_s[1].sum(0)
        if self.options.schedule == "gpipe":
            pace = np.maximum(forward.max(0), hop_s[0].max(0))
            pace = pace + np.maximum(backward.max(0), hop_s[1].max(0))
        else:
            both = self.options.half_duplex
            links = hop_s[0] + hop_s[1] if both else np.maximum(hop_s[0], hop_s[1])
            pace = np.maximum((forward + backward).max(0), links.max(0))
        return np.asarray(total + (count - 1.0) * pace)


class _Slots:
    """A batch of rows with the slot axis in front."""

    def __init__(self, rows: Layouts, members: int) -> None:
        width = max(int(rows.depth_r.max()), 1)
        self.depth_r = rows.depth_r
        self.member_sr = np.maximum(np.ascontiguousarray(rows.member_rs[:, :width].T), 0)
        self.stop_sr = np.ascontiguousarray(rows.stop_rs[:, :width].T)
        self.slot_sr = rows.cluster_r * members + self.member_sr

    def sums(self, prefix_l: Array) -> Array:
        """Sums of a per-block quantity over every slot's segment."""
        reached = prefix_l[self.stop_sr]
        result = reached.copy()
        result[1:] -= reached[:-1]
        return np.asarray(result)

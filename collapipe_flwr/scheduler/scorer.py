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
from collapipe_flwr.costs.layouts import Layouts, segment_sums
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
    """Per bit, flat over (cluster, sender, receiver, J), last axis (forward, backward)."""

    seconds: tuple[Array, Array]  # quick, calm
    worth: tuple[Array, Array]  # objective, likewise


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
        clusters, members, receivers = tables.gain_mij.shape
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
            flat = (clusters * members * receivers * len(self.counts), 2)
            seconds.append(np.broadcast_to(time, (*self.shape, 2)).reshape(flat))
            worth.append(np.broadcast_to(price * joule, (*self.shape, 2)).reshape(flat))
        return LinkTable(seconds=(seconds[0], seconds[1]), worth=(worth[0], worth[1]))

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
        """Round latency and priced energy of every row."""
        tables, blocks, model = self.tables, self.tables.blocks, self.tables.snapshot.model
        cluster = rows.cluster_r[:, None]
        member = np.maximum(rows.member_rs, 0)
        size = rows.micro_batch_size_r.astype(np.float64)
        count = rows.micro_batches_r.astype(np.float64)
        steps = steps_of(tables, rows)
        slot = cluster * self.flop_worth.shape[1] + member
        speed = tables.members.speed_mi.ravel()[slot]
        ahead = segment_sums(blocks.forward_flop_l, rows)
        back = segment_sums(blocks.backward_flop_l, rows)
        if self.options.recompute:
            back = back + ahead
        weights = segment_sums(blocks.parameter_bytes_l, rows)
        update = OPTIMISER_FLOP_PER_BYTE * weights
        ends = self._ends(rows)
        forward = np.concatenate([ends[0], ahead / speed], axis=1) * size[:, None]
        backward = np.concatenate([ends[1], back / speed], axis=1) * size[:, None]
        hop_s, hop_worth = self._hops(rows, forward.max(1), backward.max(1))
        makespan = self._makespan(forward, backward, hop_s, count)
        fixed = (8.0 * weights * self.bulk_seconds.ravel()[slot]).sum(1) + self._server(rows)
        fixed += steps * ((update / speed).sum(1) + ends[2])
        flop = (size * count)[:, None] * (ahead + back) + update
        worth = steps * (flop * self.flop_worth.ravel()[slot]).sum(1)
        worth += (8.0 * weights * self.bulk_worth.ravel()[slot]).sum(1)
        head = model.embedding.forward_flop + model.embedding.backward_flop
        own = size * count * head + OPTIMISER_FLOP_PER_BYTE * model.embedding.parameter_bytes
        worth += steps * own * self.flop_worth[rows.cluster_r, 0] + steps * count * hop_worth
        return fixed + steps * makespan, worth

    def _ends(self, rows: Layouts) -> tuple[Array, Array, Array]:
        """Seconds per example of control unit and edge, (R, 2) twice, and of their optimisers."""
        model = self.tables.snapshot.model
        own = self.tables.members.speed_mi[rows.cluster_r, 0]
        edge = np.full(len(rows), self.edge_speed)
        first, last = model.embedding, model.decoder
        forward = np.stack([first.forward_flop / own, last.forward_flop / edge], axis=1)
        backward = np.stack([first.backward_flop / own, last.backward_flop / edge], axis=1)
        update = first.parameter_bytes / own + last.parameter_bytes / edge
        return forward, backward, OPTIMISER_FLOP_PER_BYTE * update

    def _server(self, rows: Layouts) -> Array:
        whole = self.tables.snapshot.model.embedding.parameter_bytes
        whole_bits = 16.0 * (whole + self.tables.blocks.parameter_bytes_l[-1])
        return np.asarray(whole_bits / self.tables.server_rate_m[rows.cluster_r])

    def _hops(self, rows: Layouts, ahead_r: Array, back_r: Array) -> tuple[Array, Array]:
        """Seconds of every hop, (R, S + 1, 2), and the priced energy of one micro-batch, (R,)."""
        index, bits = self._link_index(rows)
        quick = bits * self.links.seconds[QUICK][index]
        calm = bits * self.links.seconds[CALM][index]
        slowest = np.maximum(np.stack([ahead_r, back_r], axis=1), quick.max(1))
        if self.options.schedule == "1f1b":
            period = np.maximum(ahead_r + back_r, quick.max((1, 2)))
            slowest = np.stack([period, period], axis=1)
        single = rows.micro_batches_r == 1
        slowest = np.where(single[:, None], np.inf, slowest)
        time = np.minimum(calm, np.maximum(quick, slowest[:, None, :]))
        share = (time - quick) / np.maximum(calm - quick, 1e-300)
        fast, slow = self.links.worth[QUICK][index], self.links.worth[CALM][index]
        worth = bits * (fast + share * (slow - fast))
        return time, worth.sum((1, 2))

    def _link_index(self, rows: Layouts) -> tuple[Ints, Array]:
        """Flat table index and bits of every hop; unused hops carry no bits."""
        tables = self.tables
        _, members, receivers, counts = self.shape
        depth = rows.depth_r[:, None]
        hop = np.arange(rows.member_rs.shape[1] + 1)[None, :]
        zero = np.zeros((len(rows), 1), np.int64)
        sender = np.maximum(np.concatenate([zero, rows.member_rs], axis=1), 0)
        receiver = np.maximum(np.concatenate([rows.member_rs, zero], axis=1), 0)
        receiver = np.where(hop == depth, tables.edge, receiver)
        cut = np.concatenate([zero, rows.stop_rs], axis=1)
        bits = 8.0 * rows.micro_batch_size_r[:, None] * tables.blocks.cut_bytes_l[cut]
        bits = np.where(hop <= depth, np.maximum(bits, 1.0), 0.0)
        which = np.searchsorted(self.counts, rows.micro_batches_r)[:, None]
        flat = (rows.cluster_r[:, None] * members + sender) * receivers + receiver
        return flat * counts + which, bits[:, :, None]

    def _makespan(self, forward: Array, backward: Array, hop_s: Array, count: Array) -> Array:
        total = forward.sum(1) + backward.sum(1) + hop_s.sum((1, 2))
        if self.options.schedule == "gpipe":
            pace = np.maximum(forward.max(1), hop_s[:, :, 0].max(1))
            pace = pace + np.maximum(backward.max(1), hop_s[:, :, 1].max(1))
        else:
            links = hop_s.sum(2) if self.options.half_duplex else hop_s.max(2)
            pace = np.maximum((forward + backward).max(1), links.max(1))
        return np.asarray(total + (count - 1.0) * pace)

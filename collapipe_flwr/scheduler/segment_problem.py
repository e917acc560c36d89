"""From tables and dual prices to one cluster's exact segmentation problem.

Hop times are those that the prices choose (without the bottleneck's
relief); the slope of the objective in the cluster's latency is given by the caller.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from collapipe_flwr.costs.arrays import Array
from collapipe_flwr.costs.layouts import span_sums
from collapipe_flwr.costs.radio import SHARES, power_for_time_w, send_time_s, thrifty_time_s
from collapipe_flwr.costs.tables import Tables
from collapipe_flwr.costs.work import (
    OPTIMISER_FLOP_PER_BYTE,
    PricingOptions,
    edge_speed,
    local_steps,
    segment_bytes,
)
from collapipe_flwr.scheduler.segment_dp import SegmentProblem


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What one cluster pays: objective per second of its latency, per joule, and its radio."""

    cluster: int
    micro_batch_size: int
    micro_batches: int
    slope: float
    price_i: Array
    edge_hz: float


def segment_problem(tables: Tables, options: PricingOptions, terms: Terms) -> SegmentProblem:
    """The exact problem of one cluster for given micro-batches and prices."""
    return _Builder(tables, options, terms).build()


class _Builder:
    """Arrays over (device, first block, block behind) and (sender, receiver, cut)."""

    def __init__(self, tables: Tables, options: PricingOptions, terms: Terms) -> None:
        self.tables, self.options, self.terms = tables, options, terms
        m = terms.cluster
        self.members = int(tables.members.present_mi[m].sum())
        table = tables.members
        self.speed = table.speed_mi[m, : self.members]
        self.joule = table.energy_per_flop_mi[m, : self.members]
        self.watt = table.power_max_mi[m, : self.members]
        self.price = terms.price_i[: self.members]
        size, count = float(terms.micro_batch_size), float(terms.micro_batches)
        self.size, self.count = size, count
        self.steps = float(local_steps(tables.examples_m[m], size * count))
        self.edge_speed = edge_speed(tables, options)
        self.noise = tables.snapshot.radio.noise_w_per_hz

    def build(self) -> SegmentProblem:
        """All arrays."""
        forward, backward, stage = self._stages()
        hop_forward, hop_backward, hop = self._hops()
        ends, fixed = self._ends()
        overlaps = self.options.schedule == "1f1b"
        if overlaps:
            forward, backward = forward + backward, np.zeros_like(backward)
            hop_forward = np.maximum(hop_forward, hop_backward)
            hop_backward = np.zeros_like(hop_backward)
            ends = ends.sum(0, keepdims=True) * np.array([[1.0], [0.0]])
        return SegmentProblem(
            stage_cost_nlk=stage,
            stage_forward_nlk=forward,
            stage_backward_nlk=backward,
            hop_cost_ijl=hop,
            hop_forward_ijl=hop_forward,
            hop_backward_ijl=hop_backward,
            pace=self.terms.slope * self.steps * (self.count - 1.0),
            floor=(float(ends[0].max()), float(ends[1].max())),
            fixed_cost=fixed,
        )

    def _stages(self) -> tuple[Array, Array, Array]:
        blocks, terms = self.tables.blocks, self.terms
        ahead, back = span_sums(blocks.forward_flop_l), span_sums(blocks.backward_flop_l)
        if self.options.recompute:
            back = back + ahead
        weights = span_sums(blocks.parameter_bytes_l)
        speed, joule, price = (v[1:, None, None] for v in (self.speed, self.joule, self.price))
        forward, backward = self.size * ahead / speed, self.size * back / speed
        update = OPTIMISER_FLOP_PER_BYTE * weights
        time = self.steps * (forward + backward + update / speed)
        flop = self.steps * (self.size * self.count * (ahead + back) + update)
        out, home, radio_j = self._bulk(8.0 * weights)
        cost = terms.slope * (time + out + home) + price * joule * flop + radio_j
        in_flight = self.count if self.options.schedule == "gpipe" else 1.0
        need = segment_bytes(blocks, self.options, self.size, in_flight)
        room = self.tables.members.memory_mi[terms.cluster, 1 : self.members, None, None]
        allowed = np.tri(len(ahead), k=-1, dtype=bool).T
        allowed = allowed & (need <= (1.0 - self.options.memory_margin) * room)
        return forward, backward, np.where(allowed, cost, np.inf)

    def _bulk(self, bits: Array) -> tuple[Array, Array, Array]:
        """Hand-out and collection times and their priced energy, (N, L + 1, L + 1)."""
        gain = self.tables.gain_mij[self.terms.cluster]
        n = self.members
        width = self.tables.d2d_hz_mij[self.terms.cluster, 0, 1:n, None, None]
        bits = bits / self.tables.share_mij[self.terms.cluster, 0, 1:n, None, None]
        snr_out = (self.watt[0] * gain[0, 1:n] / self.noise)[:, None, None]
        snr_home = (self.watt[1:] * gain[1:n, 0] / self.noise)[:, None, None]
        out, home = send_time_s(bits, width, snr_out), send_time_s(bits, width, snr_home)
        joules = self.price[0] * self.watt[0] * out
        joules = joules + (self.price[1:] * self.watt[1:])[:, None, None] * home
        return out, home, joules

    def _hops(self) -> tuple[Array, Array, Array]:
        """Times and costs between any two parties, (N + 1, N + 2 receivers, L + 1)."""
        terms, n = self.terms, self.members
        gain = self.tables.gain_mij[terms.cluster][:n]
        gain = np.concatenate([gain[:, :n], gain[:, -1:]], axis=1)[:, :, None]
        coded = SHARES[self.tables.codec_mij[terms.cluster]] / self.tables.share_mij[terms.cluster]
        coded = np.concatenate([coded[:n, :n], coded[:n, -1:]], axis=1)[:, :, None]
        bits = 8.0 * self.size * np.maximum(self.tables.blocks.cut_bytes_l, 1e-9)[None, None, :]
        bits = bits * coded
        width = self.tables.d2d_hz_mij[terms.cluster, :n, : n + 1, None].copy()
        width[:, n] = terms.edge_hz
        noise = self.noise / gain
        watt = np.concatenate([self.watt, [self.tables.snapshot.edge.tx_power_w]])
        price = np.concatenate([self.price, [0.0]])
        ahead = self._one_way(bits, width, noise, (watt[:n, None, None], price[:n, None, None]))
        back = self._one_way(bits, width, noise, (watt[None, :, None], price[None, :, None]))
        cost = terms.slope * self.steps * (ahead[0] + back[0]) + ahead[1] + back[1]
        return ahead[0], back[0], np.asarray(cost)

    def _one_way(
        self, bits: Array, width: Array, noise: Array, sender: tuple[Array, Array]
    ) -> tuple[Array, Array]:
        """Time per micro-batch and priced energy of the round of one direction."""
        watt, price = sender
        fastest = send_time_s(bits, width, watt / noise)
        worth = self.terms.slope / np.maximum(price * self.count, 1e-30)
        wished = thrifty_time_s(bits, width, noise, worth)
        time = np.where(price > 0, np.maximum(wished, fastest), fastest)
        power = np.minimum(power_for_time_w(bits, width, noise, time), watt)
        return time, price * power * time * self.steps * self.count

    def _ends(self) -> tuple[Array, float]:
        """Times of control unit and edge, (2, 2), and what every layout costs."""
        model, terms = self.tables.snapshot.model, self.terms
        cost = (model.embedding, model.decoder)
        speed = (self.speed[0], self.edge_speed)
        times = np.array(
            [
                [self.size * c.forward_flop / s for c, s in zip(cost, speed, strict=True)],
                [self.size * c.backward_flop / s for c, s in zip(cost, speed, strict=True)],
            ]
        )
        update = [OPTIMISER_FLOP_PER_BYTE * c.parameter_bytes for c in cost]
        whole = model.embedding.parameter_bytes + self.tables.blocks.parameter_bytes_l[-1]
        server = 16.0 * whole / self.tables.server_rate_m[terms.cluster]
        steps_s = times.sum() + sum(u / s for u, s in zip(update, speed, strict=True))
        work = self.size * self.count * (cost[0].forward_flop + cost[0].backward_flop) + update[0]
        joules = self.steps * self.joule[0] * work
        fixed = terms.slope * (server + self.steps * steps_s) + self.price[0] * joules
        return times, float(fixed)

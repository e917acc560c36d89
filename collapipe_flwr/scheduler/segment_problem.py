"""From tables and dual prices to one cluster's exact segmentation problem.

Hop times are those that the prices choose (without the bottleneck's
relief); the slope of the objective in the cluster's latency is given by the caller.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from collapipe_flwr.costs.arrays import Array
from collapipe_flwr.costs.radio import SHARES, power_for_time_w, send_time_s, thrifty_time_s
from collapipe_flwr.costs.tables import Tables
from collapipe_flwr.costs.work import (
    AHEAD,
    BACK,
    OPTIMISER_FLOP_PER_BYTE,
    PricingOptions,
    edge_speed,
    local_steps,
    segment_bytes,
)
from collapipe_flwr.scheduler.scorer import MemberPrices, SpanTable
from collapipe_flwr.scheduler.segment_dp import SegmentProblem


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What one cluster pays: objective per second of its latency, per joule, and its radio."""

    cluster: int
    micro_batch_size: int
    micro_batches: int
    slope: float
    price_i: Array
    room_i: Array
    edge_hz: float

    def steps(self, tables: Tables) -> float:
        """Local steps of the round."""
        batch = self.micro_batch_size * self.micro_batches
        return float(local_steps(tables.examples_m[self.cluster], batch))

    def members(self, tables: Tables) -> int:
        """The control unit and the devices."""
        return int(tables.members.present_mi[self.cluster].sum())


def segment_problem(tables: Tables, options: PricingOptions, terms: Terms) -> SegmentProblem:
    """The exact problem of one cluster for given micro-batches and prices."""
    forward, backward, stage = _stages(tables, options, terms)
    hop_forward, hop_backward, hop = _hops(tables, terms)
    ends, fixed = _ends(tables, options, terms)
    if options.schedule == "1f1b":
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
        pace=terms.slope * terms.steps(tables) * (terms.micro_batches - 1.0),
        floor=(float(ends[0].max()), float(ends[1].max())),
        fixed_cost=fixed,
    )


def _stages(tables: Tables, options: PricingOptions, terms: Terms) -> tuple[Array, Array, Array]:
    """Times per micro-batch and costs over (device, first block, block behind)."""
    size, steps = float(terms.micro_batch_size), terms.steps(tables)
    spans = SpanTable(tables, options)
    devices = MemberPrices(tables, options, terms.price_i[None], np.array([terms.cluster]))
    present = slice(1, terms.members(tables))

    def each(values_i: Array) -> Array:
        return values_i[present, None, None]

    ahead, back, weights = spans.forward_lk, spans.backward_lk, spans.weights_lk
    forward, backward = (
        size * flop * each(devices.slowness) + count * each(devices.overhead)
        for flop, count in ((ahead, spans.ahead_lk), (back, spans.back_lk))
    )
    update = OPTIMISER_FLOP_PER_BYTE * weights
    time = steps * (forward + backward + update * each(devices.slowness))
    time = time + weights * each(devices.bulk_seconds)
    overhead = (spans.ahead_lk + spans.back_lk) * each(devices.overhead / devices.slowness)
    flop = size * terms.micro_batches * (ahead + back) + update + terms.micro_batches * overhead
    flop = steps * flop
    worth = flop * each(devices.flop_worth) + weights * each(devices.bulk_worth)
    in_flight = terms.micro_batches if options.schedule == "gpipe" else 1
    need = segment_bytes(tables.blocks, options, size, in_flight)
    allowed = np.tri(len(need), k=-1, dtype=bool).T & (need <= each(devices.room))
    allowed &= flop * each(devices.joule_per_flop) <= each(terms.room_i)
    return forward, backward, np.where(allowed, terms.slope * time + worth, np.inf)


def _hops(tables: Tables, terms: Terms) -> tuple[Array, Array, Array]:
    """Times per micro-batch and costs between any two parties, (N + 1, N + 2, L + 1)."""
    m, n = terms.cluster, terms.members(tables)
    parties = [*range(n), -1]  # the edge is the last receiver
    gain = tables.gain_mij[m, :n, parties].T[:, :, None]
    coded = (SHARES[tables.codec_mij[m]] / tables.share_mij[m])[:n, parties, None]
    bits = 8.0 * float(terms.micro_batch_size) * np.maximum(tables.blocks.cut_bytes_l, 1e-9)
    width = tables.d2d_hz_mij[m, :n, : n + 1, None].copy()
    width[:, n] = terms.edge_hz
    link = (bits * coded, width, tables.snapshot.radio.noise_w_per_hz / gain)
    watt = np.append(tables.members.power_max_mi[m, :n], tables.snapshot.edge.tx_power_w)
    price = np.append(terms.price_i[:n], 0.0)
    sends = terms.steps(tables) * terms.micro_batches
    ahead, ahead_j = _one_way(terms, link, watt[:n, None, None], price[:n, None, None])
    back, back_j = _one_way(terms, link, watt[None, :, None], price[None, :, None])
    cost = terms.slope * terms.steps(tables) * (ahead + back) + sends * (ahead_j + back_j)
    return ahead, back, np.asarray(cost)


def _one_way(
    terms: Terms, link: tuple[Array, Array, Array], watt: Array, price: Array
) -> tuple[Array, Array]:
    """Time and priced energy per micro-batch of one direction."""
    bits, width, noise = link
    fastest = send_time_s(bits, width, watt / noise)
    worth = terms.slope / np.maximum(price * terms.micro_batches, 1e-30)
    wished = thrifty_time_s(bits, width, noise, worth)
    time = np.where(price > 0, np.maximum(wished, fastest), fastest)
    power = np.minimum(power_for_time_w(bits, width, noise, time), watt)
    return time, price * power * time


def _ends(tables: Tables, options: PricingOptions, terms: Terms) -> tuple[Array, float]:
    """Times of control unit and edge, (2, 2), and what every layout costs."""
    model, members, m = tables.snapshot.model, tables.members, terms.cluster
    ends = (model.embedding, model.decoder)
    speed = np.array([members.speed_mi[m, 0], edge_speed(tables, options)])
    overhead = np.array([members.overhead_mi[m, 0], tables.snapshot.edge.overhead_s])
    size, steps = float(terms.micro_batch_size), terms.steps(tables)
    flop = np.array([[end.forward_flop for end in ends], [end.backward_flop for end in ends]])
    update = OPTIMISER_FLOP_PER_BYTE * np.array([float(end.parameter_bytes) for end in ends])
    times = size * flop / speed + np.outer([AHEAD, BACK], overhead)
    whole = model.embedding.parameter_bytes + tables.blocks.parameter_bytes_l[-1]
    server = 16.0 * whole / tables.server_rate_m[m]
    work = size * terms.micro_batches * flop[:, 0].sum() + update[0]
    work += terms.micro_batches * overhead[0] * speed[0]
    joules = steps * members.energy_per_flop_mi[m, 0] * work
    fixed = terms.slope * (server + steps * (times.sum() + (update / speed).sum()))
    return times, float(fixed + terms.price_i[0] * joules)

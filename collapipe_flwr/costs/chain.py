"""Chains: everything about layout rows that does not depend on power, and their prices given it.

``make_chain`` gathers times, payloads and limits once; ``price_rows`` turns hop times into the
round's latency and energy. A chain with hop times is a plan; a chain alone is what the radio
optimises. ``schedule_rows`` adds warm-up depths: with J on every stage, 1F1B *is* GPipe; otherwise
they are as deep as memory allows and no deeper than useful (`warm_up`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from collapipe_flwr.core.replay import StepTimes
from collapipe_flwr.costs.arrays import Array, Ints, Mask
from collapipe_flwr.costs.layouts import Hops, Layouts, gather_hops
from collapipe_flwr.costs.makespan import compute_gpipe_makespan_s, compute_step_makespan_s
from collapipe_flwr.costs.many_steps import ManySteps
from collapipe_flwr.costs.radio import compute_power_w, compute_send_time_s
from collapipe_flwr.costs.tables import Tables
from collapipe_flwr.costs.warm_up import Depths, choose_warm_up, compute_one_f_one_b_s
from collapipe_flwr.costs.work import (
    PricingOptions,
    count_most_in_flight,
    count_steps,
    price_bulk,
    price_computing,
    sum_radio_energy_j,
)

FEW_STEPS = 40  # up to so many, replaying one by one is faster
# With many clusters, the search for depths ends for a step that is
EARLY = 0.97  # over at this share of the round, or
NEAR = 1.003  # this close to its lower bound


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """Rows with everything that is fixed before bandwidth and power are chosen."""

    tables: Tables
    rows: Layouts
    options: PricingOptions
    hops: Hops
    steps_r: Array  # local steps H
    forward_stage_s: Array  # (R, S + 2)
    backward_stage_s: Array
    fixed_s: Array  # (R,) round latency besides the H makespans
    fixed_j: Array  # (R, S + 1) energy besides the pipeline's transmissions
    computing_j: Array  # (R, S + 1) of it without any radio
    edge_j: Array  # (R,) of computing at an edge that is a device, which no layout changes
    d2d_hz_rh: Array  # (R, S + 1) of hops inside the cluster
    noise_over_gain: Array  # (R, S + 1) watts per hertz that give 0 dB
    power_max_w: Array  # (R, S + 1, 2): forward sender, backward sender
    held_rs: Ints  # (R, S + 2) the most micro-batches in flight that memory allows


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPrices:
    """Latency and energy of every row."""

    makespan_s: Array  # (R,) of one step's pipeline
    latency_s: Array  # (R,) of the round
    energy_j: Array  # (R, S + 1): control unit, then slots
    depth_rs: Ints | None = None  # (R, S + 2) micro-batches in flight, where 1F1B was played


def make_chain(tables: Tables, rows: Layouts, options: PricingOptions) -> Chain:
    """Gather the fixed side of every row."""
    hops, steps = gather_hops(tables, rows), count_steps(tables, rows)
    forward_s, backward_s, optimiser_s, joules = price_computing(tables, rows, options)
    bulk_s, bulk_j = price_bulk(tables, rows)
    return Chain(
        tables=tables,
        rows=rows,
        options=options,
        hops=hops,
        steps_r=steps,
        forward_stage_s=forward_s,
        backward_stage_s=backward_s,
        fixed_s=bulk_s + steps * optimiser_s,
        fixed_j=joules[:, :-1] + bulk_j,
        computing_j=joules[:, :-1],
        edge_j=joules[:, -1],
        d2d_hz_rh=tables.d2d_hz_mij[rows.cluster_r[:, None], hops.sender, hops.receiver],
        noise_over_gain=tables.snapshot.radio.noise_w_per_hz / hops.gain,
        power_max_w=_gather_power_limits(tables, rows, hops),
        held_rs=count_most_in_flight(tables, rows, options),
    )


def _gather_power_limits(tables: Tables, rows: Layouts, hops: Hops) -> Array:
    limits = tables.members.power_max_mi
    cluster = rows.cluster_r[:, None]
    forward = limits[cluster, hops.sender]
    member = np.where(hops.to_edge, 0, hops.receiver)
    edge = tables.edges.power_m[cluster]
    backward = np.where(hops.to_edge, edge, limits[cluster, member])
    return np.stack([forward, backward], axis=2)


def find_hop_bandwidth_hz(chain: Chain, edge_hz_r: Array) -> Array:
    """Return the bandwidth of every hop, (R, S + 1), given each row's share towards the edge."""
    return np.where(chain.hops.shared, edge_hz_r[:, None], chain.d2d_hz_rh)


def compute_full_power_times(chain: Chain, edge_hz_r: Array) -> Array:
    """Return hop times at full power, (R, S + 1, 2): forward, backward; 0 on unused hops."""
    width = find_hop_bandwidth_hz(chain, edge_hz_r)[:, :, None]
    snr = chain.power_max_w / chain.noise_over_gain[:, :, None]
    times = compute_send_time_s(chain.hops.bits[:, :, None], width, snr)
    return np.where(chain.hops.used[:, :, None], times, 0.0)


def solve_powers(chain: Chain, edge_hz_r: Array, times: Array) -> Array:
    """Return transmit powers that achieve ``times``, (R, S + 1, 2); 0 on unused hops."""
    width = find_hop_bandwidth_hz(chain, edge_hz_r)[:, :, None]
    safe = np.where(chain.hops.used[:, :, None], times, 1.0)
    power = compute_power_w(
        chain.hops.bits[:, :, None], width, chain.noise_over_gain[:, :, None], safe
    )
    return np.where(chain.hops.used[:, :, None], np.minimum(power, chain.power_max_w), 0.0)


def drop_silent(returns: Mask, times: Array) -> Array:
    """Return hop times, (..., S + 1, 2), with 0 for gradients that do not come back.

    What allots bandwidth and power takes both directions for equal, and so gives those links more.
    """
    ways = np.stack([np.ones_like(returns), returns], axis=-1)
    return times if returns.all() else np.where(ways, times, 0.0)


def price_rows(chain: Chain, times: Array, powers: Array) -> RowPrices:
    """Compute latency and energy of every row with the given hop times and powers.

    ``times`` and ``powers`` may have a leading axis of alternatives.
    """
    count = chain.rows.micro_batches_r.astype(np.float64)
    makespan = compute_makespan_s(chain, times)
    hop_j = powers * drop_silent(chain.hops.returns, times)
    radiated = sum_radio_energy_j(chain.steps_r * count, hop_j[..., 0], hop_j[..., 1])
    if chain.tables.edges.home_m.any():  # those control units send gradients as well
        own_j = np.where(chain.hops.to_edge & ~chain.hops.shared, hop_j[..., 1], 0.0)
        radiated[..., 0] += chain.steps_r * count * own_j.sum(-1)
    return RowPrices(
        makespan_s=makespan,
        latency_s=chain.fixed_s + chain.steps_r * makespan,
        energy_j=chain.fixed_j + radiated,
    )


def replay_rows(
    chain: Chain, times: Array, bounded: RowPrices, rows: Ints | None = None
) -> RowPrices:
    """Replace 1F1B's bounds of `price_rows` by the makespans of a replay, for ``rows`` or for all.

    With many clusters, the search for depths ends once a step is near its bound, or well within
    the least duration of the round.
    """
    if chain.options.schedule == "gpipe":
        return bounded
    every = np.arange(len(chain.rows)) if rows is None else rows
    makespan_s = bounded.makespan_s.copy()
    least_s = makespan_s[every]
    if rows is None and not chain.tables.few:
        soon_s = EARLY * float(bounded.latency_s.max())
        least_s = np.maximum(NEAR * least_s, _find_step_within(chain, soon_s))
    depth_rs, makespan_s[every] = choose_depths(chain, times, every, least_s)
    latency_s = chain.fixed_s + chain.steps_r * makespan_s
    known = depth_rs if rows is None else None
    return replace(bounded, makespan_s=makespan_s, latency_s=latency_s, depth_rs=known)


def _find_step_within(chain: Chain, latency_s: float) -> Array:
    """Return the seconds of a step with which every row's round takes ``latency_s``, (R,)."""
    return np.asarray((latency_s - chain.fixed_s) / chain.steps_r)


def compute_makespan_s(chain: Chain, times: Array) -> Array:
    """Return the makespan of every row with these hop times: GPipe's exact, 1F1B's lower bound.

    ``times`` may have a leading axis of alternatives.
    """
    times = drop_silent(chain.hops.returns, times)
    shape = (*times.shape[:-2], chain.forward_stage_s.shape[1])
    both = (chain.forward_stage_s, chain.backward_stage_s)
    stage_s = [np.broadcast_to(seconds, shape) for seconds in both]
    hop_s = (times[..., 0], times[..., 1])
    count = chain.rows.micro_batches_r.astype(np.float64)
    # Few clusters replay all their candidates, and need no closer bound.
    held = None if chain.tables.few else np.broadcast_to(1.0 * chain.held_rs, shape)
    return compute_step_makespan_s(chain.options, stage_s, hop_s, count, held=held)


def compute_latency_s(chain: Chain, times: Array) -> Array:
    """Return the seconds of every row's round, with the makespans of `compute_makespan_s`."""
    return np.asarray(chain.fixed_s + chain.steps_r * compute_makespan_s(chain, times))


def make_step_times(chain: Chain, times: Array, row: int) -> StepTimes:
    """Return one row's stage and hop times, without the padding."""
    stages = [*range(chain.rows.count_segments(row) + 1), -1]
    ahead, back = chain.forward_stage_s[row, stages], chain.backward_stage_s[row, stages]
    last = len(stages) - 1
    hops = drop_silent(chain.hops.returns[row, :last], times[row, :last])
    return StepTimes(
        stage_s=(tuple(ahead.tolist()), tuple(back.tolist())),
        hop_s=(tuple(hops[:, 0].tolist()), tuple(hops[:, 1].tolist())),
    )


def _list_stages(chain: Chain, rows: Ints) -> list[int]:
    """Return the columns, of S + 2, of the control unit, the used slots and the edge."""
    return [*range(int(chain.rows.depth_r[rows].max()) + 1), -1]


def _make_many_steps(chain: Chain, times: Array, rows: Ints, stages: list[int]) -> ManySteps:
    """Return `make_step_times` of many rows as arrays."""
    hops, last = np.zeros((len(stages), len(rows), 2)), len(stages) - 1
    hops[:-1] = drop_silent(chain.hops.returns[rows, :last], times[rows, :last]).swapaxes(0, 1)
    used_kr = np.arange(len(stages))[:, None] <= chain.rows.depth_r[rows]
    used_kr[-1] = True
    return ManySteps(
        ahead_kr=np.ascontiguousarray(chain.forward_stage_s[rows][:, stages].T),
        back_kr=np.ascontiguousarray(chain.backward_stage_s[rows][:, stages].T),
        there_kr=np.ascontiguousarray(hops[:, :, 0]),
        home_kr=np.ascontiguousarray(hops[:, :, 1]),
        used_kr=used_kr,
        micro_batches_r=chain.rows.micro_batches_r[rows],
    )


def _select_stages(chain: Chain, row: int, depth_s: Ints) -> Depths:
    """Return one row's depths of control unit, devices and edge, without the padding."""
    depths: list[int] = depth_s.tolist()
    return (*depths[: chain.rows.count_segments(row) + 1], depths[-1])


def choose_depths(
    chain: Chain, times: Array, which: Ints, least_r: Array | None = None
) -> tuple[Ints, Array]:
    """Choose depths under 1F1B, (R, S + 2); return them and the seconds of a step, (R,).

    The search ends at ``least_r``, lower bounds of these seconds. Depths of unused slots mean
    nothing.
    """
    least_r = np.full(len(which), -np.inf) if least_r is None else least_r
    limits, counts = chain.held_rs[which], chain.rows.micro_batches_r[which]
    depth_rs, seconds_r = np.ones_like(limits), np.empty(len(which))
    if len(which) < FEW_STEPS:
        for place, row in enumerate(which.tolist()):
            step, least_s = make_step_times(chain, times, row), float(least_r[place])
            limit = _select_stages(chain, row, limits[place])
            depths, seconds_r[place] = choose_warm_up(step, limit, int(counts[place]), least_s)
            depth_rs[place, : len(depths) - 1] = depths[:-1]
    else:
        stages = _list_stages(chain, which)
        limit_kr = np.ascontiguousarray(limits[:, stages].T)
        many = _make_many_steps(chain, times, which, stages)
        depth_kr, seconds_r = many.choose_warm_up(limit_kr, least_r)
        depth_rs[:, stages] = depth_kr.T
    return depth_rs, seconds_r


def schedule_rows(
    chain: Chain, times: Array, known: RowPrices | None = None
) -> tuple[list[Depths], Array]:
    """Return depths per stage and the makespan of every row.

    Depths are J everywhere under GPipe, and chosen by replay under 1F1B. Depths of many rows that
    are ``known`` are kept.
    """
    rows = chain.rows
    if chain.options.schedule == "gpipe":
        counts = zip(rows.micro_batches_r.tolist(), rows.depth_r.tolist(), strict=True)
        return [(count,) * (depth + 2) for count, depth in counts], compute_makespan_s(chain, times)
    if known is None or known.depth_rs is None or len(rows) < FEW_STEPS:
        depth_rs, makespan_s = choose_depths(chain, times, np.arange(len(rows)))
    else:
        depth_rs, makespan_s = known.depth_rs, known.makespan_s
    return [_select_stages(chain, row, each) for row, each in enumerate(depth_rs)], makespan_s


def tabulate_depths(chain: Chain, depths: Sequence[Depths]) -> Array:
    """Tabulate depths: control unit, slots, edge; 0 on unused slots, (R, S + 2)."""
    table = np.zeros((len(depths), chain.rows.member_rs.shape[1] + 2))
    for row, each in enumerate(depths):
        table[row, : len(each) - 1] = each[:-1]
        table[row, -1] = each[-1]
    return table


def compute_planned_makespan_s(chain: Chain, times: Array, depths: Sequence[Depths]) -> Array:
    """Return makespans of given depths: by the closed form where all are J, else by replay."""
    result = np.zeros(len(depths))
    for row, each in enumerate(depths):
        count, step = int(chain.rows.micro_batches_r[row]), make_step_times(chain, times, row)
        if min(each) >= count:
            result[row] = compute_gpipe_makespan_s(step.stage_s, step.hop_s, count)
        else:
            result[row] = compute_one_f_one_b_s(step, each, count)
    return result

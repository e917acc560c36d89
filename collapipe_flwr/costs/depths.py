"""Warm-up depths of 1F1B: as deep as memory allows, and no deeper than useful.

Depth J on every stage *is* GPipe. Shallower warm-up keeps fewer activations but may expose slow
links and slow stages, so depth is a decision (`warm_up`), within what memory allows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from collapipe_flwr.core.schedule import StepTimes, replay
from collapipe_flwr.costs.chain import Chain, makespan_of
from collapipe_flwr.costs.compute import PricingOptions
from collapipe_flwr.costs.latency import PassTimes, gpipe_makespan_s
from collapipe_flwr.costs.memory import capacity_bytes, peak_bytes
from collapipe_flwr.costs.tables import Tables
from collapipe_flwr.costs.warm_up import WarmUp, choose_warm_up

Array = NDArray[np.float64]


def step_times(chain: Chain, times: Array, row: int, *, half_duplex: bool) -> StepTimes:
    """One row's stage and hop times, without the padding."""
    depth = chain.rows.depth_of(row)
    columns = [*range(depth + 1), chain.forward_stage_s.shape[1] - 1]

    def pick(table: Array, index: list[int]) -> tuple[float, ...]:
        return tuple(float(table[row, k]) for k in index)

    hops = list(range(depth + 1))
    return StepTimes(
        stage_s=(pick(chain.forward_stage_s, columns), pick(chain.backward_stage_s, columns)),
        hop_s=(pick(times[:, :, 0], hops), pick(times[:, :, 1], hops)),
        half_duplex=half_duplex,
    )


def deepest(tables: Tables, chain: Chain, options: PricingOptions, row: int) -> list[int]:
    """The most micro-batches in flight that memory allows on each stage, at most J.

    No stage may be deeper than the one before it: it would wait for forwards that the shallower
    one holds back until a backward returns, and both would wait for ever.
    """
    one = chain.rows.take(np.array([row]))
    shape = (1, chain.rows.member_rs.shape[1] + 2)
    empty = peak_bytes(tables, one, options, np.zeros(shape))[0]
    each = peak_bytes(tables, one, options, np.ones(shape))[0] - empty
    room = capacity_bytes(tables, one, options)[0] - empty
    most = int(chain.rows.micro_batches_r[row])
    depth = chain.rows.depth_of(row)
    columns = [*range(depth + 1), shape[1] - 1]
    own = [
        most if each[k] <= 0 else max(min(most, math.floor(room[k] / each[k])), 1) for k in columns
    ]
    return list(accumulate(own, min))


def choose_depths(
    tables: Tables, chain: Chain, options: PricingOptions, times: Array, row: int
) -> WarmUp:
    """Depths of control unit, segments and edge."""
    step = step_times(chain, times, row, half_duplex=options.half_duplex)
    count = int(chain.rows.micro_batches_r[row])
    return choose_warm_up(step, deepest(tables, chain, options, row), count)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheduled:
    """Depths and makespans of one row per cluster."""

    depths: tuple[tuple[int, ...], ...]  # per stage: control unit, segments, edge
    flight_rs: Array  # the same in columns, (R, S + 2)
    makespan_s: Array


def schedule_rows(tables: Tables, chain: Chain, options: PricingOptions, times: Array) -> Scheduled:
    """The warm-up of every row: J everywhere under GPipe, chosen by replay under 1F1B."""
    rows = chain.rows
    if options.schedule == "gpipe":
        depths = [
            (int(j),) * (int(k) + 2)
            for j, k in zip(rows.micro_batches_r, rows.depth_r, strict=True)
        ]
        makespan = makespan_of(chain, times)
    else:
        chosen = [choose_depths(tables, chain, options, times, r) for r in range(len(rows))]
        depths = [d for d, _ in chosen]
        makespan = np.array([m for _, m in chosen])
    return Scheduled(
        depths=tuple(depths), flight_rs=flight_table(chain, depths), makespan_s=makespan
    )


def flight_table(chain: Chain, depths: Sequence[Sequence[int]]) -> Array:
    """Depths in columns: control unit, slots, edge; 0 on unused slots."""
    table = np.zeros((len(depths), chain.rows.member_rs.shape[1] + 2))
    for row, each in enumerate(depths):
        table[row, : len(each) - 1] = each[:-1]
        table[row, -1] = each[-1]
    return table


def planned_makespan_s(chain: Chain, times: Array, depths: Sequence[Sequence[int]]) -> Array:
    """Makespans of given depths: the closed form where all are J, the simulator elsewhere."""
    half_duplex = chain.options.half_duplex
    result = np.zeros(len(depths))
    for row, each in enumerate(depths):
        count = int(chain.rows.micro_batches_r[row])
        step = step_times(chain, times, row, half_duplex=half_duplex)
        if min(each) < count:
            result[row] = replay(step, each, count).makespan_s
        else:
            result[row] = _gpipe(step, count)
    return result


def _gpipe(step: StepTimes, count: int) -> float:
    passes = [
        PassTimes(stage_s=np.array(step.stage_s[d]), hop_s=np.array(step.hop_s[d])) for d in (0, 1)
    ]
    return float(gpipe_makespan_s(passes[0], passes[1], np.array(float(count))))

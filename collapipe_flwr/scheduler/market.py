"""The market: what a second, a joule and a share of bandwidth cost each cluster right now.

Given the prices of the others' decisions, every cluster may be planned alone. ``score`` is that
cluster-wise objective; radio times inside it are those that the prices themselves would choose.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from collapipe_flwr.costs.chain import (
    Chain,
    RowPrices,
    chain_of,
    full_power_times,
    hop_bandwidth_hz,
    powers_for,
    price_rows,
)
from collapipe_flwr.costs.compute import Options
from collapipe_flwr.costs.layouts import Layouts
from collapipe_flwr.costs.memory import fits
from collapipe_flwr.costs.radio import thrifty_time_s
from collapipe_flwr.costs.tables import Tables

Array = NDArray[np.float64]
Ints = NDArray[np.int64]

LEAST_SLOPE = 0.02  # of the latency price: even idle clusters do not waste time without limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Market:
    """Prices and the bandwidth split that a plan implies, one entry per cluster."""

    latency_price: float  # objective per second of the round, at rho = 1
    price_mi: Array  # objective per joule of each member
    ceiling_m: Array  # the round's latency as far as the other clusters cause it
    slack_price_m: Array  # objective per second that a cluster stays below the ceiling
    edge_hz_m: Array


def row_prices(price_mi: Array, rows: Layouts) -> Array:
    """Prices per joule of the control unit and of every slot, (R, S + 1)."""
    cluster = rows.cluster_r[:, None]
    slots = np.where(rows.used_rs, price_mi[cluster, np.maximum(rows.member_rs, 0)], 0.0)
    return np.concatenate([price_mi[rows.cluster_r, 0][:, None], slots], axis=1)


def market_times(chain: Chain, price_rs: Array, slope_r: Array, edge_hz_r: Array) -> Array:
    """Hop times that a price per second would choose, never beyond the compute bottleneck."""
    fastest = full_power_times(chain, edge_hz_r)
    backward = np.concatenate([price_rs[:, 1:], np.zeros((len(chain.rows), 1))], axis=1)
    backward = np.where(chain.hops.to_edge, 0.0, backward)
    price = np.stack([price_rs, backward], axis=2)
    count = chain.rows.micro_batches_r[:, None, None]
    per_send = slope_r[:, None, None] / np.maximum(price * count, 1e-30)
    width = hop_bandwidth_hz(chain, edge_hz_r)[:, :, None]
    bits = np.maximum(chain.hops.bits, 1.0)[:, :, None]
    wished = thrifty_time_s(bits, width, chain.noise_over_gain[:, :, None], per_send)
    slowest = _slowest(chain, fastest)[:, None, :]
    slowest = np.where(count > 1, slowest, np.inf)
    return np.where(price > 0, np.clip(wished, fastest, np.maximum(slowest, fastest)), fastest)


def _slowest(chain: Chain, fastest: Array) -> Array:
    """The unavoidable bottleneck of each pass, (R, 2): no hop need be faster than that."""
    stages = np.stack([chain.forward_stage_s.max(1), chain.backward_stage_s.max(1)], axis=1)
    if chain.options.schedule == "gpipe":
        return np.asarray(np.maximum(stages, fastest.max(1)))
    both = (chain.forward_stage_s + chain.backward_stage_s).max(1)
    period = np.maximum(both, fastest.max((1, 2)))
    return np.stack([period, period], axis=1)


def score(
    tables: Tables, rows: Layouts, options: Options, market: Market, rho_r: Array
) -> tuple[Array, Chain]:
    """The cluster-wise objective of every row, infinite where it does not fit."""
    chain = chain_of(tables, rows, options)
    cluster = rows.cluster_r
    edge_hz, price = market.edge_hz_m[cluster], row_prices(market.price_mi, rows)
    slope = market.latency_price * np.where(np.isfinite(rho_r), rho_r, 1.0)
    slack = market.slack_price_m[cluster]
    times = market_times(chain, price, np.maximum(slack, LEAST_SLOPE * slope), edge_hz)
    priced = price_rows(chain, times, powers_for(chain, edge_hz, times))
    value = objective_rows(market, cluster, priced, rho_r) + (price * priced.energy_j).sum(1)
    keep = fits(tables, rows, options) & np.isfinite(rho_r)
    return np.where(keep, value, np.inf), chain


def objective_rows(market: Market, cluster_r: Ints, priced: RowPrices, rho_r: Array) -> Array:
    """The latency part: the round's length at full price, earliness at the slack price."""
    ceiling = market.ceiling_m[cluster_r]
    round_s = np.maximum(priced.latency_s, ceiling)
    early = ceiling - np.minimum(priced.latency_s, ceiling)
    finite = np.where(np.isfinite(rho_r), rho_r, 1.0)
    return np.asarray(
        market.latency_price * finite * round_s - market.slack_price_m[cluster_r] * early
    )


def segment_choice(values: Array, cluster_r: Ints, clusters: int) -> tuple[Ints, Array]:
    """Index of the best row of every cluster and its value; ties go to the first."""
    order = np.lexsort((np.arange(len(values)), values, cluster_r))
    starts = np.searchsorted(cluster_r[order], np.arange(clusters))
    best = np.asarray(order[starts], dtype=np.int64)
    return best, values[best]

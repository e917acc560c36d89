"""Dual prices: what a second, a joule, a hertz and a bit on each link cost every cluster.

Given the prices of the others' decisions, every cluster may be planned alone; ``scorer`` computes
that cluster-wise objective.

The best time per bit of a transmission depends only on its two parties and on how often a second
of it counts, not on the payload. Each link has two operating points: ``quick`` as if it were its
pass's bottleneck (a second counts J times) and ``calm`` as if it were not (once).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from collapipe_flwr.costs.arrays import Array, Ints
from collapipe_flwr.costs.radio import LN2, SHARES, exponent_near
from collapipe_flwr.costs.tables import Tables

LEAST_SLOPE = 0.02  # of the latency price: even idle clusters do not waste time without limit
NO_PRICE = 1e-30
SURCHARGE = 10.0  # latencies of its plan that overdrawing an account costs at least
SAME = 1e-9  # relative


@dataclass(frozen=True, slots=True, kw_only=True)
class DualPrices:
    """Prices and the bandwidth split that a plan implies, one entry per cluster."""

    latency_price: float  # objective per second of the round, at rho = 1
    price_mi: Array  # objective per joule of each member
    room_mi: Array  # joules that computing may take in this round, infinite without a limit
    ceiling_m: Array  # the round's latency as far as the other clusters cause it
    slack_price_m: Array  # objective per second that a cluster stays below the ceiling
    edge_hz_m: Array


def overdrawn(joule: Array, room: Array, budget: Array) -> Array:
    """What spending more than ``room`` costs besides its price, in latencies of the plan.

    More than there is to gain, so that a plan overdraws only where every plan does, and more the
    further, so that searches find their way back.
    """
    over = np.maximum(joule - room, 0.0)
    return np.where(over > SAME * joule, SURCHARGE * (1.0 + over / budget), 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Per bit, flat over (cluster, sender, receiver) and, where it depends on it, J."""

    seconds: Array
    worth: Array  # objective


Points = tuple[Point, Point]
"""Forward and backward."""


def link_table(tables: Tables, prices: DualPrices, counts: Ints) -> tuple[Points, Points]:
    """Quick and calm points of every link, calm ones for every J."""
    width = tables.d2d_hz_mij.copy()
    width[:, :, -1] = prices.edge_hz_m[:, None]
    slope = np.maximum(prices.slack_price_m, LEAST_SLOPE * prices.latency_price)
    noise_w = width * (tables.snapshot.radio.noise_w_per_hz / tables.gain_mij)  # it gives 0 dB
    coded = SHARES[tables.codec_mij] / tables.share_mij  # bits for a bit, over the link's share
    watt, price = tables.members.power_max_mi, prices.price_mi

    def way(watt: Array, price: Array) -> tuple[Point, Point]:
        """Quick and, for every J, calm points, by senders' limits and prices per joule."""
        log_ratio = np.log(slope[:, None, None] / (np.maximum(price, NO_PRICE) * noise_w))
        full = np.log1p(watt / noise_w)

        def at(log_ratio: Array) -> Point:
            """Where a second is worth so many joules; at most at full power, and at it if free."""
            exponent = np.minimum(exponent_near(log_ratio), full)
            seconds = LN2 * coded / (width * exponent)
            worth = price * noise_w * np.expm1(exponent) * seconds
            return Point(seconds=seconds.ravel(), worth=worth.ravel())

        quick = at(log_ratio)
        calm = [quick if j == 1 else at(log_ratio - np.log(j)) for j in counts]
        return quick, Point(
            seconds=np.concatenate([p.seconds for p in calm]),
            worth=np.concatenate([p.worth for p in calm]),
        )

    last = ((0, 0), (0, 1))  # the edge, whose energy costs nothing
    back_w = np.pad(watt, last, constant_values=tables.snapshot.edge.tx_power_w)
    ahead = way(watt[:, :, None], price[:, :, None])
    back = way(back_w[:, None, :], np.pad(price, last)[:, None, :])
    return (ahead[0], back[0]), (ahead[1], back[1])

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
from collapipe_flwr.costs.radio import LN2, SHARES, interpolate_exponent
from collapipe_flwr.costs.tables import Tables

LEAST_SLOPE = 0.02  # of the latency price: even idle clusters do not waste time without limit
NO_PRICE = 1e-30
SURCHARGE = 10.0  # latencies of its plan that overdrawing an account costs at least
SAME = 1e-9  # relative


@dataclass(frozen=True, slots=True)
class DualPrices:
    """Prices and the bandwidth split that a plan implies, one entry per cluster."""

    ceiling_m: Array  # the round's latency as far as the other clusters cause it
    slack_price_m: Array  # objective per second that a cluster stays below the ceiling
    edge_hz_m: Array


def overdrawn(joule: Array, room: Array, budget: Array) -> Array:
    """Return the surcharge, besides the price, on spending more than ``room``, in plan latencies.

    More than there is to gain, so that a plan overdraws only where every plan does, and more the
    further, so that searches find their way back.
    """
    over = np.maximum(joule - room, 0.0)
    return np.where(over > SAME * joule, SURCHARGE * (1.0 + over / budget), 0.0)


@dataclass(frozen=True, slots=True)
class Points:
    """Per bit of one direction, flat over (J where it depends on it, cluster, sender, receiver)."""

    seconds: Array
    worth: Array  # objective


class LinkTable:
    """What a bit costs on every link forward and backward; of ``calm`` points as far as asked."""

    def __init__(
        self, tables: Tables, price_mi: Array, slope_m: Array, edge_hz_m: Array, counts: Ints
    ) -> None:
        self.counts, self._known = counts, np.zeros(len(counts), bool)
        width = tables.d2d_hz_mij.copy()
        width[:, :, -1] = np.where(tables.edges.home_m, width[:, :, -1].T, edge_hz_m).T
        noise_w = width * (tables.snapshot.radio.noise_w_per_hz / tables.gain_mij)  # it gives 0 dB
        coded = SHARES[tables.codec_mij] / tables.share_mij  # bits for a bit, over the link's share
        watt = tables.members.power_max_mi
        last = ((0, 0), (0, 1))  # the edge, whose energy costs nothing
        back_w = np.concatenate([watt, tables.edges.power_m[:, None]], axis=1)
        ahead = watt[:, :, None], price_mi[:, :, None]
        back = back_w[:, None, :], np.pad(price_mi, last)[:, None, :]
        nat_s = LN2 * coded / width
        self._ways = [
            _LinkDirection(noise_w, nat_s, slope_m, *senders) for senders in (ahead, back)
        ]
        self.quick = [way.points(1) for way in self._ways]
        room = (len(counts), noise_w.size)
        self._bound_seconds, self._worth = np.empty((2, *room)), np.empty((2, *room))

    def calm(self, which_r: Ints) -> list[Points]:
        """As if no link were a bottleneck, of rows with these numbers of micro-batches."""
        for place in np.flatnonzero(~self._known):
            if (which_r == place).any():
                count = int(self.counts[place])
                for k, way in enumerate(self._ways):
                    found = self.quick[k] if count == 1 else way.points(count)
                    self._bound_seconds[k, place], self._worth[k, place] = (
                        found.seconds,
                        found.worth,
                    )
                self._known[place] = True
        seconds, worth = self._bound_seconds.reshape(2, -1), self._worth.reshape(2, -1)
        return [Points(seconds[k], worth[k]) for k in (0, 1)]


class _LinkDirection:
    """One direction of all links: seconds of a bit at one nat per hertz, and who sends.

    ``watt`` and ``price`` are senders' limits and prices per joule.
    """

    def __init__(
        self, noise_w: Array, nat_s: Array, slope_m: Array, watt: Array, price: Array
    ) -> None:
        self._noise_w, self._nat_s, self._price = noise_w, nat_s, price
        least = np.maximum(price, NO_PRICE)
        self._log_ratio = np.log(slope_m[:, None, None] / (least * noise_w))
        self._full = np.log1p(watt / noise_w)

    def points(self, count: int) -> Points:
        """Where a second that counts once in ``count`` is worth so many joules.

        At most at full power, and at it if energy is free.
        """
        log_ratio = self._log_ratio - np.log(count)
        exponent = np.minimum(interpolate_exponent(log_ratio), self._full)
        seconds = self._nat_s / exponent
        worth = self._price * self._noise_w * np.expm1(exponent) * seconds
        return Points(seconds=seconds.ravel(), worth=worth.ravel())

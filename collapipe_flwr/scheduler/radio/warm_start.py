"""A first point for the interior point: a few rounds of price adjustment over time and bandwidth.

Every cluster has a price of its own second, never above the round's; at that price and its present
bandwidth the best time of every hop is known in closed form (docs/theory.md, "One hop alone"). A
cluster faster than the round lowers its price, bandwidth moves to where a hertz is worth more.
Nothing here need be exact: the interior point starts from it and proves what it reaches.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from collapipe_flwr.costs.arrays import Array
from collapipe_flwr.costs.radio import look_up_log_exponent
from collapipe_flwr.scheduler.radio.problem import Point, RadioTerms

ROUNDS = 5
ELASTICITY = 0.5  # fall of ln(time) per ln(price) while noise, not bandwidth, limits a hop
BANDWIDTH_ELASTICITY = 1.5  # fall of ln(worth of a hertz) per ln(bandwidth)
FIRM = 0.05  # least elasticity of a cluster's latency that a step relies on
LARGEST_STEP = 3.0  # largest change of a ln(price)
SHRINK, GROW = -1.5, 3.0  # bounds on the change of a ln(bandwidth)
AHEAD = 1e-3  # ln(round) starts this far above the slowest cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """Every cluster's response to its price and bandwidth."""

    x: Array
    cap: Array
    latency_s: Array
    elastic: Array  # share of the latency that a higher price would shorten
    edge: Array  # share of the latency that hops over the shared bandwidth pace
    demand: Array  # ln(what a relative change of its bandwidth is worth)


def find_start(terms: RadioTerms) -> tuple[Point, Array]:
    """Return a point within all bounds, and each cluster's price of a second, (R,).

    Prices and bandwidth are adjusted from equal bandwidth and the full price for everyone.
    """
    adjustment, rows = _PriceAdjustment(terms), terms.hops.rows
    price, omega = adjustment.dearest, np.full(rows, adjustment.log_band - np.log(rows))
    response = adjustment.respond(price, omega)
    for _ in range(ROUNDS):
        price, omega = adjustment.adjust(price, omega, response)
        response = adjustment.respond(price, omega)
    tau = float(np.log(response.latency_s.max())) + AHEAD
    point = Point(x=response.x, omega=omega, cap=response.cap, tau=tau)
    return point, np.exp(price) / terms.problem.weight_r


class _PriceAdjustment:
    """One problem's constants in logarithms."""

    def __init__(self, terms: RadioTerms) -> None:
        self.p, self.hops = terms.problem, terms.hops
        self.cap_weight, self.log_stage = terms.cap_weight, terms.log_stage
        self.dearest = np.log(self.p.latency_price * self.p.weight_r)
        self.log_band = float(np.log(self.p.bandwidth_hz))
        self.log_worth = np.log(np.maximum(self.hops.worth_h, 1e-200))
        self.repeats = np.log1p(self.cap_weight[:, 0] / self.p.weight_r)[self.hops.row_h]

    def respond(self, price: Array, omega: Array) -> Response:
        """Find the best times at ln(price of a second of hops) and ln(bandwidth), both (R,)."""
        p, hops = self.p, self.hops
        edge = hops.edge_r2
        bits, low = hops.log_bits_h.copy(), hops.low_h.copy()
        bits[edge] -= omega[:, None]
        low[edge] = hops.compute_edge_low(omega)[0]
        ratio = price[hops.row_h] + bits - self.log_worth
        slowest = np.maximum(bits - look_up_log_exponent(ratio + self.repeats), low)
        cap = np.maximum(np.maximum.reduceat(slowest, hops.starts_c), self.log_stage.ravel())
        bound = cap[hops.cap_h]
        x = np.minimum(np.maximum(bits - look_up_log_exponent(ratio), low), bound)
        cap = cap.reshape(self.cap_weight.shape)
        slow, hop = self.cap_weight * np.exp(cap), hops.weight_h * np.exp(x)
        pace = hop + (slowest >= bound) * slow.ravel()[hops.cap_h]
        sums = hops.sum_lines_by_cap(np.stack([hop, pace * (slowest > low)]))
        latency = p.fixed_s_r + hops.sum_by_row(sums[0] + slow)
        at_edge = hops.sum_by_row(pace[edge])
        return Response(
            x=x,
            cap=cap,
            latency_s=latency,
            elastic=hops.sum_by_row(sums[1]) / latency,
            edge=at_edge / latency,
            demand=price + np.log(at_edge / p.weight_r),
        )

    def adjust(self, price: Array, omega: Array, response: Response) -> tuple[Array, Array]:
        """Step, like Newton, towards equal latencies and equal worth of a hertz, both at once."""
        leads = price >= self.dearest - 1e-9
        if not leads.any():
            leads = price - self.dearest >= (price - self.dearest).max()
        late = np.log(response.latency_s / response.latency_s[leads].max())
        yields = ELASTICITY * response.elastic + FIRM
        leads &= late >= -1e-9
        firm = BANDWIDTH_ELASTICITY + np.where(leads, 0.0, 0.5 * response.edge / yields)
        wanted = response.demand - omega + np.where(leads, 0.0, 0.5 * late / yields)
        change = self._share_bandwidth(omega, wanted, firm)
        step = np.clip((late - response.edge * change) / yields, -LARGEST_STEP, LARGEST_STEP)
        omega = omega + change
        omega += self.log_band - np.log(np.exp(omega).sum())
        return np.minimum(price + step, self.dearest), omega

    def _share_bandwidth(self, omega: Array, wanted: Array, firm: Array) -> Array:
        """Find changes (wanted - ln price of a hertz) / firm, bounded, that use all bandwidth."""
        price, change = float((wanted + omega).max()) - self.log_band, omega
        for _ in range(6):
            raw = (wanted - price) / firm
            change = np.minimum(np.maximum(raw, SHRINK), GROW)
            width = np.exp(omega + change)
            total, moving = float(width.sum()), float((width * (raw == change) / firm).sum())
            price += (np.log(total) - self.log_band) * total / max(moving, 1e-3 * total)
        return change

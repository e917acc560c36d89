"""The linear algebra of the interior point: the coupled Newton system, solved by elimination.

Unknowns are steps of every hop's x, of every row's omega and caps (phi, beta), and of tau. Hops
meet only through omega and the caps of their row, caps only through omega: eliminating in that
order leaves one number per row. The row's latency then adds a rank-one term (Sherman and
Morrison), and rows meet in tau and the bandwidth sum, a 2 x 2 system. Work is linear in hops.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from collapipe_flwr.core.errors import ScheduleError
from collapipe_flwr.costs.arrays import Array, Places
from collapipe_flwr.scheduler.radio.problem import FlatHops, Point


@dataclass(frozen=True, slots=True, kw_only=True)
class Curvature:
    """Second derivatives of the Lagrangian with the constraints' own curvature k = dual / slack.

    ``bend`` is the energy's in y = x + omega, ``own`` the latency's diagonal, ``slope`` and
    ``low_bend`` the derivatives of the full-power bound by omega, ``omega`` and ``cap`` what stands
    on these diagonals apart from hops; ``share`` is the gradient of ln(latency).
    """

    bend: Array  # (hops,)
    own: Array
    k_power: Array
    k_cap: Array
    share_x: Array
    slope: Array  # (R, 2)
    low_bend: Array  # (R, 2), times its dual
    omega: Array  # (R,)
    cap: Array  # (R, sides)
    share_cap: Array
    late: Array  # (R,) dual of the latency
    k_late: Array
    width: Array  # (R,) gradient of the bandwidth sum
    k_band: float
    tau: float


class NewtonSystem:
    """One factorisation; ``solve`` takes any number of right sides."""

    def __init__(self, hops: FlatHops, curves: Curvature) -> None:
        self.hops, self.c = hops, curves
        edge, rest = hops.edge_r2, curves.bend + curves.k_power + curves.own
        self.pivot = rest + curves.k_cap
        self.pull = curves.k_cap / self.pivot  # of a cap on its hops
        across, self.omega = self._edges(edge)
        self.drag = across / self.pivot[edge]  # of omega on the row's two edge hops
        self.across = across
        self.by_share = curves.share_x / self.pivot
        lines = np.empty((3, len(rest)))
        np.multiply(self.pull, rest, out=lines[0])
        np.multiply(self.pull, curves.share_x, out=lines[1])
        np.multiply(self.by_share, curves.share_x, out=lines[2])
        sums = hops.lines_by_cap(lines)
        self.cap = curves.cap + sums[0]
        self.mixed = self._on_caps(curves.k_cap[edge] * self.drag)
        self.lean = self.mixed / self.cap
        self.omega = self.omega - hops.by_row(self.mixed * self.lean)
        self.share_cap = curves.share_cap + sums[1]
        self.share_omega = -hops.by_row(across * self.by_share[edge])
        self._couple(hops.by_row(sums[2]))

    def _edges(self, edge: Places) -> tuple[Array, Array]:
        """Cross derivative of x and omega; omega's diagonal with edge hops eliminated.

        The latter without differences of large numbers.
        """
        c, fall = self.c, -self.c.slope
        bend, k = c.bend[edge], c.k_power[edge]
        left = bend * k * (1.0 - fall) ** 2
        left += (c.own[edge] + c.k_cap[edge]) * (bend + k * fall**2)
        return bend + k * fall, c.omega + self.hops.by_row(left / self.pivot[edge] + c.low_bend)

    def _on_caps(self, values_r2: Array) -> Array:
        """Values of the two edge hops of every row, (R, 2), summed by the cap that bounds them."""
        return values_r2 if self.hops.sides == 2 else self.hops.by_row(values_r2)[:, None]

    def _reduced(self, omega: Array, cap: Array) -> tuple[Array, Array]:
        """Solve for omega and the caps once hops are eliminated."""
        ends = cap / self.cap
        omega = (omega - self.hops.by_row(self.mixed * ends)) / self.omega
        return omega, ends - self.lean * omega[:, None]

    def _couple(self, own_share: Array) -> None:
        """What rows and the round need: share' K^-1 share and its relatives."""
        c = self.c
        self.omega_of_share, caps = self._reduced(self.share_omega, self.share_cap)
        sigma = own_share + self.hops.by_row(self.share_cap * caps)
        sigma += self.share_omega * self.omega_of_share
        self.lift = c.k_late - c.late
        self.divisor = 1.0 + self.lift * sigma
        self.seen = c.width * self.omega_of_share / self.divisor
        self.shift = float(np.vdot(c.k_late, self.seen))
        own = c.k_late * (1.0 - c.late * sigma) / self.divisor
        self.round = c.tau + float(own.sum())
        band = c.width**2 / self.omega - self.lift * self.seen**2 * self.divisor
        self.band = 1.0 / c.k_band + float(band.sum())
        self.determinant = self.round * self.band + self.shift**2

    def solve(self, gradient: Point) -> Point:
        """The step that cancels ``gradient``; raises ScheduleError for singular systems."""
        c, hops = self.c, self.hops
        u = gradient.x / -self.pivot
        lines = np.empty((2, len(u)))
        np.multiply(c.k_cap, u, out=lines[0])
        np.multiply(c.share_x, u, out=lines[1])
        sums = hops.lines_by_cap(lines)
        cap = sums[0] - gradient.cap
        omega = -gradient.omega - hops.by_row(self.across * u[hops.edge_r2])
        alone, caps = self._reduced(omega, cap)
        along = hops.by_row(sums[1] + self.share_cap * caps) + self.share_omega * alone
        tau, pull = self._shared(gradient.tau, alone, along)
        lean = (c.k_late * tau - self.lift * along) / self.divisor + pull * self.lift * self.seen
        omega = omega + lean * self.share_omega - pull * c.width
        omega, caps = self._reduced(omega, cap + lean[:, None] * self.share_cap)
        x = u + lean[hops.row_h] * self.by_share + self.pull * caps.ravel()[hops.cap_h]
        x[hops.edge_r2] -= self.drag * omega[:, None]
        return Point(x=x, omega=omega, cap=caps, tau=tau)

    def _shared(self, gradient_tau: float, alone: Array, along: Array) -> tuple[float, float]:
        """Steps of tau and of the bandwidth's price."""
        c = self.c
        first = float(np.vdot(c.k_late, along / self.divisor)) - gradient_tau
        second = float(np.vdot(c.width, alone) - np.vdot(self.lift * along, self.seen))
        if not self.determinant > 0.0:
            raise ScheduleError("the radio's Newton system is singular: check gains and payloads")
        tau = (first * self.band - self.shift * second) / self.determinant
        pull = (self.round * second + self.shift * first) / self.determinant
        return tau, pull

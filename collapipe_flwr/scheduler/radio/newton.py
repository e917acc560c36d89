"""The linear algebra of the interior point: the coupled Newton system, solved by elimination.

Unknowns are steps of every hop's x, of every row's omega and caps (phi, beta), and of tau. Hops
meet only through omega and the caps of their row, caps only through omega: eliminating in that
order leaves one number per row. The row's latency then adds a rank-one term (Sherman and
Morrison), and rows meet in tau and the bandwidth sum, a 2 x 2 system. Work is linear in hops.
"""

from __future__ import annotations

import numpy as np

from collapipe_flwr.core.errors import ScheduleError
from collapipe_flwr.costs.arrays import Array
from collapipe_flwr.scheduler.radio.problem import (
    ConstraintIndex,
    Evaluation,
    FlatHops,
    Parts,
    Point,
)


class NewtonSystem:
    """One factorisation; ``solve`` takes any number of right sides.

    The matrix holds the second derivatives of the Lagrangian at ``value`` with multipliers ``y``,
    and the constraints' own curvature ``k`` = dual / slack.
    """

    def __init__(
        self, hops: FlatHops, index: ConstraintIndex, value: Evaluation, y: Parts, k: Parts
    ) -> None:
        self.hops, self.value, self.y, self.k = hops, value, y, k
        edge, own = hops.edge_r2, y.late[hops.row_h] * value.share_x
        rest = value.energy_2 + k.power + own
        self.pivot = rest + k.cap
        self.pull = k.cap / self.pivot  # of a cap on its hops
        across, self.omega = self._edges(own[edge])
        self.drag = across / self.pivot[edge]  # of omega on the row's two edge hops
        self.across = across
        self.by_share = value.share_x / self.pivot
        lines = np.empty((3, len(rest)))
        np.multiply(self.pull, rest, out=lines[0])
        np.multiply(self.pull, value.share_x, out=lines[1])
        np.multiply(self.by_share, value.share_x, out=lines[2])
        sums = hops.lines_by_cap(lines)
        # What stands on the caps' diagonal apart from hops; unused caps stay regular.
        cap = k.stage + y.late[:, None] * value.share_cap + index.unbound
        self.cap = cap + sums[0]
        self.mixed = self._on_caps(k.cap[edge] * self.drag)
        self.lean = self.mixed / self.cap
        self.omega = self.omega - hops.by_row(self.mixed * self.lean)
        self.share_cap = value.share_cap + sums[1]
        self.share_omega = -hops.by_row(across * self.by_share[edge])
        self._couple(hops.by_row(sums[2]))

    def _edges(self, own_r2: Array) -> tuple[Array, Array]:
        """Cross derivative of x and omega; omega's diagonal with edge hops eliminated.

        The latter without differences of large numbers.
        """
        value, edge = self.value, self.hops.edge_r2
        fall, bend, k = -value.slope, value.energy_2[edge], self.k.power[edge]
        left = bend * k * (1.0 - fall) ** 2
        left += (own_r2 + self.k.cap[edge]) * (bend + k * fall**2)
        bent = left / self.pivot[edge] + self.y.power[edge] * value.low_bend
        return bend + k * fall, self.y.band[0] * value.width + self.hops.by_row(bent)

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
        late, k_late, width = self.y.late, self.k.late, self.value.width
        self.omega_of_share, caps = self._reduced(self.share_omega, self.share_cap)
        sigma = own_share + self.hops.by_row(self.share_cap * caps)
        sigma += self.share_omega * self.omega_of_share
        self.lift = k_late - late
        self.divisor = 1.0 + self.lift * sigma
        self.seen = width * self.omega_of_share / self.divisor
        self.shift = float(np.vdot(k_late, self.seen))
        own = k_late * (1.0 - late * sigma) / self.divisor
        self.round = self.value.objective_tau + float(own.sum())
        band = width**2 / self.omega - self.lift * self.seen**2 * self.divisor
        self.band = 1.0 / float(self.k.band[0]) + float(band.sum())
        self.determinant = self.round * self.band + self.shift**2

    def solve(self, gradient: Point) -> Point:
        """The step that cancels ``gradient``; raises ScheduleError for singular systems."""
        hops, k_late, width = self.hops, self.k.late, self.value.width
        u = gradient.x / -self.pivot
        lines = np.empty((2, len(u)))
        np.multiply(self.k.cap, u, out=lines[0])
        np.multiply(self.value.share_x, u, out=lines[1])
        sums = hops.lines_by_cap(lines)
        cap = sums[0] - gradient.cap
        omega = -gradient.omega - hops.by_row(self.across * u[hops.edge_r2])
        alone, caps = self._reduced(omega, cap)
        along = hops.by_row(sums[1] + self.share_cap * caps) + self.share_omega * alone
        tau, pull = self._shared(gradient.tau, alone, along)
        lean = (k_late * tau - self.lift * along) / self.divisor + pull * self.lift * self.seen
        omega = omega + lean * self.share_omega - pull * width
        omega, caps = self._reduced(omega, cap + lean[:, None] * self.share_cap)
        x = u + lean[hops.row_h] * self.by_share + self.pull * caps.ravel()[hops.cap_h]
        x[hops.edge_r2] -= self.drag * omega[:, None]
        return Point(x=x, omega=omega, cap=caps, tau=tau)

    def _shared(self, gradient_tau: float, alone: Array, along: Array) -> tuple[float, float]:
        """Steps of tau and of the bandwidth's price."""
        k_late, width = self.k.late, self.value.width
        first = float(np.vdot(k_late, along / self.divisor)) - gradient_tau
        second = float(np.vdot(width, alone) - np.vdot(self.lift * along, self.seen))
        if not self.determinant > 0.0:
            raise ScheduleError("the radio's Newton system is singular: check gains and payloads")
        tau = (first * self.band - self.shift * second) / self.determinant
        pull = (self.round * second + self.shift * first) / self.determinant
        return tau, pull

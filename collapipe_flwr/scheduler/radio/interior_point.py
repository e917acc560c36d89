"""Bandwidth and power of all clusters, jointly optimal: a primal-dual interior point.

Predictor and corrector steps (Mehrotra 1992; Wright, Primal-Dual Interior-Point Methods) on the
perturbed KKT conditions with slacks (Boyd and Vandenberghe, Convex Optimization, 11.7). The work
of a step grows linearly in clusters. The problem and its convexity are in ``radio.problem``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from collapipe_flwr.core.errors import ScheduleError
from collapipe_flwr.costs.arrays import Array
from collapipe_flwr.costs.chain import Chain, compute_full_power_times
from collapipe_flwr.scheduler.radio.problem import (
    Evaluation,
    Point,
    RadioProblem,
    RadioTerms,
    make_radio_problem,
)
from collapipe_flwr.scheduler.radio.warm_start import find_start

MAX_STEPS = 80
TOLERANCE = 1e-4  # relative distance from the optimum
REACH = 0.995  # share of the way to the boundary that a step may take
STRIDE = 0.7  # longest step in a logarithm: about twofold, as energies grow exponentially
FIRST_GAP = 0.01  # relative, of the duals that start beside the warm_start
UNBOUND = 1e-100  # dual of an entry that takes no part


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimum:
    """The point where the solver stopped."""

    point: Point  # feasible
    latency_price_r: Array  # objective per second of each cluster's latency
    gap: float  # estimated distance from the optimum, relative to the objective at the start
    steps: int  # after which it was there


class NewtonSystem:
    """The coupled Newton system, solved by elimination; ``solve`` takes any number of right sides.

    Unknowns are steps of every hop's x, of every row's omega and caps (phi, beta), and of tau. Hops
    meet only through omega and the caps of their row, caps only through omega: eliminating in that
    order leaves one number per row. The row's latency then adds a rank-one term (Sherman and
    Morrison), and rows meet in tau and the bandwidth sum, a 2 x 2 system. Work is linear in hops.

    The matrix holds the second derivatives of the Lagrangian at ``value`` with multipliers
    ``duals``, and the constraints' own curvature ``curve`` = dual / slack.
    """

    def __init__(self, terms: RadioTerms, value: Evaluation, duals: Array, curve: Array) -> None:
        hops, y, k = terms.hops, terms.index.split(duals), terms.index.split(curve)
        self.hops, self.value, self.y, self.k = hops, value, y, k
        edge, own = hops.edge_r2, y.late[hops.row_h] * value.share_x
        rest = value.energy_2 + k.power + own
        self.pivot = rest + k.cap
        self.pull = k.cap / self.pivot  # of a cap on its hops
        across, self.omega = self._eliminate_edges(own[edge])
        self.drag = across / self.pivot[edge]  # of omega on the row's two edge hops
        self.across = across
        self.by_share = value.share_x / self.pivot
        lines = np.empty((3, len(rest)))
        np.multiply(self.pull, rest, out=lines[0])
        np.multiply(self.pull, value.share_x, out=lines[1])
        np.multiply(self.by_share, value.share_x, out=lines[2])
        sums = hops.sum_lines_by_cap(lines)
        # What stands on the caps' diagonal apart from hops; unused caps stay regular.
        cap = k.stage + y.late[:, None] * value.share_cap + terms.index.unbound
        self.cap = cap + sums[0]
        self.mixed = self._sum_by_cap(k.cap[edge] * self.drag)
        self.lean = self.mixed / self.cap
        self.omega = self.omega - hops.sum_by_row(self.mixed * self.lean)
        self.share_cap = value.share_cap + sums[1]
        self.share_omega = -hops.sum_by_row(across * self.by_share[edge])
        self._couple(hops.sum_by_row(sums[2]))

    def _eliminate_edges(self, own_r2: Array) -> tuple[Array, Array]:
        """Compute the cross derivative of x and omega; omega's diagonal with edge hops eliminated.

        The latter without differences of large numbers.
        """
        value, edge = self.value, self.hops.edge_r2
        fall, bend, k = -value.slope, value.energy_2[edge], self.k.power[edge]
        left = bend * k * (1.0 - fall) ** 2
        left += (own_r2 + self.k.cap[edge]) * (bend + k * fall**2)
        bent = left / self.pivot[edge] + self.y.power[edge] * value.low_bend
        return bend + k * fall, self.y.band[0] * value.width + self.hops.sum_by_row(bent)

    def _sum_by_cap(self, values_r2: Array) -> Array:
        """Sum values of the two edge hops of every row, (R, 2), by the cap that bounds them."""
        return values_r2 if self.hops.sides == 2 else self.hops.sum_by_row(values_r2)[:, None]

    def _solve_reduced(self, omega: Array, cap: Array) -> tuple[Array, Array]:
        """Solve for omega and the caps once hops are eliminated."""
        ends = cap / self.cap
        omega = (omega - self.hops.sum_by_row(self.mixed * ends)) / self.omega
        return omega, ends - self.lean * omega[:, None]

    def _couple(self, own_share: Array) -> None:
        """Compute the terms of rows and of the round: share' K^-1 share and its relatives."""
        late, k_late, width = self.y.late, self.k.late, self.value.width
        self.omega_of_share, caps = self._solve_reduced(self.share_omega, self.share_cap)
        sigma = own_share + self.hops.sum_by_row(self.share_cap * caps)
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
        """Return the step that cancels ``gradient``; raise ScheduleError for singular systems."""
        hops, k_late, width = self.hops, self.k.late, self.value.width
        u = gradient.x / -self.pivot
        lines = np.empty((2, len(u)))
        np.multiply(self.k.cap, u, out=lines[0])
        np.multiply(self.value.share_x, u, out=lines[1])
        sums = hops.sum_lines_by_cap(lines)
        cap = sums[0] - gradient.cap
        omega = -gradient.omega - hops.sum_by_row(self.across * u[hops.edge_r2])
        alone, caps = self._solve_reduced(omega, cap)
        along = hops.sum_by_row(sums[1] + self.share_cap * caps) + self.share_omega * alone
        tau, pull = self._solve_shared(gradient.tau, alone, along)
        lean = (k_late * tau - self.lift * along) / self.divisor + pull * self.lift * self.seen
        omega = omega + lean * self.share_omega - pull * width
        omega, caps = self._solve_reduced(omega, cap + lean[:, None] * self.share_cap)
        x = u + lean[hops.row_h] * self.by_share + self.pull * caps.ravel()[hops.cap_h]
        x[hops.edge_r2] -= self.drag * omega[:, None]
        return Point(x=x, omega=omega, cap=caps, tau=tau)

    def _solve_shared(self, gradient_tau: float, alone: Array, along: Array) -> tuple[float, float]:
        """Solve for the steps of tau and of the bandwidth's price."""
        k_late, width = self.k.late, self.value.width
        first = float(np.vdot(k_late, along / self.divisor)) - gradient_tau
        second = float(np.vdot(width, alone) - np.vdot(self.lift * along, self.seen))
        if not self.determinant > 0.0:
            raise ScheduleError("the radio's Newton system is singular: check gains and payloads")
        tau = (first * self.band - self.shift * second) / self.determinant
        pull = (self.round * second + self.shift * first) / self.determinant
        return tau, pull


class InteriorPoint:
    """One problem, prepared; ``solve`` may be called once or more."""

    def __init__(self, problem: RadioProblem) -> None:
        self.terms = RadioTerms(problem)
        self.hops, self.index = self.terms.hops, self.terms.index

    def solve(self, tolerance: float = TOLERANCE) -> Optimum:
        """Take Newton steps until a repaired point is good enough, else return the best."""
        terms = self.terms
        point, price = find_start(terms)
        terms.scale = 1.0 / terms.compute_objective(point)
        value = terms.evaluate(point)
        duals = self._make_first_duals(value, price * np.exp(point.tau))
        slack = np.maximum(value.margin, FIRST_GAP / self.index.count / np.maximum(duals, 1e-300))
        slack[self.index.idle] = 1.0
        best: Optimum | None = None
        for steps in range(1, MAX_STEPS + 1):
            point, slack, duals = self._advance(point, value, slack, duals, 0.1 * tolerance)
            value = terms.evaluate(point)
            gap = float(np.vdot(duals, slack) + np.vdot(duals, np.abs(slack - value.margin)))
            if gap < tolerance or steps == MAX_STEPS:
                settled = terms.settle(point)
                gap = self._estimate_error(point, settled, value, duals, gap)
                if best is None or gap < best.gap:
                    price = self.index.split(duals).late / (terms.scale * np.exp(point.tau))
                    best = Optimum(point=settled, latency_price_r=price, gap=gap, steps=steps)
                if gap < tolerance:
                    break
        assert best is not None  # of the last step at the latest
        return best

    def _estimate_error(
        self, point: Point, settled: Point, value: Evaluation, duals: Array, gap: float
    ) -> float:
        """Estimate the relative distance of ``settled`` from the optimum by ``point``'s ``gap``.

        Added to it: how far the duals are from stationary, and what the repair costs.
        """
        stray = self._compute_gradient(value, duals).compute_square() ** 0.5 / 10.0
        found, claimed = self.terms.compute_objective(settled), self.terms.compute_objective(point)
        return float((gap + stray) / (self.terms.scale * found) + 1.0 - claimed / found)

    def _make_first_duals(self, value: Evaluation, late: Array) -> Array:
        """Make the multipliers that ``late``, up to a factor, implies for all other constraints."""
        hops, duals = self.hops, np.zeros(self.index.length)
        d = self.index.split(duals)
        d.late[...] = late * (value.objective_tau / late.sum())
        free = value.energy_1 + d.late[hops.row_h] * value.share_x
        np.maximum(free, 0.0, out=d.power)
        np.maximum(-free, 0.0, out=d.cap)
        capped = hops.sum_by_cap(d.cap).reshape(hops.rows, hops.sides)
        np.maximum(d.late[:, None] * value.share_cap - capped, 0.0, out=d.stage)
        edge = hops.edge_r2
        d.band[0] = -(value.energy_1[edge] + d.power[edge] * value.slope).sum()
        least = FIRST_GAP / self.index.count / np.maximum(value.margin, 1e-2)
        return np.maximum(self.index.mask * np.maximum(duals, least), UNBOUND)

    def _compute_gradient(self, value: Evaluation, weight: Array) -> Point:
        """Compute the gradient of the objective plus ``weight``-ed constraints."""
        hops, w = self.hops, self.index.split(weight)
        edge = hops.edge_r2
        capped = hops.sum_by_cap(w.cap).reshape(hops.rows, hops.sides)
        at_edge = value.energy_1[edge] + w.power[edge] * value.slope
        return Point(
            x=value.energy_1 + w.cap - w.power + w.late[hops.row_h] * value.share_x,
            omega=hops.sum_by_row(at_edge) + w.band[0] * value.width,
            cap=w.late[:, None] * value.share_cap - capped - w.stage,
            tau=value.objective_tau - float(w.late.sum()),
        )

    # -- one Newton step ------------------------------------------------------------------

    def _advance(
        self, point: Point, value: Evaluation, slack: Array, duals: Array, least: float
    ) -> tuple[Point, Array, Array]:
        """Predict towards the boundary, then correct towards the centre that this suggests.

        A gap below ``least`` is not aimed at: rounding would take over.
        """
        mean = float(np.vdot(duals, slack)) / self.index.count
        mask, curve, missed = self.index.mask, duals / slack, slack - value.margin
        system = NewtonSystem(self.terms, value, duals, curve)

        def towards(aim: Array) -> tuple[Point, Array, Array]:
            step = system.solve(self._compute_gradient(value, aim / slack + curve * missed))
            d_slack = self._differentiate(value, step) - missed
            return step, d_slack, aim / slack - duals - curve * d_slack

        _, d_slack, d_duals = towards(np.zeros_like(slack))
        reach = min(find_reach(slack, d_slack), 1.0)
        dual_reach = min(find_reach(duals, d_duals), 1.0)
        left = float(np.vdot(slack + reach * d_slack, duals + dual_reach * d_duals))
        centre = max((left / (mean * self.index.count)) ** 3 * mean, least / self.index.count)
        step, d_slack, d_duals = towards(mask * centre - d_slack * d_duals)
        primal = min(REACH * find_reach(slack, d_slack), 1.0)
        primal = min(primal, STRIDE / max(float(np.abs(step.x).max()), STRIDE))
        dual = min(REACH * find_reach(duals, d_duals), 1.0)
        return point.move(step, primal), slack + primal * d_slack, duals + dual * d_duals

    def _differentiate(self, value: Evaluation, step: Point) -> Array:
        """Compute the directional derivatives of all margins along ``step``, flat."""
        hops, flat = self.hops, np.empty(self.index.length)
        parts, dx = self.index.split(flat), value.share_x * step.x
        np.subtract(step.cap.ravel()[hops.cap_h], step.x, out=parts.cap)
        parts.power[...] = step.x
        parts.power[hops.edge_r2] -= value.slope * step.omega[:, None]
        parts.stage[...] = step.cap
        sent = hops.sum_by_cap(dx).reshape(hops.rows, hops.sides) + value.share_cap * step.cap
        np.subtract(step.tau, hops.sum_by_row(sent), out=parts.late)
        parts.band[0] = -np.vdot(value.width, step.omega)
        flat[self.index.idle] = 0.0
        return flat


def find_reach(values: Array, step: Array) -> float:
    """Find the length up to which ``values + length * step`` stays positive, at most 1e3."""
    fastest_fall = -float((step / values).min())
    return 1.0 / max(fastest_fall, 1e-3)


ACCEPTED_GAP = 5e-4  # relative; worse solutions are refused


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """Radio decisions for one row per cluster, and what they say about prices."""

    edge_hz_r: Array
    times: Array  # (R, S + 1, 2) seconds per micro-batch, forward and backward
    latency_price_r: Array  # objective per second of each cluster's own latency


def allocate(
    chain: Chain,
    price_rs: Array,
    *,
    latency_price: float,
    bandwidth_hz: float,
    tolerance: float = TOLERANCE,
) -> Allocation:
    """Minimise ``latency_price * max latency + sum price * energy``; raises ScheduleError.

    ``tolerance`` bounds the objective's relative distance from the optimum.
    """
    problem = make_radio_problem(
        chain, price_rs, latency_price=latency_price, bandwidth_hz=bandwidth_hz
    )
    _refuse_nonsense(problem)
    solver = InteriorPoint(problem)
    best = solver.solve(tolerance)
    if not best.gap < max(ACCEPTED_GAP, tolerance):
        raise ScheduleError(
            f"the radio solver stopped {best.gap:.1e} from the optimum after {best.steps} steps: "
            "check gains and payloads for extreme values"
        )
    every = np.zeros(problem.used_rh.size)
    every[solver.hops.flat_h] = np.exp(best.point.x)
    edge_hz_r = np.exp(best.point.omega)
    times = np.stack(np.split(every.reshape(problem.used_rh.shape), 2, axis=1), axis=2)
    home = chain.hops.to_edge & ~chain.hops.shared
    if home.any():  # the program took these hops for some of the shared bandwidth
        full = compute_full_power_times(chain, edge_hz_r)
        times = np.where(home[:, :, None], np.maximum(times, full), times)
    return Allocation(edge_hz_r=edge_hz_r, times=times, latency_price_r=best.latency_price_r)


def _refuse_nonsense(problem: RadioProblem) -> None:
    """Say which numbers no solver can use; raises ScheduleError."""
    given = {
        "prices": problem.price_rh,
        "the latency's price": np.array(problem.latency_price),
        "noise over gain": problem.noise_over_gain_rh[problem.used_rh],
        "bandwidth": np.array(problem.bandwidth_hz),
        "compute times": problem.fixed_s_r,
    }
    for name, values in given.items():
        if not np.isfinite(values).all():
            raise ScheduleError(
                f"the radio solver was given {name} that are not finite: check profiles"
            )


def share_equally(chain: Chain, bandwidth_hz: float) -> Allocation:
    """Allocate equal bandwidth and full power, the plain alternative."""
    count = len(chain.rows)
    width = np.full(count, bandwidth_hz / count)
    return Allocation(
        edge_hz_r=width,
        times=compute_full_power_times(chain, width),
        latency_price_r=np.zeros(count),
    )

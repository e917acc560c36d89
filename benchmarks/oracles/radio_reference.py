"""The radio block in cvxpy: the readable reference of ``interior_point``, for tests and benches.

It shares no algebra with the fast solver. Hops inside a cluster have fixed bandwidth and stay in
natural units: ``t exp(a / t)`` is one exponential cone. Hops to the edge need logarithms because
bandwidth and time multiply; there ``(e^z - 1) / z = integral_0^1 e^(theta z) dtheta`` becomes a
Gauss-Legendre sum with positive weights, exact to rounding for the exponents that occur.
"""

# cvxpy exports its functions without annotations.
# mypy: disable-error-code="attr-defined,arg-type,no-untyped-call,return-value,no-any-return"

from __future__ import annotations

from dataclasses import dataclass

import cvxpy as cp
import numpy as np

from collapipe_flwr.core.errors import ScheduleError
from collapipe_flwr.costs.arrays import Array, Ints
from collapipe_flwr.scheduler.radio.problem import RadioProblem

NODES = 12
TOLERANCES = {"tol_gap_abs": 1e-6, "tol_gap_rel": 1e-6, "tol_feas": 1e-6}  # reached at M = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceOptimum:
    """What the reference solver found."""

    objective: float
    latency_s: float
    edge_hz_r: Array
    solver_s: float  # inside Clarabel; the rest is cvxpy stating the problem


class _Model:
    """The problem's variables and constraints for one instance.

    Every hop counts time in units of its own fastest time at equal bandwidth, the round in units
    of what those add up to, and the objective in units of that round's price.
    """

    def __init__(self, problem: RadioProblem) -> None:
        self.p = problem
        self.rows = problem.used_rh.shape[0]
        self.unit_rh = _fastest(problem)
        self.round_s = _round_at(problem, self.unit_rh)
        self.worth = problem.latency_price * self.round_s
        self.round, self.omega = cp.Variable(pos=True), cp.Variable(self.rows)
        self.cap = cp.Variable((self.rows, 2), pos=True)  # in units of the round
        self.constraints: list[cp.Constraint] = [cp.sum(cp.exp(self.omega)) <= 1.0]
        self.energy: list[cp.Expression] = []

    def solve(self) -> ReferenceOptimum:
        """Build, solve with Clarabel and unscale; raises ScheduleError if it does not converge."""
        p = self.p
        total = self._d2d() + self._edge()
        slow = cp.sum(cp.multiply(p.cap_weight_r2, self.cap), axis=1)
        idle = np.nonzero(p.cap_weight_r2 == 0)  # one micro-batch: nothing is bounded
        self.constraints += [
            self.cap >= p.stage_max_r2 / self.round_s,
            self.cap[idle] <= p.stage_max_r2[idle] / self.round_s,
            p.fixed_s_r / self.round_s + total + slow <= self.round,
        ]
        problem = cp.Problem(cp.Minimize(self.round + sum(self.energy)), self.constraints)
        try:
            problem.solve(solver=cp.CLARABEL, **TOLERANCES)
        except cp.SolverError as error:
            raise ScheduleError("the reference solver broke off: rescale the instance") from error
        if problem.status != cp.OPTIMAL:
            raise ScheduleError(f"the reference solver ended as {problem.status!r}")
        return ReferenceOptimum(
            objective=float(problem.value) * self.worth,
            latency_s=float(self.round.value) * self.round_s,
            edge_hz_r=np.exp(self.omega.value) * p.bandwidth_hz,
            solver_s=float(problem.solver_stats.solve_time),
        )

    def _d2d(self) -> cp.Expression:
        """Hops of fixed bandwidth in natural units, ``u = t / fastest >= 1``.

        With s = ln(1 + SNR at full power), ``t exp(a / t) = fastest e^s u exp(s (1 - u) / u)``.
        """
        p = self.p
        row, hop = np.nonzero(p.used_rh & ~p.edge_rh)
        unit, width = self.unit_rh[row, hop], p.d2d_hz_rh[row, hop]
        watts = p.noise_over_gain_rh[row, hop] * width
        s = np.log1p(p.power_max_rh[row, hop] / watts)
        u, grown = cp.Variable(len(row), pos=True), cp.Variable(len(row), pos=True)
        self.constraints += [cp.ExpCone(s - cp.multiply(s, u), u, grown), u >= 1.0]
        price = p.price_rh[row, hop] * watts * unit / self.worth
        self.energy.append((price * np.exp(s)) @ grown - price @ u)
        return self._count(u, row, hop)

    def _edge(self) -> cp.Expression:
        """Hops over the shared bandwidth in logarithms."""
        p = self.p
        row, hop = np.nonzero(p.used_rh & p.edge_rh)
        unit, noise = self.unit_rh[row, hop], p.noise_over_gain_rh[row, hop]
        x, u, z = cp.Variable(len(row)), cp.Variable(len(row), pos=True), cp.Variable(len(row))
        bits = p.bits_ln2_rh[row, hop]
        v = np.log(bits / (p.bandwidth_hz * unit)) - x - self.omega[row]
        node, weight = np.polynomial.legendre.leggauss(NODES)
        theta, weight = (node + 1.0) / 2.0, np.log(weight / 2.0)
        grown = cp.vstack([t * z + w for t, w in zip(theta, weight, strict=True)])
        limit = np.log(p.power_max_rh[row, hop] / (noise * p.bandwidth_hz))
        needed = self.omega[row] + v + cp.log_sum_exp(grown, axis=0)
        self.constraints += [cp.exp(x) <= u, cp.exp(v) <= z, needed <= limit]
        price = p.price_rh[row, hop] * noise * bits / self.worth
        paid = np.flatnonzero(price > 0)
        self.energy.append(cp.sum(cp.exp(grown[:, paid] + np.log(price[paid])[None, :])))
        return self._count(u, row, hop)

    def _count(self, u: cp.Variable, row: Ints, hop: Ints) -> cp.Expression:
        """Keep hops within their pass's slowest resource; their part of every latency."""
        side = self.p.cap_of_h[hop]
        capped = np.flatnonzero(self.p.cap_weight_r2[row, side] > 0)
        unit = self.unit_rh[row, hop] / self.round_s
        slowest = self.cap[row[capped], side[capped]]
        self.constraints.append(cp.multiply(unit[capped], u[capped]) <= slowest)
        sums = np.zeros((self.rows, len(row)))
        sums[row, np.arange(len(row))] = self.p.weight_r[row] * unit
        return sums @ u


def _fastest(problem: RadioProblem) -> Array:
    """Hop times at full power and equal bandwidth."""
    share = problem.bandwidth_hz / problem.used_rh.shape[0]
    width = np.where(problem.edge_rh, share, problem.d2d_hz_rh)
    snr = problem.power_max_rh / problem.noise_over_gain_rh
    return np.asarray(problem.bits_ln2_rh / (width * np.log1p(snr / width)))


def _round_at(problem: RadioProblem, time_rh: Array) -> float:
    """The longest round at those hop times, the slowest resources ignored."""
    sent = (np.where(problem.used_rh, time_rh, 0.0)).sum(1) * problem.weight_r
    return float((problem.fixed_s_r + sent).max())


def solve_reference(problem: RadioProblem) -> ReferenceOptimum:
    """The optimum by an independent convex solver; raises ScheduleError if it does not converge."""
    return _Model(problem).solve()

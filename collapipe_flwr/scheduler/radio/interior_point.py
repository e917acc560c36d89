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
from collapipe_flwr.costs.chain import Chain, full_power_times
from collapipe_flwr.scheduler.radio.newton import NewtonSystem
from collapipe_flwr.scheduler.radio.problem import (
    Evaluation,
    Point,
    RadioProblem,
    RadioTerms,
    radio_problem,
)
from collapipe_flwr.scheduler.radio.warm_start import warm_start

MAX_STEPS = 80
TOLERANCE = 1e-4  # relative distance from the optimum
REACH = 0.995  # share of the way to the boundary that a step may take
STRIDE = 3.0  # longest step in a logarithm
FIRST_GAP = 0.01  # relative, of the duals that start beside the warm_start
UNBOUND = 1e-100  # dual of an entry that takes no part


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimum:
    """Where the solver stopped."""

    point: Point  # feasible
    latency_price_r: Array  # objective per second of each cluster's latency
    gap: float  # estimated distance from the optimum, relative to the objective at the start
    steps: int


class InteriorPoint:
    """One problem, prepared; ``solve`` may be called once or more."""

    def __init__(self, problem: RadioProblem) -> None:
        self.terms = RadioTerms(problem)
        self.hops, self.index = self.terms.hops, self.terms.index

    def solve(self, tolerance: float = TOLERANCE) -> Optimum:
        """Newton steps until the repaired point is good enough, or the step limit."""
        terms = self.terms
        point, price = warm_start(terms)
        terms.scale = 1.0 / terms.objective(point)
        value = terms.evaluate(point)
        duals = self._first_duals(value, price * np.exp(point.tau))
        slack = np.maximum(value.margin, FIRST_GAP / self.index.count / np.maximum(duals, 1e-300))
        slack[self.index.idle] = 1.0
        settled, error, steps = point, 1.0, 0
        while steps < MAX_STEPS and not error < tolerance:
            point, slack, duals = self._advance(point, value, slack, duals, 0.1 * tolerance)
            value, steps = terms.evaluate(point), steps + 1
            error = float(np.vdot(duals, slack) + np.vdot(duals, np.abs(slack - value.margin)))
            if error < tolerance or steps == MAX_STEPS:
                settled = terms.settled(point)
                error = self._error(point, settled, value, duals, error)
        price = self.index.parts(duals).late / (terms.scale * np.exp(point.tau))
        return Optimum(point=settled, latency_price_r=price, gap=error, steps=steps)

    def _error(
        self, point: Point, settled: Point, value: Evaluation, duals: Array, gap: float
    ) -> float:
        """Estimated relative distance of ``settled`` from the optimum, ``gap`` that of ``point``.

        Added to it: how far the duals are from stationary, and what the repair costs.
        """
        stray = self._gradient(value, duals).square() ** 0.5 / 10.0
        found, claimed = self.terms.objective(settled), self.terms.objective(point)
        return float((gap + stray) / (self.terms.scale * found) + 1.0 - claimed / found)

    def _first_duals(self, value: Evaluation, late: Array) -> Array:
        """Multipliers that ``late``, up to a common factor, implies for all other constraints."""
        hops, duals = self.hops, np.zeros(self.index.length)
        d = self.index.parts(duals)
        d.late[...] = late * (value.objective_tau / late.sum())
        free = value.energy_1 + d.late[hops.row_h] * value.share_x
        np.maximum(free, 0.0, out=d.power)
        np.maximum(-free, 0.0, out=d.cap)
        capped = hops.by_cap(d.cap).reshape(hops.rows, hops.sides)
        np.maximum(d.late[:, None] * value.share_cap - capped, 0.0, out=d.stage)
        edge = hops.edge_r2
        d.band[0] = -(value.energy_1[edge] + d.power[edge] * value.slope).sum()
        least = FIRST_GAP / self.index.count / np.maximum(value.margin, 1e-2)
        return np.maximum(self.index.mask * np.maximum(duals, least), UNBOUND)

    def _gradient(self, value: Evaluation, weight: Array) -> Point:
        """Gradient of the objective plus ``weight``-ed constraints."""
        hops, w = self.hops, self.index.parts(weight)
        edge = hops.edge_r2
        capped = hops.by_cap(w.cap).reshape(hops.rows, hops.sides)
        at_edge = value.energy_1[edge] + w.power[edge] * value.slope
        return Point(
            x=value.energy_1 + w.cap - w.power + w.late[hops.row_h] * value.share_x,
            omega=hops.by_row(at_edge) + w.band[0] * value.width,
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
        system = self._system(value, duals, curve)

        def towards(aim: Array) -> tuple[Point, Array, Array]:
            step = system.solve(self._gradient(value, aim / slack + curve * missed))
            d_slack = self._along(value, step) - missed
            return step, d_slack, aim / slack - duals - curve * d_slack

        _, d_slack, d_duals = towards(np.zeros_like(slack))
        reach = min(to_boundary(slack, d_slack), 1.0)
        dual_reach = min(to_boundary(duals, d_duals), 1.0)
        left = float(np.vdot(slack + reach * d_slack, duals + dual_reach * d_duals))
        centre = max((left / (mean * self.index.count)) ** 3 * mean, least / self.index.count)
        step, d_slack, d_duals = towards(mask * centre - d_slack * d_duals)
        primal = min(REACH * to_boundary(slack, d_slack), 1.0)
        primal = min(primal, STRIDE / max(float(np.abs(step.x).max()), STRIDE))
        dual = min(REACH * to_boundary(duals, d_duals), 1.0)
        return point.moved(step, primal), slack + primal * d_slack, duals + dual * d_duals

    def _along(self, value: Evaluation, step: Point) -> Array:
        """Directional derivatives of all margins along ``step``, flat."""
        hops, flat = self.hops, np.empty(self.index.length)
        parts, dx = self.index.parts(flat), value.share_x * step.x
        np.subtract(step.cap.ravel()[hops.cap_h], step.x, out=parts.cap)
        parts.power[...] = step.x
        parts.power[hops.edge_r2] -= value.slope * step.omega[:, None]
        parts.stage[...] = step.cap
        sent = hops.by_cap(dx).reshape(hops.rows, hops.sides) + value.share_cap * step.cap
        np.subtract(step.tau, hops.by_row(sent), out=parts.late)
        parts.band[0] = -np.vdot(value.width, step.omega)
        flat[self.index.idle] = 0.0
        return flat

    def _system(self, value: Evaluation, duals: Array, curve: Array) -> NewtonSystem:
        y, k = self.index.parts(duals), self.index.parts(curve)
        return NewtonSystem(self.hops, self.index, value, y, k)


def to_boundary(values: Array, step: Array) -> float:
    """How far ``values + length * step`` stays positive, at most 1e3."""
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
    problem = radio_problem(chain, price_rs, latency_price=latency_price, bandwidth_hz=bandwidth_hz)
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
    return Allocation(
        edge_hz_r=np.exp(best.point.omega),
        times=np.stack(np.split(every.reshape(problem.used_rh.shape), 2, axis=1), axis=2),
        latency_price_r=best.latency_price_r,
    )


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


def equal_shares(chain: Chain, bandwidth_hz: float) -> Allocation:
    """The plain alternative: equal bandwidth, full power."""
    count = len(chain.rows)
    width = np.full(count, bandwidth_hz / count)
    return Allocation(
        edge_hz_r=width,
        times=full_power_times(chain, width),
        latency_price_r=np.zeros(count),
    )

"""The vectorised radio solver: a primal-dual interior point over all clusters at once.

Newton steps on the perturbed KKT conditions with slacks (Boyd and Vandenberghe, Convex
Optimization, 11.7; Wright, Primal-Dual Interior-Point Methods). The work of a step grows linearly
in clusters. The problem and its convexity are in ``radio_problem``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from collapipe_flwr.scheduler.newton import HopCurves, Layout, NewtonSystem, Point, to_boundary
from collapipe_flwr.scheduler.radio_problem import Link, RadioProblem, link_terms

Array = NDArray[np.float64]

MAX_STEPS = 80
TOLERANCE = 1e-6  # relative duality gap
SHRINK = 0.1  # how far a step lowers the complementarity at most
PATIENCE = 0.1  # and how much less while the other conditions are still violated
REACH = 0.99  # share of the way to the boundary that a step may take
STRIDE = 2.0  # longest step in a logarithm
FIRST_SLACK = 1e-2


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimum:
    """Where the solver stopped."""

    point: Point
    latency_price_r: Array  # objective per unit of ln(latency) of each cluster
    gap: float  # relative to the objective at the start
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Room (-g), link pieces and latency shares at a point."""

    room: Array  # flat
    link: Link
    share_x: Array  # share of the cluster's latency due to each hop
    share_cap: Array
    width: Array  # bandwidth as a share of the total
    objective_tau: float


class InteriorPoint:
    """One problem, prepared; ``solve`` may be called once or more."""

    def __init__(self, problem: RadioProblem) -> None:
        self.problem = problem
        self.rows, self.size = problem.used_rh.shape
        self.side = problem.cap_of_h
        self.sides = np.eye(2)[self.side]  # (2(S+1), 2) which of phi, beta bounds a hop
        self.layout = Layout(self.rows, self.size)
        self.used = problem.used_rh.astype(np.float64)
        self.edge = (problem.edge_rh & problem.used_rh).astype(np.float64)
        self.log_d2d = np.where(problem.edge_rh, 0.0, np.log(problem.d2d_hz_r)[:, None])
        self.log_stage = np.log(np.maximum(problem.stage_max_r2, 1e-12))
        self.capped = (problem.cap_weight_r2 > 0).astype(np.float64)
        self.mask = self._mask()
        self.count = float(self.mask.sum())

    def _mask(self) -> Array:
        flat = np.ones(self.layout.length)
        parts = self.layout.parts(flat)
        parts.cap[...] = self.used * self.capped[:, self.side]
        parts.stage[...] = self.capped
        parts.power[...] = self.used
        return flat

    def solve(self) -> Optimum:
        """Newton steps until gap and residual are small, or the step limit."""
        point = self._start()
        self.scale = 1.0 / self.objective(point)
        value = self._evaluate(point)
        slack = np.maximum(value.room, FIRST_SLACK)
        duals = self.mask / (self.count * slack)
        gap, residual, steps = 1.0, self._residual(value, slack, duals), 0
        while steps < MAX_STEPS and (gap > TOLERANCE or residual > 10.0 * TOLERANCE):
            aim = gap / self.count * max(SHRINK, min(1.0, PATIENCE * residual / gap))
            point, slack, duals = self._advance(point, value, slack, duals, aim)
            value = self._evaluate(point)
            gap, residual = float(np.vdot(duals, slack)), self._residual(value, slack, duals)
            steps += 1
        late = self.layout.parts(duals).late / self.scale
        return Optimum(point=point, latency_price_r=late, gap=gap + residual**2, steps=steps)

    # -- evaluation -----------------------------------------------------------------------

    def _start(self) -> Point:
        p = self.problem
        omega = np.full(self.rows, np.log(0.9 * p.bandwidth_hz / self.rows))
        width = np.exp(self._log_width(omega))
        snr = 0.8 * p.power_max_rh / p.noise_over_gain_rh
        x = np.log(p.bits_ln2_rh / (width * np.log1p(snr / width)))
        x = np.where(p.used_rh, x, 0.0)
        slowest = np.where(p.used_rh, x, -np.inf).max(1, keepdims=True)
        cap = np.maximum(slowest, self.log_stage) + 0.1
        late, _, _ = self._late(x, cap)
        return Point(x=x, omega=omega, cap=cap, tau=float(late.max()) + 0.1)

    def _log_width(self, omega: Array) -> Array:
        return np.asarray(self.log_d2d + self.problem.edge_rh * omega[:, None])

    def _late(self, x: Array, cap: Array) -> tuple[Array, Array, Array]:
        """ln(latency) of every row, and the shares of hops and slowest resources in it."""
        p = self.problem
        hop = self.used * p.weight_r[:, None] * np.exp(x)
        slow = p.cap_weight_r2 * np.exp(cap)
        total = p.fixed_s_r + hop.sum(1) + slow.sum(1)
        return np.log(total), hop / total[:, None], slow / total[:, None]

    def objective(self, point: Point) -> float:
        """What is minimised, in the problem's own units."""
        link = link_terms(self.problem, point.x, self._log_width(point.omega))
        energy = float(np.vdot(link.energy, self.used))
        return self.problem.latency_price * float(np.exp(point.tau)) + energy

    def _evaluate(self, point: Point) -> Evaluation:
        p = self.problem
        link = link_terms(p, point.x, self._log_width(point.omega))
        late, share_x, share_cap = self._late(point.x, point.cap)
        width = np.exp(point.omega) / p.bandwidth_hz
        room = np.empty(self.layout.length)
        parts = self.layout.parts(room)
        parts.cap[...] = point.cap[:, self.side] - point.x
        parts.stage[...] = point.cap - self.log_stage
        parts.power[...] = -link.power
        parts.late[...] = point.tau - late
        parts.band[0] = 1.0 - width.sum()
        return Evaluation(
            room=np.where(self.mask > 0, room, 1.0),
            link=link,
            share_x=share_x,
            share_cap=share_cap,
            width=width,
            objective_tau=self.scale * p.latency_price * float(np.exp(point.tau)),
        )

    def _gradient(self, value: Evaluation, weight: Array) -> Point:
        """Gradient of the objective plus ``weight``-ed constraints (weights 0 where masked)."""
        link, w = value.link, self.layout.parts(weight)
        by_y = self.scale * self.used * link.energy_1 + w.power * link.power_1
        capped = w.cap @ self.sides
        return Point(
            x=by_y + w.cap + w.late[:, None] * value.share_x,
            omega=(self.edge * (by_y + w.power)).sum(1) + w.band[0] * value.width,
            cap=w.late[:, None] * value.share_cap - capped - w.stage,
            tau=value.objective_tau - float(w.late.sum()),
        )

    def _residual(self, value: Evaluation, slack: Array, duals: Array) -> float:
        missed = self.mask * (slack - value.room)
        return float(np.sqrt(self._gradient(value, duals).square() + np.vdot(missed, missed)))

    # -- one Newton step ------------------------------------------------------------------

    def _advance(
        self, point: Point, value: Evaluation, slack: Array, duals: Array, aim: float
    ) -> tuple[Point, Array, Array]:
        """One damped step towards slack * dual = ``aim`` on every constraint."""
        curve, missed = duals / slack, self.mask * (slack - value.room)
        right = self._gradient(value, self.mask * aim / slack + curve * missed)
        step = self._system(value, duals, curve).solve(right)
        d_slack = -self.mask * (missed + self._along(value, step))
        d_duals = self.mask * (aim / slack - duals) - curve * d_slack
        primal = min(REACH * to_boundary(slack, d_slack), 1.0)
        primal = min(primal, STRIDE / max(float(np.abs(step.x).max()), STRIDE))
        dual = min(REACH * to_boundary(duals, d_duals), 1.0)
        return point.moved(step, primal), slack + primal * d_slack, duals + dual * d_duals

    def _along(self, value: Evaluation, step: Point) -> Array:
        """Directional derivatives of every constraint along ``step``, flat."""
        flat = np.empty(self.layout.length)
        parts, domega = self.layout.parts(flat), self.edge * step.omega[:, None]
        parts.cap[...] = step.x - step.cap[:, self.side]
        parts.stage[...] = -step.cap
        parts.power[...] = value.link.power_1 * (step.x + domega) + domega
        hops = (value.share_x * step.x).sum(1) + (value.share_cap * step.cap).sum(1)
        parts.late[...] = hops - step.tau
        parts.band[0] = np.vdot(value.width, step.omega)
        return flat

    def _system(self, value: Evaluation, duals: Array, curve: Array) -> NewtonSystem:
        y, k, link = self.layout.parts(duals), self.layout.parts(curve), value.link
        hops = HopCurves(
            bend=self.used * self.scale * link.energy_2 + y.power * link.power_2,
            slope=link.power_1,
            k_power=k.power,
            k_cap=k.cap,
            own=y.late[:, None] * value.share_x + (1.0 - self.used),
            edge=self.edge,
        )
        caps = k.stage + y.late[:, None] * value.share_cap + (1.0 - self.capped)
        band = (y.band[0] * value.width)[:, None]
        none = np.zeros((self.rows, 1))
        return NewtonSystem(
            hops=hops,
            sides=self.sides,
            ends=np.concatenate([band, caps], axis=1),
            share=np.concatenate([value.share_x, none, value.share_cap], axis=1),
            lift=k.late - y.late,
            k_late=k.late,
            width=value.width,
            tau_curve=value.objective_tau + float(k.late.sum()),
            band_curve=float(k.band[0]),
        )

"""A radio problem's functions at a point: objective, constraints, and what their slopes need.

All constraints stand in one flat vector (`ConstraintIndex`), so that the interior point's
arithmetic on slacks and duals is plain array arithmetic. Clusters with one micro-batch have no
slowest resource to bound: their entries are masked out. `RadioTerms.settled` turns an interior
point's last iterate into a plan without violations.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from collapipe_flwr.scheduler.radio.newton import Point
from collapipe_flwr.scheduler.radio.problem import EXPONENT_MAX, FlatHops, RadioProblem, flat_hops

Array = NDArray[np.float64]
CATCH_UPS = 6  # rounds of catching up with the round
ON_TIME = 1e-9  # in ln(latency)


@dataclass(slots=True)
class Parts:
    """Views of one flat constraint vector."""

    cap: Array  # (hops,) hop within its pass's slowest resource
    power: Array  # (hops,) hop no faster than at full power
    stage: Array  # (R, sides) slowest compute stage within the slowest resource
    late: Array  # (R,) cluster within the round
    band: Array  # (1,) bandwidth sum


class ConstraintIndex:
    """The layout of flat constraint vectors, and which entries take part."""

    def __init__(self, hops: FlatHops, problem: RadioProblem) -> None:
        self.shape = (hops.rows, hops.sides)
        stops = np.cumsum([len(hops.flat_h)] * 2 + [hops.rows * hops.sides, hops.rows, 1])
        self.cap, self.power, self.stage, self.late, self.length = (int(stop) for stop in stops)
        bound = problem.cap_weight_r2[:, : hops.sides] > 0
        self.mask = np.ones(self.length)
        parts = self.parts(self.mask)
        parts.cap[...] = bound.ravel()[hops.cap_h]
        parts.stage[...] = bound
        self.idle = np.flatnonzero(self.mask == 0.0)
        self.count = float(self.mask.sum())
        self.unbound = 1.0 - bound  # keeps the pivots of unused caps regular

    def parts(self, flat: Array) -> Parts:
        """Writable views of ``flat``."""
        return Parts(
            flat[: self.cap],
            flat[self.cap : self.power],
            flat[self.power : self.stage].reshape(self.shape),
            flat[self.stage : self.late],
            flat[self.late :],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Margins (-g) of all constraints, and derivatives of energy, latency and bounds at a point."""

    margin: Array  # flat
    energy_1: Array  # priced, scaled energy's derivative by y = x + omega
    energy_2: Array
    share_x: Array  # share of the cluster's latency due to each hop
    share_cap: Array
    slope: Array  # (R, 2) of the full-power bound by omega, and its second derivative
    low_bend: Array
    width: Array  # bandwidth as a share of the total
    objective_tau: float


class RadioTerms:
    """One problem, prepared; ``scale`` times the objective is what energies are given in."""

    def __init__(self, problem: RadioProblem) -> None:
        self.problem = problem
        self.hops = flat_hops(problem)
        self.index = ConstraintIndex(self.hops, problem)
        self.cap_weight = problem.cap_weight_r2[:, : self.hops.sides]
        self.log_stage = np.log(np.maximum(problem.stage_max_r2[:, : self.hops.sides], 1e-12))
        self.scale = 1.0

    def objective(self, point: Point) -> float:
        """What is minimised, in the problem's own units."""
        energy = float(self._energy(point)[0].sum()) / self.scale
        return self.problem.latency_price * float(np.exp(point.tau)) + energy

    def evaluate(self, point: Point) -> Evaluation:
        p, hops = self.problem, self.hops
        _, energy_1, energy_2 = self._energy(point)
        late, share_x, share_cap = self._late(point.x, point.cap)
        edge_low, slope, low_bend = hops.edge_low(point.omega)
        width = np.exp(point.omega) / p.bandwidth_hz
        low = hops.low_h.copy()
        low[hops.edge_r2] = edge_low
        margin = np.empty(self.index.length)
        parts = self.index.parts(margin)
        np.subtract(point.cap.ravel()[hops.cap_h], point.x, out=parts.cap)
        np.subtract(point.x, low, out=parts.power)
        np.subtract(point.cap, self.log_stage, out=parts.stage)
        np.subtract(point.tau, late, out=parts.late)
        parts.band[0] = 1.0 - width.sum()
        margin[self.index.idle] = 1.0
        return Evaluation(
            margin=margin,
            energy_1=energy_1,
            energy_2=energy_2,
            share_x=share_x,
            share_cap=share_cap,
            slope=slope,
            low_bend=low_bend,
            width=width,
            objective_tau=self.scale * p.latency_price * float(np.exp(point.tau)),
        )

    def settled(self, point: Point) -> Point:
        """A point beside ``point`` that keeps every limit exactly.

        Bandwidth adds up, no hop is faster than at full power, hops that cost nothing are as fast,
        and clusters behind the round speed up.
        """
        hops = self.hops
        omega = point.omega + np.log(self.problem.bandwidth_hz / np.exp(point.omega).sum())
        low = hops.low_h.copy()
        low[hops.edge_r2] = hops.edge_low(omega)[0]
        x = np.where(hops.worth_h > 0.0, np.maximum(point.x, low), low)
        for _ in range(CATCH_UPS):
            late, share_x, share_cap = self._late(x, self._slowest(x))
            behind = np.maximum(late - point.tau, 0.0)
            if behind.max() < ON_TIME:
                break
            sent = hops.by_row(hops.by_cap(share_x).reshape(share_cap.shape) + share_cap)
            x = np.maximum(x - (behind / sent)[hops.row_h], low)
        cap = self._slowest(x)
        return Point(x=x, omega=omega, cap=cap, tau=float(self._late(x, cap)[0].max()))

    def _slowest(self, x: Array) -> Array:
        """The least caps that hop times allow."""
        hops = np.maximum.reduceat(x, self.hops.starts_c).reshape(self.log_stage.shape)
        return np.maximum(hops, self.log_stage)

    def _energy(self, point: Point) -> tuple[Array, Array, Array]:
        """Priced and scaled energy of every hop with two derivatives by y = x + omega."""
        hops = self.hops
        z = hops.log_bits_h - point.x
        z[hops.edge_r2] -= point.omega[:, None]
        z = np.clip(np.exp(z), 1e-12, EXPONENT_MAX)
        grown, worth = np.expm1(z), self.scale * hops.worth_h
        mean = grown / z
        grown += 1.0
        return worth * mean, worth * (mean - grown), worth * (grown * (z - 1.0) + mean)

    def _late(self, x: Array, cap: Array) -> tuple[Array, Array, Array]:
        """ln(latency) of every row, and the shares of hops and slowest resources in it."""
        hops = self.hops
        hop, slow = hops.weight_h * np.exp(x), self.cap_weight * np.exp(cap)
        sent = hops.by_cap(hop).reshape(hops.rows, hops.sides)
        total = self.problem.fixed_s_r + hops.by_row(sent + slow)
        part = 1.0 / total
        return np.log(total), hop * part[hops.row_h], slow * part[:, None]

"""The vectorised radio solver: a primal-dual interior point over all clusters at once.

Newton steps on the perturbed KKT conditions (Boyd and Vandenberghe, Convex Optimization, 11.7).
Clusters meet only in the round latency and the bandwidth sum, so each step is one batch of small
solves (one per cluster) and a 2 x 2 system that couples them: cost grows linearly in clusters.

Constraints, all ``<= 0``: ``cap`` (hop within its pass's slowest resource), ``stage`` (compute
within it), ``power``, ``late`` (cluster within the round), ``band`` (bandwidth sum).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from collapipe_flwr.scheduler.radio_problem import Link, RadioProblem, link_terms

Array = NDArray[np.float64]

MAX_STEPS = 80
TOLERANCE = 1e-6  # relative duality gap
REACH = 0.99  # share of the way to the boundary that a step may take
STRIDE = 2.0  # longest step in a logarithm


@dataclass(slots=True, kw_only=True)
class Point:
    """Primal variables: logarithms of times, bandwidths, slowest resources, round latency."""

    x: Array  # (R, 2(S+1))
    omega: Array  # (R,)
    cap: Array  # (R, 2): phi, beta
    tau: float

    def moved(self, step: Point, length: float) -> Point:
        """This point plus ``length`` times ``step``."""
        return Point(
            x=self.x + length * step.x,
            omega=self.omega + length * step.omega,
            cap=self.cap + length * step.cap,
            tau=self.tau + length * step.tau,
        )


@dataclass(slots=True, kw_only=True)
class Duals:
    """One number per constraint: multipliers, slacks or steps thereof."""

    cap: Array  # (R, 2(S+1))
    stage: Array  # (R, 2)
    power: Array  # (R, 2(S+1))
    late: Array  # (R,)
    band: Array  # (1,)

    def parts(self) -> list[Array]:
        """All arrays, for reductions."""
        return [getattr(self, field.name) for field in fields(self)]


@dataclass(slots=True, kw_only=True)
class Step:
    """A direction in all three kinds of variables."""

    point: Point
    slack: Duals
    duals: Duals


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Room (-g, positive inside), link pieces and latency shares at a point."""

    room: Duals
    link: Link
    share_x: Array  # share of the cluster's latency due to each hop
    share_cap: Array
    width: Array  # bandwidth as a share of the total
    objective_tau: float


class InteriorPoint:
    """One solve; kept as an object because a dozen arrays belong to every formula."""

    def __init__(self, problem: RadioProblem) -> None:
        self.problem = problem
        self.rows, self.size = problem.used_rh.shape
        self.half = self.size // 2
        capped = (problem.cap_weight_r > 0)[:, None]
        used = problem.used_rh
        self.masks = Duals(
            cap=(used & capped).astype(float),
            stage=np.repeat(capped, 2, axis=1).astype(float),
            power=used.astype(float),
            late=np.ones(self.rows),
            band=np.ones(1),
        )
        self.count = sum(float(mask.sum()) for mask in self.masks.parts())
        self.log_stage = np.log(np.maximum(problem.stage_max_r2, 1e-12))

    def solve(self) -> tuple[Point, Duals, int]:
        """The optimum, its multipliers and the number of Newton steps."""
        point = self._start()
        self.scale = 1.0 / self._objective(point)
        value = self._evaluate(point)
        slack = _each(lambda room: np.maximum(room, 1e-2), value.room)
        duals = _each(lambda mask, s: mask / (self.count * s), self.masks, slack)
        for steps in range(1, MAX_STEPS + 1):
            point, slack, duals = self._advance(point, value, slack, duals)
            value = self._evaluate(point)
            self.gap = _dot(duals, slack)
            self.residual = self._residual(value, slack, duals)
            if self.gap < TOLERANCE and self.residual < 10.0 * TOLERANCE:
                break
        return point, _each(lambda dual: dual / self.scale, duals), steps

    # -- start ----------------------------------------------------------------------------

    def _start(self) -> Point:
        p = self.problem
        omega = np.full(self.rows, np.log(0.9 * p.bandwidth_hz / self.rows))
        width = np.exp(self._log_width(omega))
        snr = 0.8 * p.power_max_rh / p.noise_over_gain_rh
        x = np.log(p.bits_ln2_rh / (width * np.log1p(snr / width)))
        x = np.where(p.used_rh, x, 0.0)
        slowest = np.where(p.used_rh, x, -np.inf).reshape(self.rows, 2, self.half).max(2)
        cap = np.maximum(slowest, self.log_stage) + 0.1
        late, _, _ = self._late(x, cap)
        return Point(x=x, omega=omega, cap=cap, tau=float(late.max()) + 0.1)

    # -- evaluation -----------------------------------------------------------------------

    def _log_width(self, omega: Array) -> Array:
        p = self.problem
        return np.where(p.edge_rh, omega[:, None], np.log(p.d2d_hz_r)[:, None])

    def _late(self, x: Array, cap: Array) -> tuple[Array, Array, Array]:
        p = self.problem
        hop = np.where(p.used_rh, p.weight_r[:, None] * np.exp(x), 0.0)
        slow = np.where(p.cap_weight_r[:, None] > 0, p.cap_weight_r[:, None] * np.exp(cap), 0.0)
        total = p.fixed_s_r + hop.sum(1) + slow.sum(1)
        return np.log(total), hop / total[:, None], slow / total[:, None]

    def _objective(self, point: Point) -> float:
        link = link_terms(self.problem, point.x, self._log_width(point.omega))
        energy = float((link.energy * self.problem.used_rh).sum())
        return self.problem.latency_price * float(np.exp(point.tau)) + energy

    def _evaluate(self, point: Point) -> Evaluation:
        p = self.problem
        link = link_terms(p, point.x, self._log_width(point.omega))
        late, share_x, share_cap = self._late(point.x, point.cap)
        width = np.exp(point.omega) / p.bandwidth_hz
        cap_h = np.repeat(point.cap, self.half, axis=1)
        room = Duals(
            cap=np.where(self.masks.cap > 0, cap_h - point.x, 1.0),
            stage=np.where(self.masks.stage > 0, point.cap - self.log_stage, 1.0),
            power=np.where(p.used_rh, -link.power, 1.0),
            late=point.tau - late,
            band=np.array([1.0 - width.sum()]),
        )
        return Evaluation(
            room=room,
            link=link,
            share_x=share_x,
            share_cap=share_cap,
            width=width,
            objective_tau=self.scale * p.latency_price * float(np.exp(point.tau)),
        )

    def _gradient(self, value: Evaluation, weight: Duals) -> Point:
        """Gradient of the objective plus ``weight``-ed constraints."""
        p, link = self.problem, value.link
        edge = p.edge_rh & p.used_rh
        power = weight.power * p.used_rh
        by_y = p.used_rh * self.scale * link.energy_1 + power * link.power_1
        x = by_y + weight.cap * self.masks.cap + weight.late[:, None] * value.share_x
        omega = np.where(edge, by_y + power, 0.0).sum(1) + weight.band[0] * value.width
        capped = (weight.cap * self.masks.cap).reshape(self.rows, 2, self.half).sum(2)
        cap = weight.late[:, None] * value.share_cap - capped - weight.stage * self.masks.stage
        return Point(x=x, omega=omega, cap=cap, tau=value.objective_tau - float(weight.late.sum()))

    def _residual(self, value: Evaluation, slack: Duals, duals: Duals) -> float:
        g = self._gradient(value, duals)
        total = (g.x**2).sum() + (g.omega**2).sum() + (g.cap**2).sum() + g.tau**2
        missed = _each(lambda s, room, mask: mask * (s - room), slack, value.room, self.masks)
        return float(np.sqrt(total + _dot(missed, missed)))

    # -- one Newton step ------------------------------------------------------------------

    def _advance(
        self, point: Point, value: Evaluation, slack: Duals, duals: Duals
    ) -> tuple[Point, Duals, Duals]:
        """Mehrotra's predictor and corrector; one factorisation for both."""
        missed = _each(lambda s, room, mask: mask * (s - room), slack, value.room, self.masks)
        curve = _each(lambda dual, s: dual / s, duals, slack)
        newton = self._newton(value, duals, curve)
        product = _each(lambda dual, s: dual * s, duals, slack)
        guess = self._direction(value, newton, (slack, duals, curve, missed), product)
        aim = self._aim(slack, duals, guess)
        bent = _each(
            lambda pr, ds, dl, mask: mask * (pr + ds * dl - aim),
            product,
            guess.slack,
            guess.duals,
            self.masks,
        )
        step = self._direction(value, newton, (slack, duals, curve, missed), bent)
        primal = min(REACH * _to_boundary(slack, step.slack), 1.0)
        primal = min(primal, STRIDE / max(float(np.abs(step.point.x).max()), STRIDE))
        dual = min(REACH * _to_boundary(duals, step.duals), 1.0)
        return (
            point.moved(step.point, primal),
            _each(lambda s, ds: s + primal * ds, slack, step.slack),
            _each(lambda y, dy: y + dual * dy, duals, step.duals),
        )

    def _aim(self, slack: Duals, duals: Duals, guess: Step) -> float:
        """The complementarity to aim for: little where the plain Newton step gets far."""
        primal = min(_to_boundary(slack, guess.slack), 1.0)
        dual = min(_to_boundary(duals, guess.duals), 1.0)
        ahead = _each(lambda s, ds: s + primal * ds, slack, guess.slack)
        moved = _each(lambda y, dy: y + dual * dy, duals, guess.duals)
        now, then = _dot(slack, duals), _dot(ahead, moved)
        return float((then / now) ** 3 * now / self.count)

    def _direction(
        self,
        value: Evaluation,
        newton: Newton,
        state: tuple[Duals, Duals, Duals, Duals],
        product: Duals,
    ) -> Step:
        slack, duals, curve, missed = state
        pulled = _each(
            lambda dual, pr, s, c, miss: dual - pr / s + c * miss,
            duals,
            product,
            slack,
            curve,
            missed,
        )
        point = newton.solve(self._gradient(value, pulled))
        along = self._along(value, point)
        ds = _each(lambda miss, a, mask: -mask * (miss + a), missed, along, self.masks)
        dy = _each(lambda pr, y, d, s: -(pr + y * d) / s, product, duals, ds, slack)
        return Step(point=point, slack=ds, duals=dy)

    def _along(self, value: Evaluation, step: Point) -> Duals:
        """Directional derivatives of every constraint along ``step``."""
        link, edge = value.link, self.problem.edge_rh
        domega = np.where(edge, step.omega[:, None], 0.0)
        dy = step.x + domega
        return Duals(
            cap=step.x - np.repeat(step.cap, self.half, axis=1),
            stage=-step.cap,
            power=link.power_1 * dy + domega,
            late=(value.share_x * step.x).sum(1) + (value.share_cap * step.cap).sum(1) - step.tau,
            band=np.array([float((value.width * step.omega).sum())]),
        )

    def _newton(self, value: Evaluation, duals: Duals, curve: Duals) -> Newton:
        shares = np.concatenate([value.share_x, np.zeros((self.rows, 1)), value.share_cap], axis=1)
        return Newton(
            inverse=np.asarray(np.linalg.inv(self._matrix(value, duals, curve)), dtype=np.float64),
            cross=-curve.late[:, None] * shares,
            width=value.width,
            tau_curve=value.objective_tau + float(curve.late.sum()),
            band_curve=float(curve.band[0]),
        )

    def _matrix(self, value: Evaluation, duals: Duals, curve: Duals) -> Array:
        """Per-cluster Hessians over (x, omega, phi, beta), (R, n, n)."""
        p, link, size = self.problem, value.link, self.size
        used, edge = p.used_rh, p.edge_rh & p.used_rh
        bend = used * (self.scale * link.energy_2 + duals.power * link.power_2)
        k_cap, k_power = curve.cap * self.masks.cap, curve.power * used
        late, k_late = duals.late[:, None], curve.late[:, None]
        shares = np.concatenate([value.share_x, np.zeros((self.rows, 1)), value.share_cap], axis=1)
        matrix = ((k_late - late) * shares)[:, :, None] * shares[:, None, :]
        index = np.arange(size)
        grad_omega = np.where(edge, 1.0 + link.power_1, 0.0)
        matrix[:, index, index] += (
            bend + k_power * link.power_1**2 + k_cap + late * value.share_x + ~used
        )
        mixed = np.where(edge, bend, 0.0) + k_power * link.power_1 * grad_omega
        matrix[:, index, size] += mixed
        matrix[:, size, index] += mixed
        own = np.where(edge, bend, 0.0) + k_power * grad_omega**2
        matrix[:, size, size] += own.sum(1) + duals.band[0] * value.width
        for side in range(2):
            part = slice(side * self.half, (side + 1) * self.half)
            matrix[:, index[part], size + 1 + side] -= k_cap[:, part]
            matrix[:, size + 1 + side, index[part]] -= k_cap[:, part]
            free = 1.0 - self.masks.stage[:, side]
            matrix[:, size + 1 + side, size + 1 + side] += (
                k_cap[:, part].sum(1)
                + curve.stage[:, side] * self.masks.stage[:, side]
                + duals.late * value.share_cap[:, side]
                + free
            )
        return np.asarray(matrix)


class Newton:
    """The factorised Newton system: per-cluster inverses and their 2 x 2 coupling."""

    def __init__(
        self, *, inverse: Array, cross: Array, width: Array, tau_curve: float, band_curve: float
    ) -> None:
        self.inverse, self.cross, self.width = inverse, cross, width
        self.size = inverse.shape[1] - 3
        self.by_tau = np.einsum("rij,rj->ri", inverse, cross)
        self.by_band = inverse[:, :, self.size] * width[:, None]
        self.system = np.array(
            [
                [tau_curve - (cross * self.by_tau).sum(), -(cross * self.by_band).sum()],
                [
                    (width * self.by_tau[:, self.size]).sum(),
                    1.0 / band_curve + (width * self.by_band[:, self.size]).sum(),
                ],
            ]
        )

    def solve(self, gradient: Point) -> Point:
        """The step that cancels ``gradient``."""
        right = -np.concatenate([gradient.x, gradient.omega[:, None], gradient.cap], axis=1)
        alone = np.einsum("rij,rj->ri", self.inverse, right)
        target = np.array(
            [
                -gradient.tau - float((self.cross * alone).sum()),
                float((self.width * alone[:, self.size]).sum()),
            ]
        )
        tau, band = np.linalg.solve(self.system, target)
        d = alone - self.by_tau * tau - self.by_band * band
        size = self.size
        return Point(x=d[:, :size], omega=d[:, size], cap=d[:, size + 1 :], tau=float(tau))


def _each(function: Callable[..., Array], *values: Duals) -> Duals:
    """``function`` applied constraint group by constraint group."""
    return Duals(
        cap=function(*(v.cap for v in values)),
        stage=function(*(v.stage for v in values)),
        power=function(*(v.power for v in values)),
        late=function(*(v.late for v in values)),
        band=function(*(v.band for v in values)),
    )


def _dot(left: Duals, right: Duals) -> float:
    pairs = zip(left.parts(), right.parts(), strict=True)
    return float(sum((a * b).sum() for a, b in pairs))


def _to_boundary(values: Duals, step: Duals) -> float:
    longest = np.inf
    for value, change in zip(values.parts(), step.parts(), strict=True):
        falling = change < 0
        if falling.any():
            longest = min(longest, float((-value[falling] / change[falling]).min()))
    return longest

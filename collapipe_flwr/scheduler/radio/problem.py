"""The radio block as a geometric program, evaluated for all clusters at once.

Variables are logarithms: x = ln(time) of every hop and direction, omega = ln(bandwidth towards
the edge), phi and beta = ln(slowest resource) of the forward and backward pass, tau = ln(round
latency). With ``z = A ln2 / (t w)`` a transmission costs ``(N0/g) A ln2 (e^z - 1)/z`` joules and
needs the power ``(N0/g) w (e^z - 1)``; both are convex in the logarithms, as are the latency
(a sum of exponentials) and the bandwidth sum. Hence one optimum. See docs/theory.md, "Radio".

Under 1F1B phi alone bounds both passes, too high where an early stage is the slowest.

Suffixes in `RadioProblem`: ``_r`` row (one cluster each), ``_h`` hop-direction (forward hops, then
backward hops). `FlatHops` holds the hops in one flat line for the vectorized solver: unused slots
are gone; hops stand cluster by cluster, and within a cluster pass by pass, so that sums over
clusters or passes are sums over stretches. Exactly two hops of every cluster see the shared
bandwidth. There ``_h`` is a used hop-direction and ``_c`` a cap (row-major: phi, then beta).

All constraints stand in one flat vector (`ConstraintIndex`), so that the interior point's
arithmetic on slacks and duals is plain array arithmetic. Clusters with one micro-batch have no
slowest resource to bound: their entries are masked out. `RadioTerms.settle` turns an interior
point's last iterate into a plan without violations.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from collapipe_flwr.costs.arrays import Array, Ints, Mask, Places
from collapipe_flwr.costs.chain import Chain
from collapipe_flwr.costs.radio import LN2

EXPONENT_MAX = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RadioProblem:
    """Minimise ``latency_price * max latency + sum price * energy`` over times and bandwidth."""

    used_rh: Mask
    edge_rh: Mask  # hops over the shared bandwidth
    bits_ln2_rh: Array  # A ln2
    noise_over_gain_rh: Array
    power_max_rh: Array
    d2d_hz_rh: Array
    price_rh: Array  # objective per joule of this transmission, times its number in a round
    weight_r: Array  # H: how often a hop's time counts in the round
    cap_weight_r2: Array  # H (J - 1): how often the slowest resource counts, phi and beta
    fixed_s_r: Array  # latency outside hops and slowest resources
    stage_max_r2: Array  # slowest compute stage that phi and beta bound
    cap_of_h: Ints  # which of phi (0) and beta (1) bounds a hop-direction
    latency_price: float
    bandwidth_hz: float


def make_radio_problem(
    chain: Chain, price_rs: Array, *, latency_price: float, bandwidth_hz: float
) -> RadioProblem:
    """Build the radio block; ``price_rs`` per joule of control unit and slots (R, S + 1)."""
    hops, count = chain.hops, chain.rows.micro_batches_r.astype(np.float64)
    forward, backward = chain.forward_stage_s, chain.backward_stage_s
    backward_price = np.concatenate([price_rs[:, 1:], np.zeros((len(chain.rows), 1))], axis=1)
    backward_price = np.where(hops.to_edge, 0.0, backward_price)
    sends, further = (chain.steps_r * count)[:, None], chain.steps_r * (count - 1.0)
    # Under 1F1B one slowest resource, phi, paces both passes; under GPipe each has its own.
    overlaps = chain.options.schedule == "1f1b"
    slowest = [(forward + backward).max(1)] * 2 if overlaps else [forward.max(1), backward.max(1)]

    def both(values: Array) -> Array:
        return np.concatenate([values, values], axis=1)

    return RadioProblem(
        used_rh=np.concatenate([hops.used, hops.used], axis=1),
        edge_rh=np.concatenate([hops.to_edge, hops.to_edge], axis=1),
        bits_ln2_rh=LN2 * both(np.where(hops.used, hops.bits, 1.0)),
        noise_over_gain_rh=both(chain.noise_over_gain),
        power_max_rh=np.concatenate([chain.power_max_w[:, :, 0], chain.power_max_w[:, :, 1]], 1),
        d2d_hz_rh=both(chain.d2d_hz_rh),
        price_rh=np.concatenate([price_rs, backward_price], axis=1) * sends,
        weight_r=chain.steps_r,
        cap_weight_r2=np.stack([further, further * (not overlaps)], axis=1),
        fixed_s_r=chain.fixed_s + chain.steps_r * (forward.sum(1) + backward.sum(1)),
        stage_max_r2=np.stack(slowest, axis=1),
        cap_of_h=np.repeat([0, 0 if overlaps else 1], hops.used.shape[1]),
        latency_price=latency_price,
        bandwidth_hz=bandwidth_hz,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatHops:
    """Constants of every used hop, of its row and of the cap that bounds it.

    A hop's exponent is ``z = exp(log_bits_h - x - omega)``, omega only towards the edge: elsewhere
    the fixed bandwidth is part of ``log_bits_h``. ``low_h`` is ln(time) at full power; towards the
    edge it depends on omega and stands in ``edge_low``.
    """

    rows: int
    sides: int  # caps per row: phi and beta, or phi alone
    flat_h: Places  # position in the problem's (R, 2(S+1)) arrays
    row_h: Places
    cap_h: Places
    starts_c: Places  # where the stretch of each cap begins
    edge_r2: Places  # position of each row's two hops over the shared bandwidth
    log_bits_h: Array
    worth_h: Array  # objective of sending at vanishing power
    weight_h: Array
    low_h: Array
    edge_snr_r2: Array  # SNR at full power, times bandwidth

    def sum_by_cap(self, values: Array) -> Array:
        """Sum over the stretch of every cap, along the last axis."""
        return np.add.reduceat(values, self.starts_c, axis=-1)

    def sum_by_row(self, values: Array) -> Array:
        """Add up values of a row's caps, (..., R, sides), or of its two edge hops, (R, 2)."""
        if values.shape[-1] == 1:
            return np.asarray(values[..., 0])
        return np.asarray(values[..., 0] + values[..., 1])

    def sum_lines_by_cap(self, values: Array) -> Array:
        """Sum several lines of hops by cap, (lines, R, sides)."""
        return self.sum_by_cap(values).reshape(len(values), self.rows, self.sides)

    def compute_edge_low(self, omega: Array) -> tuple[Array, Array, Array]:
        """Compute ln(time) at full power to the edge, (R, 2), and two derivatives by omega."""
        snr = self.edge_snr_r2 * np.exp(-omega)[:, None]
        gained, rest = np.log1p(snr), 1.0 / (1.0 + snr)
        ratio = snr * rest / gained
        low = self.log_bits_h[self.edge_r2] - omega[:, None] - np.log(gained)
        return low, ratio - 1.0, ratio * (ratio - rest)


def flatten_hops(problem: RadioProblem) -> FlatHops:
    """Gather the used hops of ``problem``."""
    p, (rows, slots) = problem, problem.used_rh.shape
    flat = np.flatnonzero(p.used_rh)
    row = flat // slots
    side = p.cap_of_h[flat % slots]
    sides = int(p.cap_of_h[-1]) + 1
    cap = row * sides + side
    bits, noise = p.bits_ln2_rh.ravel()[flat], p.noise_over_gain_rh.ravel()[flat]
    edge = np.flatnonzero(p.edge_rh.ravel()[flat]).reshape(rows, 2)
    snr, width = p.power_max_rh.ravel()[flat] / noise, p.d2d_hz_rh.ravel()[flat]
    log_bits = np.log(bits / width)
    log_bits[edge] = np.log(bits[edge])
    return FlatHops(
        rows=rows,
        sides=sides,
        flat_h=flat,
        row_h=row,
        cap_h=cap,
        starts_c=np.searchsorted(cap, np.arange(rows * sides)),
        edge_r2=edge,
        log_bits_h=log_bits,
        worth_h=p.price_rh.ravel()[flat] * noise * bits,
        weight_h=p.weight_r[row],
        low_h=log_bits - np.log(np.log1p(snr / width)),
        edge_snr_r2=snr[edge],
    )


CATCH_UPS = 6  # rounds of catching up with the round
ON_TIME = 1e-9  # in ln(latency)


@dataclass(slots=True, kw_only=True)
class Point:
    """Logarithms of hop times, bandwidths, slowest resources and the round; or steps thereof."""

    x: Array  # (hops,)
    omega: Array  # (R,)
    cap: Array  # (R, sides): phi, beta
    tau: float

    def move(self, step: Point, length: float) -> Point:
        """Return this point plus ``length`` times ``step``."""
        return Point(
            x=self.x + length * step.x,
            omega=self.omega + length * step.omega,
            cap=self.cap + length * step.cap,
            tau=self.tau + length * step.tau,
        )

    def compute_square(self) -> float:
        """Return the squared length."""
        parts = (self.x, self.omega, self.cap)
        return float(sum(np.vdot(part, part) for part in parts)) + self.tau**2


@dataclass(slots=True)
class ConstraintParts:
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
        parts = self.split(self.mask)
        parts.cap[...] = bound.ravel()[hops.cap_h]
        parts.stage[...] = bound
        self.idle = np.flatnonzero(self.mask == 0.0)
        self.count = float(self.mask.sum())
        self.unbound = 1.0 - bound  # keeps the pivots of unused caps regular

    def split(self, flat: Array) -> ConstraintParts:
        """Return writable views of ``flat``."""
        return ConstraintParts(
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
        self.hops = flatten_hops(problem)
        self.index = ConstraintIndex(self.hops, problem)
        self.cap_weight = problem.cap_weight_r2[:, : self.hops.sides]
        self.log_stage = np.log(np.maximum(problem.stage_max_r2[:, : self.hops.sides], 1e-12))
        self.scale = 1.0

    def compute_objective(self, point: Point) -> float:
        """Compute what is minimised, in the problem's own units."""
        energy = float(self._compute_energy(point)[0].sum()) / self.scale
        return self.problem.latency_price * float(np.exp(point.tau)) + energy

    def evaluate(self, point: Point) -> Evaluation:
        p, hops = self.problem, self.hops
        _, energy_1, energy_2 = self._compute_energy(point)
        late, share_x, share_cap = self._compute_late(point.x, point.cap)
        edge_low, slope, low_bend = hops.compute_edge_low(point.omega)
        width = np.exp(point.omega) / p.bandwidth_hz
        low = hops.low_h.copy()
        low[hops.edge_r2] = edge_low
        margin = np.empty(self.index.length)
        parts = self.index.split(margin)
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

    def settle(self, point: Point) -> Point:
        """Return a point beside ``point`` that keeps every limit exactly.

        Bandwidth adds up, no hop is faster than at full power, hops that cost nothing are as fast,
        and clusters behind the round speed up.
        """
        hops = self.hops
        omega = point.omega + np.log(self.problem.bandwidth_hz / np.exp(point.omega).sum())
        low = hops.low_h.copy()
        low[hops.edge_r2] = hops.compute_edge_low(omega)[0]
        x = np.where(hops.worth_h > 0.0, np.maximum(point.x, low), low)
        for _ in range(CATCH_UPS):
            late, share_x, share_cap = self._compute_late(x, self._find_slowest(x))
            behind = np.maximum(late - point.tau, 0.0)
            if behind.max() < ON_TIME:
                break
            sent = hops.sum_by_row(hops.sum_by_cap(share_x).reshape(share_cap.shape) + share_cap)
            x = np.maximum(x - (behind / sent)[hops.row_h], low)
        cap = self._find_slowest(x)
        return Point(x=x, omega=omega, cap=cap, tau=float(self._compute_late(x, cap)[0].max()))

    def _find_slowest(self, x: Array) -> Array:
        """Return the least caps that hop times allow."""
        hops = np.maximum.reduceat(x, self.hops.starts_c).reshape(self.log_stage.shape)
        return np.maximum(hops, self.log_stage)

    def _compute_energy(self, point: Point) -> tuple[Array, Array, Array]:
        """Compute priced, scaled energy of every hop and two derivatives by y = x + omega."""
        hops = self.hops
        z = hops.log_bits_h - point.x
        z[hops.edge_r2] -= point.omega[:, None]
        z = np.clip(np.exp(z), 1e-12, EXPONENT_MAX)
        grown, worth = np.expm1(z), self.scale * hops.worth_h
        mean = grown / z
        grown += 1.0
        return worth * mean, worth * (mean - grown), worth * (grown * (z - 1.0) + mean)

    def _compute_late(self, x: Array, cap: Array) -> tuple[Array, Array, Array]:
        """Compute ln(latency) of every row, and the shares of hops and slowest resources in it."""
        hops = self.hops
        hop, slow = hops.weight_h * np.exp(x), self.cap_weight * np.exp(cap)
        sent = hops.sum_by_cap(hop).reshape(hops.rows, hops.sides)
        total = self.problem.fixed_s_r + hops.sum_by_row(sent + slow)
        part = 1.0 / total
        return np.log(total), hop * part[hops.row_h], slow * part[:, None]

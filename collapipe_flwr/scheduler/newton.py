"""The linear algebra of the interior point: constraint vectors, points, the coupled Newton system.

Constraints of every row stand side by side in one flat vector, so that the algorithm's vector
arithmetic is plain array arithmetic; ``Layout`` names the parts. Clusters meet only in the round
latency tau and the bandwidth sum: one small matrix per cluster and a 2 x 2 system couple them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(slots=True, kw_only=True)
class Point:
    """Logarithms of hop times, bandwidths, slowest resources and the round; or steps thereof."""

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

    def square(self) -> float:
        """Squared length."""
        parts = (self.x, self.omega, self.cap)
        return float(sum(np.vdot(part, part) for part in parts)) + self.tau**2


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Views of one flat constraint vector."""

    cap: Array  # (R, 2(S+1)) hop within its pass's slowest resource
    stage: Array  # (R, 2) slowest compute stage within it
    power: Array  # (R, 2(S+1)) power limit
    late: Array  # (R,) cluster within the round
    band: Array  # (1,) bandwidth sum


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the parts of a flat constraint vector stand."""

    rows: int
    size: int  # 2 (S + 1)

    @property
    def length(self) -> int:
        """Entries of a flat vector."""
        return self.rows * (2 * self.size + 3) + 1

    def parts(self, flat: Array) -> Parts:
        """Writable views of ``flat``."""
        table, size = flat[:-1].reshape(self.rows, 2 * self.size + 3), self.size
        return Parts(
            cap=table[:, :size],
            stage=table[:, size : size + 2],
            power=table[:, size + 2 : -1],
            late=table[:, -1],
            band=flat[-1:],
        )


def to_boundary(values: Array, step: Array) -> float:
    """How far ``values + length * step`` stays non-negative, at most 1e3.

    Entries that are masked out are 0 and do not move.
    """
    fastest_fall = float(np.max(-step / (values + 1e-300)))
    return 1.0 / max(fastest_fall, 1e-3)


@dataclass(frozen=True, slots=True, kw_only=True)
class HopCurves:
    """Second derivatives in one cluster's hops, apart from the latency's coupling.

    Hop h has the energy ``bend`` in y = x + ln w, the power limit's slopes ``slope`` and
    ``slope + 1`` in x and omega with weight ``k_power``, the cap's weight ``k_cap`` and ``own`` for
    everything else in x alone. ``edge`` marks the hops that see omega.
    """

    bend: Array
    slope: Array
    k_power: Array
    k_cap: Array
    own: Array
    edge: Array

    def pivots(self) -> tuple[Array, Array]:
        """The diagonal in x, and what is left of it without the cap."""
        rest = self.bend + self.k_power * self.slope**2 + self.own
        return rest + self.k_cap, rest

    def by_omega(self) -> Array:
        """Cross derivative of x and omega."""
        return self.edge * (self.bend + self.k_power * self.slope * (self.slope + 1.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class NewtonSystem:
    """Symmetric system over all clusters' (x, omega, phi, beta) and the shared tau.

    Hops meet only through omega, phi and beta, so they are eliminated by hand (in a form without
    cancellation) and a 3 x 3 system per cluster remains. The latency couples all of a cluster by
    the rank-one term ``lift * share share'``: Sherman and Morrison. Clusters couple through tau
    and the bandwidth sum: a 2 x 2 system.
    """

    hops: HopCurves
    sides: Array  # (2(S+1), 2) which of phi and beta bounds a hop
    ends: Array  # (R, 3) diagonal of (omega, phi, beta) apart from the hops
    share: Array  # (R, 2(S+1) + 3)
    lift: Array  # (R,)
    k_late: Array  # (R,)
    width: Array  # (R,) coupling of omega with the bandwidth sum
    tau_curve: float
    band_curve: float

    def solve(self, gradient: Point) -> Point:
        """The step that cancels ``gradient``; raises LinAlgError for singular systems."""
        size = self.hops.bend.shape[1]
        right = -np.concatenate([gradient.x, gradient.omega[:, None], gradient.cap], axis=1)
        by_band = np.zeros_like(right)
        by_band[:, size] = self.width
        alone, share, band = self._apart([right, self.share, by_band])
        alone, share, band = self._lifted([alone, share, band], share)
        tau = -self.k_late[:, None] * share
        cross, width = -self.k_late[:, None] * self.share, self.width
        system = [
            [self.tau_curve - np.vdot(cross, tau), -np.vdot(cross, band)],
            [np.vdot(width, tau[:, size]), 1.0 / self.band_curve + np.vdot(width, band[:, size])],
        ]
        target = [-gradient.tau - np.vdot(cross, alone), np.vdot(width, alone[:, size])]
        step_tau, pull = np.linalg.solve(np.array(system), np.array(target))
        d = alone - tau * step_tau - band * pull
        return Point(x=d[:, :size], omega=d[:, size], cap=d[:, size + 1 :], tau=float(step_tau))

    def _lifted(self, solutions: list[Array], share: Array) -> list[Array]:
        """Add the latency's rank-one term to solutions of the rest."""
        divisor = 1.0 + self.lift * (self.share * share).sum(1)
        return [
            s - (self.lift * (self.share * s).sum(1) / divisor)[:, None] * share for s in solutions
        ]

    def _apart(self, rights: list[Array]) -> list[Array]:
        """Solve every cluster without the latency's coupling."""
        hops, size = self.hops, self.hops.bend.shape[1]
        pivot, rest = hops.pivots()
        mixed = hops.by_omega()
        coupling = np.concatenate(
            [mixed[:, :, None], -hops.k_cap[:, :, None] * self.sides[None]], axis=2
        )
        small = self._small(pivot, rest, mixed)
        reduced = [
            r[:, size:] - np.einsum("rh,rhc->rc", r[:, :size] / pivot, coupling) for r in rights
        ]
        ends = np.linalg.solve(small, np.stack(reduced, axis=2))
        inner = [
            (r[:, :size] - np.einsum("rhc,rc->rh", coupling, ends[:, :, k])) / pivot
            for k, r in enumerate(rights)
        ]
        return [np.concatenate([x, ends[:, :, k]], axis=1) for k, x in enumerate(inner)]

    def _small(self, pivot: Array, rest: Array, mixed: Array) -> Array:
        """The 3 x 3 Schur complements, without differences of large numbers."""
        hops = self.hops
        small = np.zeros((len(pivot), 3, 3))
        small[:, [0, 1, 2], [0, 1, 2]] = self.ends
        own = hops.edge * (hops.bend + hops.k_power * (hops.slope + 1.0) ** 2)
        left = hops.edge * hops.bend * hops.k_power + (hops.own + hops.k_cap) * own
        small[:, 0, 0] += (left / pivot).sum(1)
        small[:, [1, 2], [1, 2]] += (hops.k_cap * rest / pivot) @ self.sides
        across = (mixed * hops.k_cap / pivot) @ self.sides
        small[:, 0, 1:] += across
        small[:, 1:, 0] += across
        return small

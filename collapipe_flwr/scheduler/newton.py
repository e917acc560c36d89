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
    """How far ``values + length * step`` stays non-negative, at most 1e3."""
    with np.errstate(divide="ignore", invalid="ignore"):
        lengths = np.where(step < 0, -values / step, np.inf)
    return min(float(lengths.min()), 1e3)


@dataclass(frozen=True, slots=True, kw_only=True)
class NewtonSystem:
    """Symmetric system over all clusters' (x, omega, phi, beta) and the shared tau."""

    matrix: Array  # (R, n, n) with n = 2(S+1) + 3
    cross: Array  # (R, n) coupling with tau
    width: Array  # (R,) coupling of omega with the bandwidth sum
    tau_curve: float
    band_curve: float

    def solve(self, gradient: Point) -> Point:
        """The step that cancels ``gradient``; raises LinAlgError for singular systems."""
        size, cross, width = self.matrix.shape[1] - 3, self.cross, self.width
        right = -np.concatenate([gradient.x, gradient.omega[:, None], gradient.cap], axis=1)
        by_band = np.zeros_like(right)
        by_band[:, size] = width
        solved = np.linalg.solve(self.matrix, np.stack([right, cross, by_band], axis=2))
        alone, tau, band = (solved[:, :, k] for k in range(3))
        system = [
            [self.tau_curve - np.vdot(cross, tau), -np.vdot(cross, band)],
            [np.vdot(width, tau[:, size]), 1.0 / self.band_curve + np.vdot(width, band[:, size])],
        ]
        target = [-gradient.tau - np.vdot(cross, alone), np.vdot(width, alone[:, size])]
        step_tau, pull = np.linalg.solve(np.array(system), np.array(target))
        d = alone - tau * step_tau - band * pull
        return Point(x=d[:, :size], omega=d[:, size], cap=d[:, size + 1 :], tau=float(step_tau))

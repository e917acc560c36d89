"""Convergence: a closed-form bound, and rounds to a target gradient norm.

For a non-convex, L_s-smooth loss, plain SGD steps ``eta``, gradient noise ``sigma^2`` per example
and client drift ``kappa^2``, H_m steps on batches B_m give, with ``tau = sum p_m H_m`` and
``w_m = p_m H_m / tau``:

    mean ||grad F||^2 <= 4 Delta / (eta tau R) + xi
    xi = 4 eta L sigma^2 tau sum_m w_m^2 / (H_m B_m)
       + 3 eta^2 L^2 sigma^2 sum_m w_m (H_m - 1) / B_m + 6 eta^2 L^2 kappa^2 max_m H_m (H_m - 1)

where F weighs clusters by w_m, as long as ``eta tau L <= 1/2`` and
``2 eta^2 L^2 max_m H_m (H_m - 1) <= 1/3``. So ``R_eps = 4 Delta / (eta tau (eps - xi))`` rounds
reach ``eps``. Derived in docs/theory.md, section 4, along the lines of FedNova (Wang et al. 2020,
arXiv 2007.07481). Our reconstruction.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningConstants:
    """What the bound needs to know about the learning problem."""

    learning_rate: float
    smoothness: float  # L_s
    noise: float  # sigma^2, per example
    drift: float  # kappa^2
    loss_gap: float  # Delta
    target: float  # eps, a squared gradient norm


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundSums:
    """The sums over clusters that the bound consists of; arrays of any one shape."""

    tau: Array  # sum p H
    variance: Array  # sum p^2 H / B
    wander: Array  # sum p H (H - 1) / B
    drift: Array  # max H (H - 1)

    def floor(self, constants: LearningConstants) -> Array:
        """``xi``: what no number of rounds goes below."""
        step = constants.learning_rate * constants.smoothness
        stochastic = 4.0 * step * constants.noise * self.variance / self.tau
        wander = 3.0 * step**2 * constants.noise * self.wander / self.tau
        return np.asarray(stochastic + wander + 6.0 * step**2 * constants.drift * self.drift)

    def rounds(self, constants: LearningConstants) -> Array:
        """``R_eps``; infinite where the target lies under the floor."""
        room = constants.target - self.floor(constants)
        needed = 4.0 * constants.loss_gap / (constants.learning_rate * self.tau)
        with np.errstate(divide="ignore"):
            return np.where(room > 0, needed / np.maximum(room, 1e-300), np.inf)


def bound_sums(shares: Array, steps: Array, batches: Array) -> BoundSums:
    """Sums over the last axis: clusters with data shares p, steps H and batches B."""
    return BoundSums(
        tau=np.asarray((shares * steps).sum(-1)),
        variance=np.asarray((shares**2 * steps / batches).sum(-1)),
        wander=np.asarray((shares * steps * (steps - 1.0) / batches).sum(-1)),
        drift=np.asarray((steps * (steps - 1.0)).max(-1)),
    )


def exchanged(
    shares: Array, steps: Array, batches: Array, cluster_r: NDArray[np.int64], new: BoundRow
) -> BoundSums:
    """Sums for rows that replace one cluster's H and B each, the others kept."""
    total, share = bound_sums(shares, steps, batches), shares[cluster_r]
    old_h, old_b, h, b = steps[cluster_r], batches[cluster_r], new.steps, new.batches
    return BoundSums(
        tau=total.tau + share * (h - old_h),
        variance=total.variance + share**2 * (h / b - old_h / old_b),
        wander=total.wander + share * (h * (h - 1.0) / b - old_h * (old_h - 1.0) / old_b),
        drift=np.maximum(others_max(steps * (steps - 1.0))[cluster_r], h * (h - 1.0)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundRow:
    """Steps and batches of the rows that are tried, (R,)."""

    steps: Array
    batches: Array


def others_max(values: Array) -> Array:
    """The largest of all other entries, for every entry; 0 where there is no other."""
    if values.shape[0] == 1:
        return np.zeros(1)
    order = np.argsort(values)
    result = np.full(values.shape, values[order[-1]])
    result[order[-1]] = values[order[-2]]
    return result

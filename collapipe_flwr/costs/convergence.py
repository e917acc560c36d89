"""Convergence: a closed-form bound, and rounds to a target gradient norm.

For a non-convex, L_s-smooth loss, plain SGD steps ``eta``, gradient noise ``sigma^2`` per example
and client drift ``kappa^2``, H_m steps on batches B_m give, with ``tau = sum p_m H_m`` and
``w_m = p_m H_m / tau``:

    mean ||grad F||^2 <= 4 Delta / (eta tau R) + xi
    xi = 4 eta L sigma^2 tau sum_m w_m^2 / (H_m B_m)
       + 3 eta^2 L^2 sigma^2 sum_m w_m (H_m - 1) / B_m + 6 eta^2 L^2 kappa^2 max_m H_m (H_m - 1)

where F weighs clusters by w_m. Where updates are late by s_m rounds and join with
``1 / sqrt(1 + s_m)`` once in 1 + s_m rounds, p_m is that share of p_m (`compute_join_weight`), the
first term grows by the factor ``1 + 2 eta L tau sum_m w_m s_m^2``, and 3 and 6 become 5 and 10. All
as long as ``eta tau L <= 1/2`` and ``2 eta^2 L^2 max_m H_m (H_m - 1) <= 1/3`` (with late updates:
``eta tau L (1 + 2 eta tau L sum_m w_m s_m^2) <= 1/2``, and 1/5).
So ``R_eps = 4 Delta / (eta tau (eps - xi))`` rounds reach ``eps``. Derived in
docs/theory-appendix.md, 4.2, along the lines of FedNova (Wang et al. 2020, arXiv 2007.07481). Our
reconstruction.

Or progress per step is that of McCandlish et al. (2018): a step on a batch B falls short of one on
the true gradient by the factor ``1 + B_noise / B``, with the noise scale
``B_noise = sigma^2 / |grad|^2``. Clusters step on their own batches between two averages:

    R is in proportion to (1 + B_noise (sum_m p_m H_m / B_m) / tau) / tau.

Constants and noise scale are estimated from what training yields anyway (`update`). Gradient noise:
with |G_b|^2 the mean squared gradient norm over batches of b examples,
``E|G_b|^2 = |G|^2 + sigma^2 / b``, so two sizes give both without bias (McCandlish et al. 2018,
arXiv 1812.06162, appendix A). Each is averaged over clusters and rounds, and only then divided;
sizes that hardly differ tell little (`clarity`). Smoothness: secants of successive round updates.
Drift: spread of the clusters' updates around their mean, in units of the measured gradient.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from collapipe_flwr.core.outcome import ClusterOutcome, RoundOutcome
from collapipe_flwr.costs.arrays import Array, Ints

MEMORY = 0.8  # weight of the past in every moving average


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningConstants:
    """The constants of a learning problem in the bound."""

    learning_rate: float
    smoothness: float  # L_s
    noise: float  # sigma^2, per example
    drift: float  # kappa^2
    loss_gap: float  # Delta
    target: float  # eps, a squared gradient norm

    def count_rounds(self, sums: BoundSums) -> Array:
        """Compute ``R_eps``; infinite where the target lies under the floor."""
        room = self.target - sums.compute_floor(self)
        needed = 4.0 * self.loss_gap / (self.learning_rate * sums.tau)
        with np.errstate(divide="ignore"):
            return np.where(room > 0, needed / np.maximum(room, 1e-300), np.inf)


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseScale:
    """The batch size beyond which more examples improve a step little."""

    examples: float  # B_noise

    def count_rounds(self, sums: BoundSums) -> Array:
        """Compute relative rounds for the same progress: 1 is a step on the true gradient."""
        return np.asarray((1.0 + self.examples * sums.alone / sums.tau) / sums.tau)


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundSums:
    """The sums over clusters that the bound consists of; arrays of any one shape."""

    tau: Array  # sum p H
    variance: Array  # sum p^2 H / B
    alone: Array  # sum p H / B
    wander: Array  # sum p H (H - 1) / B
    drift: Array  # max H (H - 1)
    staleness: float = 0.0  # sum w s^2

    def compute_floor(self, constants: LearningConstants) -> Array:
        """Compute ``xi``, which no number of rounds undercuts."""
        step = constants.learning_rate * constants.smoothness
        stale = 1.0 + 2.0 * step * self.tau * self.staleness
        stochastic = 4.0 * step * constants.noise * self.variance / self.tau * stale
        by_noise, by_drift = (5.0, 10.0) if self.staleness else (3.0, 6.0)
        wander = by_noise * step**2 * constants.noise * self.wander / self.tau
        return np.asarray(stochastic + wander + by_drift * step**2 * constants.drift * self.drift)


def sum_bound(shares: Array, steps: Array, batches: Array) -> BoundSums:
    """Sum over the last axis: clusters with data shares p, steps H and batches B."""
    return BoundSums(
        tau=np.asarray((shares * steps).sum(-1)),
        variance=np.asarray((shares**2 * steps / batches).sum(-1)),
        alone=np.asarray((shares * steps / batches).sum(-1)),
        wander=np.asarray((shares * steps * (steps - 1.0) / batches).sum(-1)),
        drift=np.asarray((steps * (steps - 1.0)).max(-1)),
    )


def sum_late_bound(shares: Array, steps: Array, batches: Array, late: Ints) -> BoundSums:
    """Sum over clusters whose updates join so many rounds ``late``."""
    sums = sum_bound(shares := shares * compute_join_weight(late), steps, batches)
    return replace(sums, staleness=float((shares * steps * late**2).sum() / sums.tau))


def compute_join_weight(late: Ints) -> Array:
    """Compute the weight of late updates per round: 1 / sqrt(1 + s) once in 1 + s (FedBuff)."""
    return np.asarray((1.0 + late) ** -1.5)


def sum_exchanges(
    shares: Array,
    now: tuple[Array, Array],
    cluster_r: Ints,
    new: tuple[Array, Array],
) -> BoundSums:
    """Sum for rows that replace one cluster's H and B each and keep those of the others."""
    total, share = sum_bound(shares, *now), shares[cluster_r]
    (steps, batches), (h, b) = now, new
    old_h, old_b = steps[cluster_r], batches[cluster_r]
    return BoundSums(
        tau=total.tau + share * (h - old_h),
        variance=total.variance + share**2 * (h / b - old_h / old_b),
        alone=total.alone + share * (h / b - old_h / old_b),
        wander=total.wander + share * (h * (h - 1.0) / b - old_h * (old_h - 1.0) / old_b),
        drift=np.maximum(find_others_max(steps * (steps - 1.0))[cluster_r], h * (h - 1.0)),
    )


def find_others_max(values: Array) -> Array:
    """Return for every entry the largest of all others; 0 where there is no other."""
    if values.shape[0] == 1:
        return np.zeros(1)
    order = np.argsort(values)
    result = np.full(values.shape, values[order[-1]])
    result[order[-1]] = values[order[-2]]
    return result


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningState:
    """Moving averages; None until a first measurement (then the prior holds)."""

    gradient_square: float | None = None
    noise: float | None = None
    clarity: float = 0.0  # the weight of all rounds in these two
    smoothness: float | None = None
    drift: float | None = None
    loss: float | None = None
    first_gradient_square: float | None = None
    update_norm: float | None = None  # of the last round


# The values that hold before a first measurement.
PRIOR = LearningState(
    gradient_square=1.0, noise=4.0, smoothness=1.0, drift=0.1, loss=2.0, first_gradient_square=1.0
)
MOST_EXAMPLES = 1e6  # of a noise scale: where no gradient is left, larger batches are as good
TINY = 1e-300
TARGET_SHARE = 0.1  # eps as a share of the first squared gradient norm


def update(
    state: LearningState, outcome: RoundOutcome, *, learning_rate: float, mean_steps: float
) -> LearningState:
    """Fold one round's telemetry in; fields that were not measured change nothing."""
    state = _average_noise(state, outcome)
    losses = [c.loss for c in outcome.clusters if c.loss is not None and _is_usable(c.loss)]
    if losses:
        state = replace(state, loss=_blend(state.loss, sum(losses) / len(losses)))
    travelled = learning_rate * max(mean_steps, 1.0)
    moved, change, spread = (
        outcome.movement.norm,
        outcome.movement.change_norm,
        outcome.movement.spread,
    )
    if state.update_norm and change is not None and _is_usable(change):
        secant = change / (travelled * state.update_norm)
        state = replace(state, smoothness=_blend(state.smoothness, secant))
    if moved is not None and _is_usable(moved):
        state = replace(state, update_norm=moved)
    if spread is not None and _is_usable(spread):
        # In units of squared gradients. Beside the measured gradient the update itself is the
        # yardstick: an adaptive optimiser moves much further than the rate times the gradient.
        # Without one, plain SGD is assumed.
        drift = spread / travelled**2
        if moved and state.gradient_square and state.gradient_square > 0:
            drift = spread / moved**2 * state.gradient_square
        state = replace(state, drift=_blend(state.drift, drift))
    return state


def estimate_constants(state: LearningState, learning_rate: float) -> LearningConstants:
    """Return the estimates, else the prior; a drift of 0, as of one cluster, is an estimate."""

    def estimate(name: str) -> float:
        value = getattr(state, name)
        usable = value is not None and (value > 0 or name == "drift")
        return float(value if usable else getattr(PRIOR, name))

    return LearningConstants(
        learning_rate=learning_rate,
        smoothness=estimate("smoothness"),
        noise=estimate("noise"),
        drift=estimate("drift"),
        loss_gap=estimate("loss"),
        target=TARGET_SHARE * estimate("first_gradient_square"),
    )


def estimate_noise_scale(state: LearningState) -> NoiseScale:
    """Return the ratio of both averages; before the first measurement that of the priors.

    The averages are unbiased, so they may fall below 0 where uncertain; here they are clipped at 0.
    """
    if state.noise is None or state.gradient_square is None:
        state = PRIOR
    assert state.noise is not None and state.gradient_square is not None
    noise = max(state.noise, 0.0)
    least = noise / MOST_EXAMPLES
    return NoiseScale(examples=noise / max(state.gradient_square, least, TINY))


def _average_noise(state: LearningState, outcome: RoundOutcome) -> LearningState:
    """Update both moving averages, weighting rounds and clusters by their ``clarity``."""
    found = [each for c in outcome.clusters if (each := _measure_noise(c)) is not None]
    if not found:
        return state
    clarity = sum(each.clarity for each in found) / len(found)
    total = MEMORY * state.clarity + clarity

    def mean(old: float | None, values: list[tuple[float, float]]) -> float:
        new = sum(weight * value for weight, value in values) / len(values)
        return (MEMORY * state.clarity * (old or 0.0) + new) / total

    signal = mean(state.gradient_square, [(each.clarity, each.signal) for each in found])
    return replace(
        state,
        gradient_square=signal,
        noise=mean(state.noise, [(each.clarity, each.noise) for each in found]),
        clarity=total,
        first_gradient_square=state.first_gradient_square or (signal if signal > 0 else None),
    )


@dataclass(frozen=True, slots=True)
class _Noise:
    """Unbiased |G|^2 and sigma^2 of one cluster, and their weight: one over their variance."""

    signal: float
    noise: float
    clarity: float


def _measure_noise(cluster: ClusterOutcome) -> _Noise | None:
    """Measure the noise of one cluster; None where the batch sizes do not differ."""
    g = cluster.gradient_noise
    if g is None or not math.inf > g.big_examples > g.small_examples > 0:
        return None
    if not (_is_usable(g.small_square_norm) and _is_usable(g.big_square_norm)):
        return None
    weighted = g.big_examples * g.big_square_norm - g.small_examples * g.small_square_norm
    excess = g.small_square_norm - g.big_square_norm
    return _Noise(
        signal=weighted / (g.big_examples - g.small_examples),
        noise=excess / (1.0 / g.small_examples - 1.0 / g.big_examples),
        clarity=(1.0 - g.small_examples / g.big_examples) ** 2,
    )


def _blend(old: float | None, new: float) -> float:
    return new if old is None else MEMORY * old + (1.0 - MEMORY) * new


def _is_usable(value: float) -> bool:
    return math.isfinite(value) and value >= 0

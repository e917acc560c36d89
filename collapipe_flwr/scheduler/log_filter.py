"""A filter that learns positive coefficients from one noisy sum of them per round.

What is seen in a round is ``y = sum_i c_i exp(m_i)`` with known parts ``c_i >= 0``, for example
seconds = blocks x overhead + FLOP x seconds per FLOP. The state is normal: ``mean`` m, and
``spread``, its covariance. An extended Kalman filter in the logarithm of y, iterated because the
sum bends (Bell and Cathey 1993), moves it: every round widens the spread in the shape of the
prior's, which forgets the past, and an observation has a relative error of ``NOISE``. Our own
choices:

* A value that is zero, negative, infinite or no number changes nothing.
* One that is further from the expected than ``GATE`` standard deviations is a surprise. It counts
  as no further than that (Huber's influence). If the next value surprises, too, and agrees with it,
  something has really changed: the spread is that of the prior again, and the value counts in full.
* No value moves what is expected by more than ``STEP``; a first one counts in full up to that.

So a single false reading moves a settled estimate by less than ``GATE`` standard deviations of what
it predicts, some 30 %, and a sensor that is wrong for ever by a factor of 8 per round.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from collapipe_flwr.costs.arrays import Array

NOISE = 0.05  # of one observation, in ln
DRIFT = 0.05  # of the best known coefficient from one round to the next, in ln
GATE = 3.0  # standard deviations
STEP = math.log(8.0)
AGREE = math.log(2.0)  # two surprises closer than this are the same change
_ITERATIONS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Prior:
    """Standard deviations of coefficients around their claims, in ln.

    ``own`` is the standard deviation of each, ``common`` that of a factor on all of them.
    """

    own: tuple[float, ...]
    common: float = 0.0

    @property
    def spread(self) -> Array:
        """The covariance."""
        return np.asarray(np.diag(np.square(self.own)) + self.common**2)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogFilter:
    """Beliefs about the logarithms of coefficients; ``spread`` is row by row.

    ``surprise`` is how far the last value was off, in ln, if that was beyond the gate; a filter
    that has seen nothing takes any value for a change. ``unseen`` counts rounds without a value,
    and ``looks`` how many later trials confirmed the estimate.
    """

    mean: tuple[float, ...]
    spread: tuple[tuple[float, ...], ...] = ()
    surprise: float | None = None
    unseen: int = 0
    looks: int = 0

    @property
    def values(self) -> tuple[float, ...]:
        """The coefficients."""
        return tuple(map(math.exp, self.mean))

    def expect(self, parts: Sequence[float]) -> float:
        """Return the sum that these parts are expected to give."""
        return math.fsum(c * v for c, v in zip(parts, self.values, strict=True))

    def compute_error(self, parts: Sequence[float], value: float) -> float | None:
        """Compute ln(value / expected); None where either is no positive number."""
        expected = self.expect(parts)
        if not (0 < value < math.inf and 0 < expected < math.inf):
            return None
        return math.log(value / expected)

    def observe(self, parts: Sequence[float], value: float, prior: Prior) -> LogFilter:
        """Return the filter after one more round, in which the sum was ``value``."""
        error = self.compute_error(parts, value)
        if error is None:
            return self
        new = not self.spread
        spread = prior.spread if new else self._drift(prior)
        share = np.array(parts) * np.array(self.values) / self.expect(parts)
        limit = GATE * math.sqrt(float(share @ spread @ share) + NOISE**2)
        surprise = error if abs(error) > limit and not new else None
        before = self.surprise
        if surprise is not None and before is not None and abs(before - surprise) < AGREE:
            spread, limit, surprise = prior.spread, STEP, None
        limit = STEP if new else min(limit, STEP)
        seen = max(-limit, min(limit, error))
        mean, after = self._update(parts, seen, spread)
        if seen != error:  # what counts for less tells less
            after = spread + (after - spread) * seen / error
        return LogFilter(
            mean=tuple(mean.tolist()),
            spread=tuple(map(tuple, after.tolist())),
            surprise=surprise,
            looks=self.looks,
        )

    def skip(self) -> LogFilter:
        """Return the filter after one more round that showed nothing of it."""
        return replace(self, unseen=self.unseen + 1)

    def _drift(self, prior: Prior) -> Array:
        """Widen the spread for one round, nowhere beyond the prior's."""
        most = np.diag(prior.spread)
        spread = np.array(self.spread) + DRIFT**2 * prior.spread / most[most > 0].min()
        excess = np.sqrt(np.maximum(np.diag(spread) / np.maximum(most, 1e-12), 1.0))
        return np.asarray(spread / np.outer(excess, excess))

    def _update(self, parts: Sequence[float], seen: float, spread: Array) -> tuple[Array, Array]:
        """Update mean and spread, given that ln of the sum is ``seen`` above the expected."""
        before, coefficients = np.array(self.mean), np.array(parts)
        aim = math.log(self.expect(parts)) + seen
        mean = before
        for _ in range(_ITERATIONS):
            terms = coefficients * np.exp(mean)
            total = float(terms.sum())
            share = terms / total
            gain = spread @ share / (float(share @ spread @ share) + NOISE**2)
            mean = before + gain * (aim - math.log(total) - share @ (before - mean))
        return mean, spread - np.outer(gain, share @ spread)

"""The bound against what local SGD does on quadratics whose L, sigma, kappa and Delta are known."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest

from collapipe_flwr.costs.convergence import (
    BoundSums,
    LearningConstants,
    compute_join_weight,
    sum_bound,
    sum_late_bound,
)

RUNS = 300  # independent copies of one training, for the expectation


@dataclass(frozen=True, slots=True, kw_only=True)
class Quadratics:
    """F_m(x) = sum_i curve_i (x_i - centre_mi)^2 / 2: equal curvature, so kappa^2 is one number."""

    curve: np.ndarray
    centre: np.ndarray  # (clusters, dimensions)
    shares: np.ndarray  # p
    steps: np.ndarray  # H
    batches: np.ndarray  # B
    noise: float  # sigma^2 per example
    rate: float  # eta

    @property
    def sums(self) -> BoundSums:
        return sum_bound(self.shares, self.steps.astype(float), self.batches.astype(float))

    @property
    def optimum(self) -> np.ndarray:
        """Of the objective that local SGD really minimises: clusters weighed by p H."""
        weights = self.shares * self.steps / float(self.sums.tau)
        return weights @ self.centre

    def constants(self, start: np.ndarray) -> LearningConstants:
        weights = self.shares * self.steps / float(self.sums.tau)
        apart = self.curve * (self.centre - self.optimum)
        return LearningConstants(
            learning_rate=self.rate,
            smoothness=float(self.curve.max()),
            noise=self.noise,
            drift=float(weights @ (apart**2).sum(1)),
            loss_gap=float((self.curve * (start - self.optimum) ** 2).sum() / 2.0),
            target=np.inf,
        )

    def applies(self) -> bool:
        """The two conditions of the derivation."""
        step = self.rate * float(self.curve.max())
        few = 2.0 * step**2 * float(self.sums.drift) <= 1.0 / 3.0
        return step * float(self.sums.tau) <= 0.5 and few

    def measured(self, start: np.ndarray, rounds: int) -> float:
        """Mean over rounds and runs of the squared gradient norm at the start of a round."""
        rng, x, total = np.random.default_rng(0), np.tile(start, (RUNS, 1)), 0.0
        for _ in range(rounds):
            total += float(((self.curve * (x - self.optimum)) ** 2).sum(1).mean())
            x = sum(p * self._local(x, m, rng) for m, p in enumerate(self.shares))
        return total / rounds

    def _local(self, x: np.ndarray, m: int, rng: np.random.Generator) -> np.ndarray:
        spread = np.sqrt(self.noise / self.batches[m] / x.shape[1])
        for _ in range(self.steps[m]):
            gradient = self.curve * (x - self.centre[m]) + spread * rng.standard_normal(x.shape)
            x = x - self.rate * gradient
        return x


def quadratics(seed: int, **fixed: float) -> Quadratics:
    rng = np.random.default_rng(seed)
    clusters = int(rng.integers(1, 5))
    made = Quadratics(
        curve=rng.uniform(0.05, 2.0, 6),
        centre=fixed.get("apart", rng.uniform(0.0, 3.0)) * rng.standard_normal((clusters, 6)),
        shares=rng.dirichlet(np.full(clusters, 3.0)),
        steps=rng.integers(1, 12, clusters),
        batches=rng.choice([1, 2, 8, 32], clusters),
        noise=fixed.get("noise", float(rng.uniform(0.0, 20.0))),
        rate=1.0,
    )
    step = float(made.curve.max())
    by_wander = (6.0 * max(float(made.sums.drift), 1e-9)) ** -0.5
    largest = min(0.5 / float(made.sums.tau), by_wander) / step
    return replace(made, rate=largest * fixed.get("share", float(rng.uniform(0.1, 1.0))))


def bound(case: Quadratics, start: np.ndarray, rounds: int) -> float:
    constants = case.constants(start)
    first = 4.0 * constants.loss_gap / (case.rate * float(case.sums.tau) * rounds)
    return first + float(case.sums.compute_floor(constants))


@pytest.mark.parametrize("seed", range(12))
def test_local_sgd_on_quadratics_stays_below_the_bound(seed: int) -> None:
    """Random curvatures, shares, steps, batches, noise, drift and any rate that is allowed."""
    case = quadratics(seed)
    assert case.applies()
    for far, rounds in ((0.0, 60), (1.0, 5), (5.0, 60)):
        start = case.optimum + far
        assert case.measured(start, rounds) <= bound(case, start, rounds)


def late_case(seed: int) -> tuple[Quadratics, np.ndarray, BoundSums]:
    """Clusters whose updates are up to three rounds late, at a rate that is allowed."""
    case = quadratics(seed)
    late = np.random.default_rng(seed).integers(0, 4, len(case.shares))
    sums = sum_late_bound(case.shares, case.steps.astype(float), case.batches.astype(float), late)
    # By p H as they join: shares of what really descends.
    case = replace(case, shares=case.shares * compute_join_weight(late))
    tau, curve = float(sums.tau), float(case.curve.max())
    by_wander = (10.0 * max(float(sums.drift), 1e-9)) ** -0.5
    root = 0.5 if not sums.staleness else (np.sqrt(1 + 4 * sums.staleness) - 1) / 4 / sums.staleness
    share = float(np.random.default_rng(seed + 99).uniform(0.3, 1.0))
    return replace(case, rate=share * min(root / tau, by_wander) / curve), late, sums


@pytest.mark.parametrize("seed", range(12))
def test_late_updates_on_quadratics_stay_below_the_bound(seed: int) -> None:
    """A cluster's update is of the model of s rounds ago, and joins with what it weighs a round."""
    case, late, sums = late_case(seed)
    step = case.rate * float(case.curve.max()) * float(sums.tau)
    assert step * (1.0 + 2.0 * step * sums.staleness) <= 0.5 * (1.0 + 1e-9)
    for far, rounds in ((0.0, 60), (1.0, 20), (5.0, 60)):
        rng = np.random.default_rng(0)
        seen, total = [np.tile(case.optimum + far, (RUNS, 1))] * 4, 0.0
        for _ in range(rounds):
            x = seen[-1]
            total += float(((case.curve * (x - case.optimum)) ** 2).sum(1).mean())
            moved = [
                p * (case._local(seen[-1 - s], m, rng) - seen[-1 - s])
                for m, (p, s) in enumerate(zip(case.shares, late, strict=True))
            ]
            seen.append(x + sum(moved))
        constants = case.constants(case.optimum + far)
        first = 4.0 * constants.loss_gap / (case.rate * float(sums.tau) * rounds)
        assert total / rounds <= first + float(sums.compute_floor(constants))


def test_without_late_updates_the_bound_is_the_usual_one() -> None:
    case = quadratics(3)
    numbers = case.shares, case.steps.astype(float), case.batches.astype(float)
    assert sum_late_bound(*numbers, np.zeros(len(case.shares), int)) == sum_bound(*numbers)


def test_distance_noise_and_drift_each_need_their_term() -> None:
    """Where one cause acts alone, the bound without its term is zero and what happens is not."""
    far = quadratics(1, noise=0.0, apart=0.0)
    start = far.optimum + 1.0
    assert far.measured(start, 5) > 0.0 == float(far.sums.compute_floor(far.constants(start)))

    noisy = quadratics(2, noise=10.0, apart=0.0)
    noisy = replace(noisy, steps=np.ones_like(noisy.steps))
    calm = replace(noisy.sums, variance=np.zeros(()))
    assert noisy.measured(noisy.optimum, 60) > 0.0
    assert float(calm.compute_floor(noisy.constants(noisy.optimum))) == 0.0

    apart = quadratics(6, noise=0.0, apart=3.0, share=1.0)
    assert len(set(apart.steps.tolist())) > 1
    alike = replace(apart.sums, drift=np.zeros(()))
    assert apart.measured(apart.optimum, 60) > 1e-6
    assert float(alike.compute_floor(apart.constants(apart.optimum))) == 0.0


def test_unequal_steps_minimise_the_reweighted_objective() -> None:
    """FedNova's point: clusters count by p H, not by p; a slow rate ends at that optimum."""
    case = replace(quadratics(6, noise=0.0, apart=3.0), rate=1e-3)
    pull = case.shares[:, None] * (1.0 - (1.0 - case.rate * case.curve) ** case.steps[:, None])
    end = (pull * case.centre).sum(0) / pull.sum(0)
    rng = np.random.default_rng(0)
    after = sum(p * case._local(end[None], m, rng) for m, p in enumerate(case.shares))
    assert after[0] == pytest.approx(end)
    by_share = case.shares @ case.centre
    assert np.abs(end - case.optimum).max() < 0.05 * np.abs(by_share - case.optimum).max()

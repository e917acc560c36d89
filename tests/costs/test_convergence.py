"""The bound's shape, and estimators that find what generated the data."""

from __future__ import annotations

import numpy as np
import pytest

from collapipe_flwr.core.outcome import (
    ClusterOutcome,
    GradientNoise,
    Movement,
    RoundOutcome,
)
from collapipe_flwr.costs.convergence import (
    LearningConstants,
    LearningState,
    NoiseScale,
    estimate_constants,
    estimate_noise_scale,
    sum_bound,
    sum_exchanges,
    update,
)

CONSTANTS = LearningConstants(
    learning_rate=0.01, smoothness=1.0, noise=4.0, drift=0.1, loss_gap=2.0, target=0.5
)


def rounds(steps: float, batch: float, constants: LearningConstants = CONSTANTS) -> float:
    shares = np.array([0.5, 0.5])
    sums = sum_bound(shares, np.full(2, steps), np.full(2, batch))
    return float(constants.count_rounds(sums))


def test_bound_reduces_to_the_textbook_form_for_equal_steps() -> None:
    shares, steps, batch = np.array([0.3, 0.7]), 5.0, 8.0
    sums = sum_bound(shares, np.full(2, steps), np.full(2, batch))
    c, eta = CONSTANTS, CONSTANTS.learning_rate * CONSTANTS.smoothness
    floor = 4 * eta * c.noise * (shares**2 / batch).sum()
    floor += 3 * eta**2 * c.noise * (shares * (steps - 1) / batch).sum()
    floor += 6 * eta**2 * c.drift * steps * (steps - 1)
    assert float(sums.compute_floor(c)) == pytest.approx(floor)
    expected = 4 * c.loss_gap / (c.learning_rate * steps * (c.target - floor))
    assert float(c.count_rounds(sums)) == pytest.approx(expected)


def test_larger_batches_never_need_more_rounds_at_equal_steps() -> None:
    values = [rounds(4.0, batch) for batch in (1.0, 2.0, 8.0, 64.0)]
    assert values == sorted(values, reverse=True)


def test_unreachable_target_is_infinite() -> None:
    tight = LearningConstants(
        learning_rate=0.5, smoothness=4.0, noise=9.0, drift=5.0, loss_gap=1.0, target=1e-6
    )
    assert rounds(10.0, 1.0, tight) == np.inf


def test_exchanging_one_cluster_equals_the_whole_sum() -> None:
    rng = np.random.default_rng(0)
    shares = rng.dirichlet(np.ones(5))
    steps, batches = rng.integers(1, 30, 5).astype(float), rng.integers(1, 64, 5).astype(float)
    cluster = np.array([3, 0, 3])
    new = (np.array([2.0, 50.0, 7.0]), np.array([32.0, 1.0, 8.0]))
    fast = CONSTANTS.count_rounds(sum_exchanges(shares, (steps, batches), cluster, new))
    for i, m in enumerate(cluster):
        h, b = steps.copy(), batches.copy()
        h[m], b[m] = new[0][i], new[1][i]
        assert fast[i] == pytest.approx(float(CONSTANTS.count_rounds(sum_bound(shares, h, b))))


def outcome(noise: GradientNoise | None = None, **fields: float) -> RoundOutcome:
    cluster = ClusterOutcome(
        cluster_id="a", latency_s=1.0, energy_j={}, loss=1.5, gradient_noise=noise
    )
    return RoundOutcome(
        round_index=1, latency_s=1.0, clusters=(cluster,), movement=Movement(**fields)
    )


def test_noise_estimator_recovers_sigma_from_two_batch_sizes() -> None:
    signal, sigma2 = 3.0, 7.0
    noise = GradientNoise(
        small_examples=4,
        small_square_norm=signal + sigma2 / 4,
        big_examples=32,
        big_square_norm=signal + sigma2 / 32,
    )
    state = update(LearningState(), outcome(noise), learning_rate=0.1, mean_steps=1.0)
    assert state.noise == pytest.approx(sigma2)
    assert state.gradient_square == pytest.approx(signal)
    assert estimate_constants(state, 0.01).noise == pytest.approx(sigma2)


def test_a_cluster_without_others_has_no_drift() -> None:
    noise = GradientNoise(
        small_examples=4, small_square_norm=2e-3, big_examples=32, big_square_norm=1e-3
    )
    alone = outcome(noise, norm=1.0, spread=0.0)
    state = update(LearningState(), alone, learning_rate=0.01, mean_steps=10.0)
    assert estimate_constants(LearningState(), 0.01).drift > 0.0
    assert estimate_constants(state, 0.01).drift == 0.0


def test_noise_estimator_on_sampled_gradients() -> None:
    rng = np.random.default_rng(1)
    mean, sigma, state = np.ones(50) * 0.2, 0.5, LearningState()
    for _ in range(40):
        grads = mean + sigma * rng.standard_normal((8, 4, 50))  # 8 micro-batches of 4 examples
        micro = grads.mean(1)
        noise = GradientNoise(
            small_examples=4,
            small_square_norm=float((micro**2).sum(1).mean()),
            big_examples=32,
            big_square_norm=float((micro.mean(0) ** 2).sum()),
        )
        state = update(state, outcome(noise), learning_rate=0.1, mean_steps=1.0)
    assert state.noise == pytest.approx(50 * sigma**2, rel=0.15)
    assert state.gradient_square == pytest.approx(float((mean**2).sum()), rel=0.4)


def test_rounds_by_noise_scale_are_those_of_mccandlish_et_al() -> None:
    """A pass over D examples in steps of B: in proportion to B + B_noise, in one cluster or three:
    between two averages each steps on its own."""
    scale, examples = NoiseScale(examples=12.0), 480.0
    batches = np.array([1.0, 4.0, 16.0, 48.0])
    alone = scale.count_rounds(
        sum_bound(np.ones((4, 1)), examples / batches[:, None], batches[:, None])
    )
    assert alone * examples == pytest.approx(batches + 12.0)
    shares, both = np.full((4, 3), 1 / 3), np.tile(batches[:, None], 3)
    averaged = scale.count_rounds(sum_bound(shares, examples / both, both))
    assert averaged * examples == pytest.approx(batches + 12.0)


def test_noise_scale_is_the_ratio_of_both_estimates_and_four_before_any() -> None:
    assert estimate_noise_scale(LearningState()).examples == 4.0
    measured = LearningState(noise=30.0, gradient_square=1.5)
    assert estimate_noise_scale(measured).examples == 20.0
    flat = LearningState(noise=30.0, gradient_square=0.0)
    assert estimate_noise_scale(flat).examples == 1e6  # finite: searches compare it


def test_smoothness_from_secants_of_a_quadratic() -> None:
    """Gradient descent on (L/2) x^2: successive updates differ by eta L times the last update."""
    smoothness, eta = 3.0, 0.05
    last = -eta * smoothness * 1.0
    now = -eta * smoothness * (1.0 + last)
    first, second = outcome(norm=abs(last)), outcome(change_norm=abs(now - last))
    state = update(LearningState(), first, learning_rate=eta, mean_steps=1.0)
    state = update(state, second, learning_rate=eta, mean_steps=1.0)
    assert state.smoothness == pytest.approx(smoothness)


def test_drift_of_sgd_and_of_any_rescaled_update() -> None:
    """SGD moves by rate * steps * gradient; an adaptive rule by more, but kappa^2 is the same."""
    gradient2, kappa2, eta, steps = 4.0, 0.7, 0.1, 5.0
    noise = GradientNoise(
        small_examples=4,
        small_square_norm=gradient2 + 8.0 / 4,
        big_examples=32,
        big_square_norm=gradient2 + 8.0 / 32,
    )
    for stretch in (1.0, 300.0):
        moved = stretch * eta * steps * gradient2**0.5
        spread = (stretch * eta * steps) ** 2 * kappa2
        told = outcome(noise, norm=moved, spread=spread)
        state = update(LearningState(), told, learning_rate=eta, mean_steps=steps)
        assert state.drift == pytest.approx(kappa2)
    blind = outcome(norm=1.0, spread=(eta * steps) ** 2 * kappa2)
    state = update(LearningState(), blind, learning_rate=eta, mean_steps=steps)
    assert state.drift == pytest.approx(kappa2)


def test_nothing_measured_changes_nothing_but_the_loss() -> None:
    state = update(LearningState(), outcome(), learning_rate=0.1, mean_steps=2.0)
    assert state == LearningState(loss=1.5)

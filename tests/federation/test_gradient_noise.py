"""The noise scale that rounds show is the true one, whatever they are cut into.

Labels of an example share a deviation and have one each, so neither examples nor labels alone are
independent. All seeds count: a mean over them of both averages, whose ratio is the noise scale.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from collapipe_flwr.core.measurements import ClusterMeasurement, StageMeasurement
from collapipe_flwr.core.outcome import ClusterOutcome, RoundOutcome
from collapipe_flwr.costs.convergence import LearningState, estimate_noise_scale, update
from collapipe_flwr.data.batches import bucket_by_length, cut_batches, shuffle_groups
from collapipe_flwr.pipeline.optimizer import OptimizerConfig
from collapipe_flwr.pipeline.step import MicroBatch
from tests.pipeline.chains import Chain, settings

WIDTH, MOST_LABELS = 40, 12
SEEDS, STEPS = range(50), 1000  # of simulated rounds: 10,000 is told to 3 % then
FEW, WIDE = range(8), 100  # of real pipelines: where a gradient is long, each tells more
STILL = OptimizerConfig(name="sgd", learning_rate=1e-12, weight_decay=0.0)  # the gradient stays

Cut = list[list[int]]  # examples of each micro-batch


def noise_of(labels: np.ndarray, width: int, own: float = 1.0, shared: float = 1.0) -> float:
    """sigma^2 of an example, by the variances of a label's and of an example's deviation."""
    return width * float((labels**2 * shared + labels * own).mean() / labels.mean() ** 2)


def learnt(state: LearningState, *told: ClusterMeasurement) -> LearningState:
    clusters = tuple(
        ClusterOutcome(
            cluster_id=t.cluster_id,
            latency_s=1.0,
            energy_j={},
            gradient_noise=t.gradient_noise,
        )
        for t in told
    )
    seen = RoundOutcome(round_index=1, latency_s=1.0, clusters=clusters)
    return update(state, seen, learning_rate=0.1, mean_steps=1.0)


def telemetry(name: str, examples: int, reports: Sequence[StageMeasurement]) -> ClusterMeasurement:
    *chain, edge = reports
    return ClusterMeasurement(
        cluster_id=name,
        examples=examples,
        wall_s=1.0,
        losses=(1.0,),
        reports=tuple(chain),
        edge=edge,
    )


def some_batches(rng: np.random.Generator) -> tuple[int, int, int]:
    """Examples of a round, of a step and of a micro-batch: with a short last step as a rule."""
    size, count = int(rng.choice([1, 2, 4, 8])), int(rng.choice([2, 3, 4]))
    return (
        int(rng.integers(3, 7)) * size * count + int(rng.integers(1, size + 1)),
        size * count,
        size,
    )


@pytest.mark.parametrize("true", [4.0, 360.0, 1000.0, 10000.0])
def test_simulated_rounds_show_the_true_noise_scale(true: float) -> None:
    """Examples have one label or many."""
    labels = np.array([1, MOST_LABELS])
    sigma2 = noise_of(labels, WIDTH)
    gradient = (sigma2 / true) ** 0.5

    def sums(rng: np.random.Generator, count: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
        """The labels of so many examples, and the deviation of the sum of their gradients."""
        many = rng.binomial(rows, 0.5, count)
        chosen = np.stack([rows - many, many], axis=-1)
        return chosen @ labels, (chosen @ (labels**2 + labels)) ** 0.5

    def steps(rng: np.random.Generator, count: int, rows: int, size: int) -> StageMeasurement:
        """The gradients of first micro-batches and of whole batches, by the sums of their parts.

        Normal vectors by their lengths along the gradient and across it.
        """
        small, deviation = sums(rng, count, min(size, rows))
        along = small * gradient + deviation * rng.standard_normal(count)
        across = deviation * rng.chisquare(WIDTH - 1, count) ** 0.5
        first = along**2 + across**2
        rest, deviation = sums(rng, count, rows - min(size, rows))
        along += rest * gradient + deviation * rng.standard_normal(count)
        across += deviation * rng.standard_normal(count)
        whole = along**2 + across**2 + deviation**2 * rng.chisquare(WIDTH - 2, count)
        big = small + rest
        return StageMeasurement(
            name="edge",
            steps=count,
            small_square_norm=float(first.sum() / (small**2).sum()),
            small_weight=float(small.sum()),
            small_squares=float((small**2).sum()),
            big_square_norm=float(whole.sum() / (big**2).sum()),
            big_weight=float(big.sum()),
            big_squares=float((big**2).sum()),
        )

    def cluster(rng: np.random.Generator, name: str) -> ClusterMeasurement:
        size, rows = (16, 128) if name == "a" else (8, 64)
        short = int(rng.integers(1, size + 1))
        edge = steps(rng, STEPS, rows, size) + steps(rng, 1, short, size)
        still = StageMeasurement(name="control unit")
        return telemetry(name, STEPS * rows + short, (still, edge))

    states = []
    for seed in SEEDS:
        rng, state = np.random.default_rng(seed), LearningState()
        for _ in range(12):
            state = learnt(state, cluster(rng, "a"), cluster(rng, "b"))
        states.append(state)
    noise = np.mean([s.noise for s in states])
    signal = np.mean([s.gradient_square for s in states])
    assert noise == pytest.approx(sigma2, rel=0.1)
    assert noise / signal == pytest.approx(true, rel=0.1)


class Moved(nn.Module):
    """Adds a trained vector to hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.vector = nn.Parameter(torch.full((WIDE // 2,), 0.25))

    def forward(self, given: Mapping[str, Tensor] | Tensor, *_: Mapping[str, Tensor]) -> Tensor:
        if isinstance(given, Tensor):
            return given + self.vector
        return self.vector.expand(*given["places"].shape, -1)


class Distance(nn.Module):
    """Half the squared distance to targets, a mean over labels: its gradient is linear."""

    def forward(self, hidden_BTD: Tensor, context: Mapping[str, Tensor]) -> Tensor:
        errors = (hidden_BTD - context["targets"]) ** 2 / 2
        mask = context["mask"]
        return (errors.sum(-1) * mask).sum() / mask.sum().clamp(min=1)

    def weight_of(self, context: Mapping[str, Tensor]) -> float:
        return float(context["mask"].sum())


def micro_batch(rng: np.random.Generator, lengths: Sequence[int]) -> MicroBatch:
    """Examples of so many labels: their targets deviate from 0 together and each alone."""
    shape = (len(lengths), max(lengths), WIDE // 2)
    targets = rng.standard_normal(shape) + rng.standard_normal((len(lengths), 1, WIDE // 2))
    mask = np.arange(max(lengths)) < np.array(lengths)[:, None]
    context = {
        "targets": torch.tensor(targets, dtype=torch.float32),
        "mask": torch.tensor(mask, dtype=torch.float32),
    }
    places = torch.zeros(mask.shape, dtype=torch.int64)
    return MicroBatch(inputs={"places": places}, context=context, weight=float(sum(lengths)))


def equal(lengths: Sequence[int], size: int, *place: int) -> Cut:
    del place
    return cut_batches(range(len(lengths)), size)


def bucketed(lengths: Sequence[int], size: int, *place: int) -> Cut:
    return shuffle_groups(bucket_by_length(lengths, len(equal(lengths, size))), *place)


@pytest.mark.parametrize("cut", [equal, bucketed])
def test_rounds_of_a_real_pipeline_show_the_true_noise_scale(
    cut: Callable[..., Cut],
) -> None:
    """Random sizes, a short last step, unequal numbers of labels, two clusters, buckets."""
    choice = np.arange(1, MOST_LABELS + 1)
    sigma2, gradient2 = noise_of(choice, WIDE), 0.5**2 * WIDE  # over two stages of WIDE / 2
    states = []
    for seed in FEW:
        rng, state = np.random.default_rng([seed, 7]), LearningState()
        for index in range(3):
            told = []
            for name in ("a", "b"):
                examples, batch_size, size = some_batches(rng)
                lengths = rng.choice(choice, examples).tolist()
                chain = Chain([Moved(), Moved(), Distance()], lambda n, *_: settings(n), STILL)
                with chain.running() as first:
                    for number, step in enumerate(cut_batches(lengths, batch_size)):
                        rows = cut(step, size, seed, index, number)
                        first.train_step([micro_batch(rng, [step[r] for r in row]) for row in rows])
                told.append(telemetry(name, examples, [s.report() for s in chain.stages]))
            state = learnt(state, *told)
        states.append(state)
    noise = np.mean([s.noise for s in states])
    signal = np.mean([s.gradient_square for s in states])
    assert noise == pytest.approx(sigma2, rel=0.1)
    assert noise / signal == pytest.approx(sigma2 / gradient2, rel=0.1)


def test_averages_below_zero_are_kept_and_clamped_only_when_used() -> None:
    """Unbiased estimates of a small gradient are often negative: left out, the others mislead."""

    def seen(small: float, big: float) -> ClusterMeasurement:
        norms = {"small_square_norm": small, "big_square_norm": big}
        sizes = {"small_weight": 4.0, "small_squares": 16.0}
        edge = StageMeasurement(name="edge", big_weight=32.0, big_squares=1024.0, **norms, **sizes)
        return telemetry("a", 32, (StageMeasurement(name="control unit"), edge))

    below = learnt(LearningState(), seen(8.0, 0.5))
    assert below.gradient_square < 0 < below.noise
    assert below.first_gradient_square is None
    assert estimate_noise_scale(below).examples == 1e6
    both = learnt(below, seen(8.0, 2.0))
    assert both.gradient_square > 0
    assert both.first_gradient_square == both.gradient_square


def test_sizes_that_hardly_differ_weigh_next_to_nothing() -> None:
    """Their estimates multiply chance: 8 of 9 examples say little beside 1 of 8."""

    def seen(small: float, big: float, norms: tuple[float, float]) -> ClusterMeasurement:
        edge = StageMeasurement(
            name="edge",
            small_square_norm=norms[0],
            small_weight=small,
            small_squares=small**2,
            big_square_norm=norms[1],
            big_weight=big,
            big_squares=big**2,
        )
        return telemetry("a", int(big), (StageMeasurement(name="control unit"), edge))

    clear = learnt(LearningState(), seen(1.0, 8.0, (8.0 + 1.0, 1.0 + 1.0)))
    assert clear.noise == pytest.approx(8.0)
    odd = seen(8.0, 9.0, (4.0, 2.0))  # sigma^2 would be 144
    assert learnt(clear, odd).noise == pytest.approx(8.0, rel=0.5)
    assert learnt(clear, seen(8.0, 8.0, (4.0, 4.0))) == clear  # nothing to learn from one size

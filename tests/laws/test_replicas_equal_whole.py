"""The first law where stages have replicas: who handles a micro-batch changes nothing either.

Replicas add their gradients up in another order than one device would, so results are equal to the
unsplit model's to rounding and not bit by bit; among themselves replicas are equal bit by bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch
from torch import Tensor

from collapipe_flwr.cluster.control_unit import evaluate_batches, train_round
from collapipe_flwr.cluster.evaluation import PredictionConfig
from collapipe_flwr.cluster.fleet import ThreadFleet
from collapipe_flwr.cluster.hosted import ThreadEdge
from collapipe_flwr.cluster.order import TrainingOrder
from collapipe_flwr.cluster.unsplit import evaluate_unsplit
from collapipe_flwr.core.errors import ModelError, ScheduleError
from collapipe_flwr.models.describing import make_spec
from collapipe_flwr.models.saving import save_whole
from collapipe_flwr.models.spec import LoraConfig
from collapipe_flwr.models.splitter import Splitter
from collapipe_flwr.pipeline import gradient_sums
from collapipe_flwr.pipeline.config import Execution
from collapipe_flwr.pipeline.optimizer import OptimizerConfig
from collapipe_flwr.pipeline.roles import MiddleStage
from tests.closeness import assert_near, near
from tests.laws.test_adapted_and_tied import _splitter as tied_splitter
from tests.laws.test_adapted_and_tied import _steps as tied_steps
from tests.rounds import (
    ADAMW,
    SGD,
    Batch,
    Replicated,
    largest_difference,
    make_splitter,
    micro_batches,
    order_of,
    steps_of,
    train_whole,
)
from tests.thorough import few

pytestmark = pytest.mark.usefixtures("small_matrices_are_fused")


CUTS = [
    Replicated(stops=(5,), replicas=(2,), micro_batches=(2, 2)),
    Replicated(stops=(2, 5), replicas=(1, 2), micro_batches=(2, 2, 1)),
    Replicated(stops=(2, 5), replicas=(2, 2), micro_batches=(1, 2, 1, 2)),  # parallel pipelines
    Replicated(
        stops=(2, 5),
        replicas=(2, 3),
        micro_batches=(1, 1, 1, 1, 2),
        schedule="1f1b",
        depths=(7, 3, 2, 1),
    ),
    Replicated(
        stops=(1, 3, 5),
        replicas=(3, 1, 2),
        micro_batches=(1,) * 7,
        schedule="1f1b",
        depths=(7, 2, 3, 1, 1),
    ),
]


class Kept:
    """Makes stages, and keeps them for a look at what they end with."""

    def __init__(self) -> None:
        self.stages: list[MiddleStage] = []

    def __call__(self, *args, **kwargs) -> MiddleStage:
        self.stages.append(MiddleStage(*args, **kwargs))
        return self.stages[-1]


@pytest.fixture(scope="module", params=few(["bert", "marian"], 0))
def splitter(request: pytest.FixtureRequest) -> Splitter:
    return make_splitter(request.param, dropout=0.0)


def train_replicated(
    splitter: Splitter,
    weights: dict[str, Tensor],
    cut: Replicated,
    steps: Sequence[Sequence[Batch]],
    rule: OptimizerConfig,
    **more,
) -> tuple[tuple[float, ...], dict[str, Tensor]]:
    order, kept = order_of(cut, weights, rule, **more), Kept()
    fleet = ThreadFleet(ThreadEdge(), kept)
    result = train_round(splitter, order, micro_batches(splitter, steps), fleet)
    assert_replicas_are_equal(kept.stages, order)
    return result.losses, dict(result.weights)


def assert_replicas_are_equal(stages: Sequence[MiddleStage], order: TrainingOrder) -> None:
    """Weights and optimizer state, bit by bit."""
    left = iter(stages)
    for count in order.plan.replicas[1:-1]:
        first, *others = (stage for stage in islice(left, count))
        for other in others:
            assert other.part is not first.part
            ours, theirs = first.part.state_dict(), other.part.state_dict()
            assert all(torch.equal(ours[key], theirs[key]) for key in ours)
            states = (stage.optimizer.collect_state() for stage in (first, other))
            assert all(
                torch.equal(a, b)
                for (_, one), (_, same) in zip(*(s.items() for s in states), strict=True)
                for a, b in zip(one, same, strict=True)
            )


@pytest.mark.parametrize("cut", few(CUTS, 1, 4), ids=str)
def test_loss_and_every_gradient_equal_the_unsplit_model(
    splitter: Splitter, cut: Replicated
) -> None:
    weights = splitter.initial_weights(seed=1)
    steps = steps_of(splitter, cut, count=1)
    losses, split = train_replicated(splitter, weights, cut, steps, SGD)
    whole_losses, whole = train_whole(splitter, weights, steps, SGD)
    assert largest_difference(whole, weights) > 1e-3
    assert losses == near(whole_losses)
    assert_near(split, whole)


@pytest.mark.parametrize("cut", few(CUTS[1:], 2), ids=str)
def test_many_adamw_steps_stay_on_the_unsplit_path(splitter: Splitter, cut: Replicated) -> None:
    weights = splitter.initial_weights(seed=2)
    steps = steps_of(splitter, cut, count=4)
    losses, split = train_replicated(splitter, weights, cut, steps, ADAMW)
    whole_losses, whole = train_whole(splitter, weights, steps, ADAMW)
    assert losses == near(whole_losses)
    assert_near(split, whole)


def test_the_proximal_term_counts_once_and_what_the_optimizer_keeps_goes_on(
    splitter: Splitter,
) -> None:
    """Over two rounds, of which the second begins with the first one's optimizer."""
    rule = OptimizerConfig(name="sgd", learning_rate=0.1, momentum=0.9, proximal_mu=0.5)
    cut = CUTS[3]
    alone = Replicated(stops=(5,), replicas=(1,), micro_batches=cut.micro_batches)
    ends = []
    for which in (alone, cut):
        weights, slots = splitter.initial_weights(seed=2), {}
        for steps in (steps_of(splitter, cut, count=2), steps_of(splitter, cut, count=3)):
            order = order_of(which, weights, rule, slots=slots, keep_optimizer=True)
            fleet = ThreadFleet(ThreadEdge())
            result = train_round(splitter, order, micro_batches(splitter, steps), fleet)
            weights, slots = {**weights, **result.weights}, result.slots
        ends.append((weights, {k: t[0] for k, t in slots.items()}))
    (expected, means), (found, same_means) = ends
    assert means.keys() == same_means.keys() and len(means) > 20
    assert_near(found, expected, depth=5)
    assert_near(same_means, means, depth=5)


def test_a_batch_with_fewer_micro_batches_than_replicas(splitter: Splitter) -> None:
    """A replica without a micro-batch takes the same optimizer step as the others."""
    weights, cut = splitter.initial_weights(seed=2), CUTS[3]
    first, last = steps_of(splitter, cut, count=2)
    steps = [first, last[:1], first, last[:2]]
    losses, split = train_replicated(splitter, weights, cut, steps, ADAMW)
    whole_losses, whole = train_whole(splitter, weights, steps, ADAMW)
    assert losses == near(whole_losses)
    assert_near(split, whole)


def test_gradients_in_small_pieces_sum_up_alike(
    splitter: Splitter, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights, cut = splitter.initial_weights(seed=1), CUTS[4]
    steps = steps_of(splitter, cut, count=2)
    _, expected = train_replicated(splitter, weights, cut, steps, ADAMW)
    monkeypatch.setattr(gradient_sums, "PIECE_BYTES", 100)
    _, found = train_replicated(splitter, weights, cut, steps, ADAMW)
    assert all(torch.equal(found[key], expected[key]) for key in expected)


@pytest.mark.parametrize(
    "execution",
    [Execution(clip_norm=0.05), Execution(recompute=True), Execution(check_finite=True)],
    ids=["clip-norm", "recompute", "check-finite"],
)
def test_what_a_run_asks_of_stages_holds_for_replicas(
    splitter: Splitter, execution: Execution
) -> None:
    """Clipping counts the gradients of a replicated stage once; else the norm is too large."""
    weights, cut = splitter.initial_weights(seed=1), CUTS[3]
    alone = Replicated(stops=(5,), replicas=(1,), micro_batches=cut.micro_batches)
    steps = steps_of(splitter, cut, count=2)
    _, expected = train_replicated(splitter, weights, alone, steps, SGD, execution=execution)
    _, found = train_replicated(splitter, weights, cut, steps, SGD, execution=execution)
    assert_near(found, expected)
    if execution.clip_norm:
        _, unbounded = train_replicated(splitter, weights, alone, steps, SGD)
        assert largest_difference(unbounded, expected) > 1e-3


@pytest.mark.parametrize("codec", ["bf16", "int8"])
def test_codecs_round_hops_alike_and_gradients_between_replicas_never(codec: str) -> None:
    """So the only difference to the same stages without replicas is the order of sums."""
    splitter = make_splitter("bert", dropout=0.0)
    weights, cut = splitter.initial_weights(seed=1), CUTS[3]
    single = replace(cut, replicas=(1, 1), depths=())
    steps = steps_of(splitter, cut, count=1)
    execution = Execution(codec=codec)
    _, expected = train_replicated(splitter, weights, single, steps, SGD, execution=execution)
    _, found = train_replicated(splitter, weights, cut, steps, SGD, execution=execution)
    assert_near(found, expected)
    _, exact = train_replicated(splitter, weights, single, steps, SGD)
    assert largest_difference(exact, expected) > 1e-5


@pytest.mark.parametrize("model_type", few(["marian", "bert"], 1))
def test_dropout_is_that_of_the_micro_batch_whoever_handles_it(model_type: str) -> None:
    dropping = make_splitter(model_type, dropout=0.2)
    weights = dropping.initial_weights(seed=5)
    cut = CUTS[3]
    alone = Replicated(stops=(5,), replicas=(1,), micro_batches=cut.micro_batches)
    steps = steps_of(dropping, cut, count=2)
    losses, expected = train_replicated(dropping, weights, alone, steps, ADAMW, dropout_seed=1)
    cut_losses, found = train_replicated(dropping, weights, cut, steps, ADAMW, dropout_seed=1)
    other_losses, _ = train_replicated(dropping, weights, cut, steps, ADAMW, dropout_seed=2)
    assert cut_losses == near(losses)
    assert_near(found, expected)
    assert other_losses != near(losses)


@pytest.mark.parametrize(
    "wanted", [None, PredictionConfig(logits=True), PredictionConfig(most_tokens=4)]
)
def test_a_test_set_comes_to_the_same(splitter: Splitter, wanted: PredictionConfig | None) -> None:
    """Also where texts are generated, which one device of every stage does."""
    weights, cut = splitter.initial_weights(seed=3), CUTS[3]
    steps = steps_of(splitter, cut, count=2)
    found = evaluate_batches(
        splitter,
        order_of(cut, weights, SGD),
        micro_batches(splitter, steps),
        ThreadFleet(ThreadEdge()),
        wanted=wanted,
    )
    whole = evaluate_unsplit(splitter, splitter.build_whole(weights), steps, wanted)
    assert (found.loss, found.targets) == (near(whole.loss), whole.targets)
    ours, theirs = ([ids for step in of.predictions for ids in step] for of in (found, whole))
    assert len(ours) == len(theirs)
    if wanted is not None and wanted.logits:
        assert_near(dict(enumerate(ours)), dict(enumerate(theirs)))


@pytest.mark.parametrize(
    ("model_type", "task", "choices"),
    [
        ("t5", "seq2seq", {"shared": "sum", "ties": "rows"}),
        ("gpt2", "causal-lm", {"ties": "rows", "edge_blocks": 1}),
    ],
)
def test_ties_across_replicas_are_exact(
    model_type: str, task: str, choices: dict[str, object]
) -> None:
    """A parameter that several stages share counts once, however many replicas hold it."""
    splitter = tied_splitter(model_type, task, choices)
    weights = splitter.initial_weights(seed=1)
    cut = Replicated(stops=(1, splitter.num_blocks), replicas=(2, 3), micro_batches=(1, 2, 1, 2))
    for rule, count in ((SGD, 1), (ADAMW, 3)):
        steps = tied_steps(splitter, cut, count)
        losses, split = train_replicated(splitter, weights, cut, steps, rule)
        whole_losses, whole = train_whole(splitter, weights, steps, rule)
        assert losses == near(whole_losses)
        assert_near(split, whole)


def test_adapters_train_alike_on_replicas(tmp_path: Path) -> None:
    plain = tied_splitter("bert", "sequence-classification", {})
    save_whole(plain.spec, plain.initial_weights(seed=1), tmp_path)
    lora = LoraConfig(rank=2, dropout=0.2)
    adapted = Splitter(make_spec("sequence-classification", pretrained=str(tmp_path), lora=lora))
    weights = adapted.initial_weights(seed=1)
    cut = Replicated(stops=(1, adapted.num_blocks), replicas=(2, 2), micro_batches=(1, 2, 1, 2))
    alone = Replicated(stops=(adapted.num_blocks,), replicas=(1,), micro_batches=cut.micro_batches)
    steps = tied_steps(adapted, cut, count=3)
    losses, expected = train_replicated(adapted, weights, alone, steps, ADAMW, dropout_seed=4)
    cut_losses, found = train_replicated(adapted, weights, cut, steps, ADAMW, dropout_seed=4)
    assert cut_losses == near(losses)
    assert_near(found, expected)
    assert largest_difference(found, weights) > 1e-3


def test_a_part_that_learns_by_other_means_than_gradients_is_refused() -> None:
    """A mean of what a layer has seen, say, of which each replica would see another part."""
    part = torch.nn.Linear(2, 2)
    part.register_buffer("seen", torch.zeros(1))
    line = gradient_sums.Siblings()
    line.check(part)
    line.check(part)
    part.seen += 1.0
    with pytest.raises(ModelError, match=r"its buffer seen .* set scheduler.replicas = false"):
        line.check(part)


def test_more_replicas_than_micro_batches_are_refused(splitter: Splitter) -> None:
    weights = splitter.initial_weights(seed=3)
    cut = Replicated(stops=(5,), replicas=(3,), micro_batches=(2, 2))
    with pytest.raises(ScheduleError, match="plan no more replicas than micro-batches"):
        train_round(splitter, order_of(cut, weights, SGD), [], ThreadFleet(ThreadEdge()))


def test_norms_of_gradients_and_bytes_between_replicas(splitter: Splitter) -> None:
    """Noise estimates count a replicated stage once; of a gradient each of two sends one copy."""
    weights, cut = splitter.initial_weights(seed=1), CUTS[0]
    alone = Replicated(stops=(5,), replicas=(1,), micro_batches=cut.micro_batches)
    steps = steps_of(splitter, cut, count=1)
    reports = {}
    for which in (cut, alone):
        order, batches = order_of(which, weights, SGD), micro_batches(splitter, steps)
        result = train_round(splitter, order, batches, ThreadFleet(ThreadEdge()))
        reports[which.replicas] = result.reports[1:-1]
    first, other = reports[2,]
    (single,) = reports[1,]
    assert first.small_square_norm == near(single.small_square_norm)
    assert first.big_square_norm == near(single.big_square_norm)
    assert (other.small_square_norm, other.big_square_norm) == (0.0, 0.0)
    for sums in ("small_weight", "small_squares", "big_weight", "big_squares"):
        assert getattr(first, sums) == getattr(single, sums) > 0
    assert (first.micro_batches, other.micro_batches, single.micro_batches) == (1, 1, 2)
    part = splitter.build_segment(0, 5, weights)
    gradient_bytes = sum(p.numel() * 4 for p in part.parameters() if p.requires_grad)
    assert (first.sent_beside_bytes, other.sent_beside_bytes) == (gradient_bytes, gradient_bytes)
    assert single.sent_beside_bytes == 0

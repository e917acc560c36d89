"""The first law: a plan decides where blocks run, never what they compute.

One SGD step with rate 1 moves every weight by minus its gradient, so equal weights after a step
mean equal gradients; AdamW over several steps covers the state that lives between steps.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch

from collapipe_flwr.cluster.control_unit import evaluate_batches
from collapipe_flwr.cluster.evaluation import PredictionConfig
from collapipe_flwr.cluster.fleet import ThreadFleet
from collapipe_flwr.cluster.hosted import ThreadEdge
from collapipe_flwr.cluster.order import LearningSettings, TrainingOrder
from collapipe_flwr.cluster.unsplit import evaluate_unsplit
from collapipe_flwr.models.splitter import Splitter
from collapipe_flwr.pipeline.optimizer import OptimizerConfig
from tests.closeness import assert_near, near
from tests.rounds import (
    ADAMW,
    SGD,
    Cut,
    largest_difference,
    make_splitter,
    micro_batches,
    steps_of,
    train_split,
    train_whole,
    without_labels,
)
from tests.thorough import few

pytestmark = pytest.mark.usefixtures("small_matrices_are_fused")


CUTS = [
    Cut(stops=(5,), micro_batches=(4,)),
    Cut(stops=(5,), micro_batches=(3, 3, 1)),
    Cut(stops=(2, 5), micro_batches=(2, 2)),
    Cut(stops=(1, 2, 5), micro_batches=(2, 2, 2, 1)),
    Cut(stops=(1, 2, 5), micro_batches=(2, 2, 2, 1), schedule="1f1b"),
    Cut(stops=(1, 2, 3, 4, 5), micro_batches=(1, 1, 1), schedule="1f1b"),
]


@pytest.mark.parametrize("cut", few(CUTS, 1, 4), ids=str)
def test_loss_and_every_gradient_equal_the_unsplit_model(splitter: Splitter, cut: Cut) -> None:
    weights = splitter.initial_weights(seed=1)
    steps = steps_of(splitter, cut, count=1)
    split_losses, split = train_split(splitter, weights, cut, steps, SGD)
    whole_losses, whole = train_whole(splitter, weights, steps, SGD)
    moved = largest_difference(whole, weights)
    assert moved > 1e-3  # the comparison below can fail
    assert split_losses == near(whole_losses)
    assert_near(split, whole)


@pytest.mark.parametrize("cut", few(CUTS[1:5], 3), ids=str)
def test_many_adamw_steps_stay_on_the_unsplit_path(splitter: Splitter, cut: Cut) -> None:
    weights = splitter.initial_weights(seed=2)
    steps = steps_of(splitter, cut, count=4)
    split_losses, split = train_split(splitter, weights, cut, steps, ADAMW)
    whole_losses, whole = train_whole(splitter, weights, steps, ADAMW)
    assert split_losses == near(whole_losses)
    assert_near(split, whole)
    assert largest_difference(whole, weights) > 1e-3


def test_micro_batches_give_the_gradient_of_one_large_batch(splitter: Splitter) -> None:
    weights = splitter.initial_weights(seed=3)
    cut = Cut(stops=(2, 5), micro_batches=(3, 3, 1))
    steps = steps_of(splitter, cut, count=1)
    joined = {key: torch.cat([b[key] for b in steps[0]]) for key in steps[0][0]}
    _, split = train_split(splitter, weights, cut, steps, SGD)
    _, whole = train_whole(splitter, weights, [[joined]], SGD)
    assert_near(split, whole)


@pytest.mark.parametrize("rule", few([SGD, ADAMW], 1), ids=lambda rule: rule.name)
def test_a_step_without_labels_is_none(splitter: Splitter, rule: OptimizerConfig) -> None:
    """Neither weights nor optimiser state feel it, not even by weight decay."""
    weights, cut = splitter.initial_weights(seed=3), CUTS[2]
    first, last = steps_of(splitter, cut, count=2)
    empty = [without_labels(batch) for batch in last]
    for train in (partial(train_split, cut=cut), train_whole):
        expected_losses, expected = train(splitter, weights, steps=[first, last], rule=rule)
        losses, found = train(splitter, weights, steps=[empty, first, empty, last], rule=rule)
        assert losses == expected_losses and len(losses) == 2
        assert all(torch.equal(found[key], expected[key]) for key in expected)
        losses, found = train(splitter, weights, steps=[empty], rule=rule)
        assert losses == ()
        assert all(torch.equal(found[key], weights[key]) for key in weights)


def test_a_micro_batch_without_labels_counts_nothing(splitter: Splitter) -> None:
    weights, cut = splitter.initial_weights(seed=3), Cut(stops=(2, 5), micro_batches=(2, 2, 2))
    ((first, second, third),) = steps_of(splitter, cut, count=1)
    steps = [[without_labels(first), second, without_labels(third)]]
    losses, split = train_split(splitter, weights, cut, steps, SGD)
    for same in (steps, [[second]]):
        whole_losses, whole = train_whole(splitter, weights, same, SGD)
        assert losses == near(whole_losses)
        assert_near(split, whole)


@pytest.mark.parametrize(
    "guessing",
    [None, PredictionConfig(most_tokens=4), PredictionConfig(logits=True)],
    ids=["loss", "guesses", "logits"],
)
def test_a_test_set_without_labels_has_no_loss(splitter: Splitter, guessing) -> None:
    """And guesses all the same, which are those of the unsplit model."""
    weights, cut = splitter.initial_weights(seed=3), CUTS[2]
    steps = [[without_labels(batch) for batch in step] for step in steps_of(splitter, cut, count=2)]
    order = TrainingOrder(
        plan=cut.plan(),
        weights=weights,
        learning=LearningSettings(optimizer=SGD, deadline_s=20.0),
    )
    batches, fleet = micro_batches(splitter, steps), ThreadFleet(ThreadEdge())
    found = evaluate_batches(splitter, order, batches, fleet, wanted=guessing)
    whole = evaluate_unsplit(splitter, splitter.build_whole(weights), steps, guessing)
    assert (found.loss, found.targets) == (whole.loss, whole.targets) == (0.0, 0.0)
    ours, theirs = ([ids for step in of.predictions for ids in step] for of in (found, whole))
    assert len(ours) == len(theirs) == (0 if guessing is None else 2 * len(cut.micro_batches))
    if guessing is not None and guessing.logits:
        assert all(left.dtype == torch.float32 for left in ours)
        assert_near(dict(enumerate(ours)), dict(enumerate(theirs)))
    elif not splitter.decodes:  # generated texts are padded in their own ways
        assert all(map(torch.equal, ours, theirs))


def test_weights_given_to_a_round_stay_as_they_were(splitter: Splitter) -> None:
    weights = splitter.initial_weights(seed=4)
    copy = {key: tensor.clone() for key, tensor in weights.items()}
    cut = Cut(stops=(5,), micro_batches=(2,))
    train_split(splitter, weights, cut, steps_of(splitter, cut, count=1), SGD)
    assert largest_difference(weights, copy) == 0.0


@pytest.mark.parametrize("model_type", few(["marian", "bert"], 0))
def test_dropout_is_the_same_for_every_cut_and_another_for_another_seed(model_type: str) -> None:
    dropping = make_splitter(model_type, dropout=0.2)
    weights = dropping.initial_weights(seed=5)
    one = Cut(stops=(5,), micro_batches=(3, 3))
    three = Cut(stops=(1, 2, 5), micro_batches=(3, 3), schedule="1f1b")
    steps = steps_of(dropping, one, count=2)
    losses, reference = train_split(dropping, weights, one, steps, ADAMW, dropout_seed=1)
    cut_losses, cut = train_split(dropping, weights, three, steps, ADAMW, dropout_seed=1)
    other_losses, _ = train_split(dropping, weights, one, steps, ADAMW, dropout_seed=2)
    assert cut_losses == near(losses)
    assert_near(cut, reference)
    assert other_losses != near(losses)

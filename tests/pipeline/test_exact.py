"""The law of the pipeline: whatever the cut, loss and weights are those of the unsplit model."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from collapipe_flwr.pipeline.optimizer import Optimizer
from tests.closeness import assert_near, near
from tests.pipeline.chains import (
    ADAMW,
    SGD,
    Chain,
    classic,
    make_batch,
    make_parts,
    settings,
    whole_loss,
)

pytestmark = pytest.mark.usefixtures("small_matrices_are_fused")


def reference(cut, batches, rule):
    """Losses and parts of one process on whole batches."""
    parts = make_parts(cut)
    optimizer = Optimizer(rule, nn.ModuleList(parts).named_parameters())
    losses = []
    for batch in batches:
        loss = whole_loss(parts, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, parts


def assert_same_weights(parts, others):
    for part, other in zip(parts, others, strict=True):
        assert_near(dict(part.named_parameters()), dict(other.named_parameters()))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("cut", [(3,), (1, 2), (2, 1), (1, 1, 1)])
@pytest.mark.parametrize("sizes", [(5,), (2, 2), (3, 3, 3, 1)])
def test_pipeline_equals_one_process(schedule, cut, sizes):
    batches = [make_batch(sizes, seed) for seed in (1, 2)]
    losses, wholes = reference(cut, batches, SGD)
    chain = Chain(make_parts(cut), classic(schedule))
    with chain.running() as first:
        results = [first.train_step(batch) for batch in batches]
    assert not chain.failures
    assert [r.loss for r in results] == near(losses)
    assert [r.weight for r in results] == [sum(m.weight for m in b) for b in batches]
    assert_same_weights([s.part for s in chain.stages], wholes)


def test_adamw_over_several_steps():
    batches = [make_batch((4, 4, 2), seed) for seed in range(4)]
    losses, wholes = reference((1, 2), batches, ADAMW)
    chain = Chain(make_parts((1, 2)), classic("1f1b"), rule=ADAMW)
    with chain.running() as first:
        assert [first.train_step(b).loss for b in batches] == near(losses)
    assert_same_weights([s.part for s in chain.stages], wholes)


def test_the_number_of_micro_batches_may_change_between_steps():
    batches = [make_batch((2, 2, 2)), make_batch((3,)), make_batch((1, 1, 1, 1, 1))]
    losses, _ = reference((1, 1), batches, SGD)
    with Chain(make_parts((1, 1)), classic("1f1b")).running() as first:
        assert [first.train_step(b).loss for b in batches] == near(losses)


def test_a_micro_batch_without_targets_counts_nothing():
    batch = make_batch((3, 2, 2))
    empty = batch[0]
    empty.context["labels"].fill_(-100)
    batch[0] = type(empty)(inputs=empty.inputs, context=empty.context, weight=0)
    losses, wholes = reference((1,), [batch], SGD)
    parts = make_parts((1,))
    head = parts[-1]
    plain = head.forward
    head.forward = lambda h, c: plain(h, c) if head.weight_of(c) else h.sum() * 0.0
    chain = Chain(parts, classic("gpipe"))
    with chain.running() as first:
        assert first.train_step(batch).loss == near(losses[0])
    assert_same_weights(parts, wholes)


def test_frozen_parts_pass_gradients_on():
    parts, batch = make_parts((1, 1)), make_batch((2, 2))
    for part in parts[:2]:
        part.requires_grad_(False)
    losses, _ = reference((1, 1), [batch], SGD)
    before = [p.clone() for part in parts[:2] for p in part.parameters()]
    head = parts[-1].out.weight.detach().clone()
    chain = Chain(parts, classic("1f1b"))
    with chain.running() as first:
        assert first.train_step(batch).loss == near(losses[0])
    after = [p for part in parts[:2] for p in part.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert not torch.equal(parts[-1].out.weight, head)


def test_evaluation_changes_nothing_and_returns_the_loss():
    parts, batch = make_parts((1, 1)), make_batch((3, 3, 1))
    before = [p.detach().clone() for part in parts for p in part.parameters()]
    chain = Chain(parts, classic("gpipe"))
    with chain.running() as first:
        result = first.evaluate(batch)
    assert result.loss == near(whole_loss(make_parts((1, 1)), batch).item())
    after = [p for part in parts for p in part.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert all(stage.report().steps == 0 for stage in chain.stages)


def test_training_goes_on_after_an_evaluation():
    batch = make_batch((3, 3, 1))
    with Chain(make_parts((1, 1)), classic("1f1b")).running() as first:
        evaluated = [first.evaluate(batch).loss]
        trained = [first.train_step(batch).loss for _ in range(2)]
        evaluated.append(first.evaluate(batch).loss)
    assert trained[0] == near(evaluated[0])
    assert evaluated[1] < trained[1] < trained[0]


def test_gradient_norms_are_those_of_the_first_micro_batch_and_of_the_batch():
    cut, batch = (1, 1), make_batch((2, 4, 3))
    chain = Chain(make_parts(cut), classic("1f1b"))
    with chain.running() as first:
        first.train_step(batch)
    reports = [s.report() for s in chain.stages]
    for micro_batches, field in ((batch[:1], "small"), (batch, "big")):
        parts = make_parts(cut)
        whole_loss(parts, micro_batches).backward()
        norm = sum(float(p.grad.pow(2).sum()) for part in parts for p in part.parameters())
        assert sum(getattr(r, f"{field}_square_norm") for r in reports) == near(norm)


def test_reports_count_every_byte_once_on_each_side():
    chain = Chain(make_parts((1, 1)), classic("gpipe"))
    with chain.running() as first:
        first.train_step(make_batch((2, 2)))
    reports = [s.report() for s in chain.stages]
    for left, right in itertools.pairwise(reports):
        assert left.sent_down.bytes == right.received_up.bytes > 0
        assert left.received_down.bytes == right.sent_up.bytes > 0
    assert all(r.steps == 1 and r.forward_s > 0 and r.backward_s > 0 for r in reports)


def test_1f1b_keeps_fewer_activations_than_gpipe():
    peaks = {}
    for name, depth in (("gpipe", 8), ("1f1b", 2)):
        parts = make_parts((2,))
        chain = Chain(
            parts,
            lambda n, i, s, name=name, depth=depth: settings(n, name, depth if i < s - 1 else 1),
        )
        with chain.running() as first:
            first.train_step(make_batch((4,) * 8))
        peaks[name] = chain.stages[1].report().peak_tensor_bytes
    fixed = sum(2 * p.numel() * 4 for p in parts[1].parameters())
    assert fixed < peaks["1f1b"] < peaks["gpipe"]
    assert (peaks["gpipe"] - fixed) / (peaks["1f1b"] - fixed) == pytest.approx(4, rel=0.2)

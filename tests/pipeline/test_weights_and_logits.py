"""Losses that are means over weights, and evaluations that ask for all scores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from collapipe_flwr.core.errors import LinkError
from collapipe_flwr.pipeline.step import MicroBatch, Step
from tests.closeness import assert_near, near
from tests.pipeline.chains import Chain, Head, classic, make_batch, make_parts, whole_loss


class WeightedHead(Head):
    """Every example has a weight of its own."""

    def forward(self, hidden_BTD: Tensor, context: Mapping[str, Tensor]) -> Tensor:
        logits = self.out(hidden_BTD)[:, 0]
        losses = torch.nn.functional.cross_entropy(
            logits, context["labels"][:, 0], reduction="none"
        )
        return (losses * context["weights"]).sum() / context["weights"].sum()

    def weight_of(self, context: Mapping[str, Tensor]) -> float:
        return float(context["weights"].sum(dtype=torch.float64))

    def judge(
        self, hidden_BTD: Tensor, context: Mapping[str, Tensor], *, scores: bool = False
    ) -> tuple[Tensor, Tensor]:
        logits = self.out(hidden_BTD)[:, 0]
        return self(hidden_BTD, context), logits if scores else logits.argmax(-1)


class OldHead(WeightedHead):
    """Knows classes only."""

    def judge(self, hidden_BTD, context, *, scores=False):
        del scores
        return super().judge(hidden_BTD, context)


def weighted(sizes: tuple[int, ...]) -> list[MicroBatch]:
    random = torch.Generator().manual_seed(5)
    found = []
    for batch in make_batch(sizes):
        weights = torch.rand(len(batch.inputs["input_ids"]), generator=random) + 0.1
        context = {**batch.context, "weights": weights}
        weight = float(weights.sum(dtype=torch.float64))
        found.append(replace(batch, context=context, weight=weight))
    return found


def parts_with(head: Head) -> list[torch.nn.Module]:
    torch.manual_seed(1)
    return [*make_parts((1, 1))[:-1], head]


def test_a_fractional_weight_is_shared_out() -> None:
    head = WeightedHead()
    parts, batch = parts_with(head), weighted((3, 2, 1))
    one = {key: torch.cat([m.context[key] for m in batch]) for key in batch[0].context}
    hidden = parts[0]({"input_ids": torch.cat([m.inputs["input_ids"] for m in batch])})
    for part in parts[1:]:
        hidden = part(hidden, one)
    expected, gradients = hidden, torch.autograd.grad(hidden, list(head.parameters()))
    before = [parameter.detach().clone() for parameter in head.parameters()]
    with Chain(parts, classic("1f1b")).running() as first:
        result = first.train_step(batch)
    assert result.loss == near(float(expected.detach()))
    moved = [(b - p.detach()) / 0.5 for b, p in zip(before, head.parameters(), strict=True)]
    assert_near(moved, list(gradients))


def test_weights_are_counted_again_up_to_rounding() -> None:
    batch = [replace(m, weight=m.weight * (1 + 1e-9)) for m in weighted((2, 2))]
    with Chain(parts_with(WeightedHead()), classic("gpipe")).running() as first:
        assert first.evaluate(batch).loss > 0
    wrong = [replace(m, weight=m.weight * 1.001) for m in batch]
    with (
        pytest.raises(LinkError, match="but its labels count"),
        Chain(parts_with(WeightedHead()), classic("gpipe")).running() as first,
    ):
        first.evaluate(wrong)


def test_scores_and_classes_come_back_as_asked() -> None:
    batch = weighted((2, 3))
    with Chain(parts_with(WeightedHead()), classic("gpipe")).running() as first:
        assert first.evaluate(batch).predictions == ()
        classes = first.evaluate(batch, predict="classes").predictions
        logits = first.evaluate(batch, predict="logits").predictions
    assert [tuple(t.shape) for t in logits] == [(2, 5), (3, 5)]
    assert all(map(torch.equal, classes, (scores.argmax(-1) for scores in logits)))


def test_an_edge_that_knows_no_logits_is_told_of() -> None:
    with (
        pytest.raises(LinkError, match="holds other predictions than logits"),
        Chain(parts_with(OldHead()), classic("gpipe")).running() as first,
    ):
        first.evaluate(weighted((2, 2)), predict="logits")


def test_a_step_says_what_is_asked_for() -> None:
    for predict in ("", "classes", "logits"):
        step = Step(index=3, micro_batches=2, train=False, weight=1.5, predict=predict)
        assert Step.from_frame(step.make_frame()) == step


def test_the_plain_head_still_counts_labels() -> None:
    parts, batch = make_parts((1,)), make_batch((2, 2))
    expected = float(whole_loss(parts, batch).detach())
    with Chain(parts, classic("gpipe")).running() as first:
        assert first.evaluate(batch).loss == near(expected)

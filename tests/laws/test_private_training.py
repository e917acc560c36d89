"""Laws: differentially private training is the same however the model is cut, and hides examples.

The peer is written with plain torch: one example at a time, its gradient clipped by block.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from collapipe_flwr.cluster.control_unit import train_round
from collapipe_flwr.cluster.fleet import ThreadFleet
from collapipe_flwr.cluster.hosted import ThreadEdge
from collapipe_flwr.cluster.order import LearningSettings
from collapipe_flwr.cluster.privacy import draw_privacy
from collapipe_flwr.core.errors import ConfigError, ScheduleError
from collapipe_flwr.models.describing import make_spec
from collapipe_flwr.models.saving import save_whole
from collapipe_flwr.models.spec import LoraConfig
from collapipe_flwr.models.split_model import SplitModel
from collapipe_flwr.models.splitter import Splitter
from collapipe_flwr.pipeline import private_gradients
from collapipe_flwr.pipeline.config import ExamplePrivacy, Execution, NoiseConfig
from collapipe_flwr.pipeline.optimizer import OptimizerConfig
from collapipe_flwr.pipeline.private_gradients import PrivateGradients, draw_normal
from tests.models import own_losses
from tests.models.conftest import OVERRIDES, TOKENS
from tests.rounds import (
    ADAMW,
    BLOCKS,
    SGD,
    Batch,
    Replicated,
    bert,
    largest_difference,
    make_splitter,
    micro_batches,
    one_to_three_devices,
    order_of,
    steps_of,
    train_split,
    without_labels,
)
from tests.thorough import few

pytestmark = pytest.mark.usefixtures("small_matrices_are_fused")

CLIP = 0.05  # most examples of these models have larger gradients, and some groups smaller ones
EXAMPLES = (1, 1, 1, 1)
CUTS = one_to_three_devices(EXAMPLES)
TORCH: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda weights: torch.optim.SGD(weights, lr=1.0),
    "adamw": lambda weights: torch.optim.AdamW(weights, lr=1e-3),
}


def privacy(splitter: Splitter, deviation: float = 0.0, secret: str = "00") -> ExamplePrivacy:
    most = CLIP / splitter.trained_groups**0.5
    return ExamplePrivacy(group_norm=most, deviation=deviation, secret=secret)


def group_of(name: str) -> str:
    """The block of a parameter by its name, or what it belongs to besides."""
    block = re.search(r"encoder\.layers?\.(\d+)\.", name)
    if block:
        return block[1]
    return "embedding" if re.search(r"(^|\.)(embeddings|encoder\.embed)", name) else "edge"


def train_reference(
    splitter: Splitter, weights: dict[str, Tensor], steps: list[list[Batch]], rule: OptimizerConfig
) -> dict[str, Tensor]:
    """Per-example gradients of the whole model, clipped by group, their mean in torch's step."""
    model = splitter.build_whole(weights)
    model.train()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    groups = {group_of(name) for name in trained}
    optimizer = TORCH[rule.name](trained.values())
    for step in steps:
        total = {name: torch.zeros_like(p) for name, p in trained.items()}
        for example in step:
            if bool((example["labels"] == -100).all()):
                continue
            model.zero_grad()
            model(**example).loss.backward()
            for group in groups:
                own = {n: p.grad for n, p in trained.items() if group_of(n) == group}
                own = {n: g for n, g in own.items() if g is not None}
                norm = torch.cat([g.flatten() for g in own.values()]).norm()
                factor = (CLIP / len(groups) ** 0.5 / norm).clamp(max=1)
                for name, gradient in own.items():
                    total[name] += factor * gradient
        for name, parameter in trained.items():
            parameter.grad = total[name] / len(step)
        optimizer.step()
    return splitter.trained_weights(model)


@pytest.mark.parametrize(
    ("model_type", "rule", "count"),
    few([("bert", ADAMW, 3), ("marian", SGD, 1), ("bert", SGD, 1), ("marian", ADAMW, 3)], 0, 1),
)
def test_every_cut_clips_examples_as_an_unsplit_model(
    model_type: str, rule: OptimizerConfig, count: int
) -> None:
    splitter = bert() if model_type == "bert" else make_splitter(model_type, 0.0)
    weights = splitter.initial_weights(seed=3)
    steps = steps_of(splitter, CUTS[0], count)
    if model_type == "marian":  # an example that has no label takes part, and pulls nowhere
        steps[0][1] = without_labels(steps[0][1])
    wanted = train_reference(splitter, weights, steps, rule)
    assert largest_difference(weights, wanted) > 1e-3
    for cut in CUTS:
        _, found = train_split(splitter, weights, cut, steps, rule, privacy=privacy(splitter))
        assert largest_difference(found, wanted) <= 1e-6, cut.stops


def test_replicas_and_recomputation_change_nothing() -> None:
    splitter = bert()
    weights, noisy = splitter.initial_weights(seed=3), privacy(splitter, deviation=0.01)
    steps = steps_of(splitter, CUTS[0], 2)
    _, wanted = train_split(splitter, weights, CUTS[0], steps, SGD, privacy=noisy)
    both = Replicated(stops=(2, BLOCKS), micro_batches=EXAMPLES, replicas=(2, 1))
    _, found = train_split(splitter, weights, both, steps, SGD, privacy=noisy)
    assert largest_difference(found, wanted) <= 1e-6
    again = Execution(recompute=True)
    _, found = train_split(splitter, weights, CUTS[1], steps, SGD, privacy=noisy, execution=again)
    assert largest_difference(found, wanted) <= 1e-6


@pytest.mark.slow
def test_adapters_are_clipped_alike(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    base = bert()
    save_whole(base.spec, base.initial_weights(seed=3), tmp_path)
    lora = LoraConfig(rank=2, alpha=4)
    splitter = Splitter(
        make_spec(base.spec.task, pretrained=str(tmp_path), num_labels=4, lora=lora)
    )
    weights = splitter.initial_weights(seed=3)
    generator = torch.Generator().manual_seed(0)  # else no gradient reaches half of them
    weights = {k: torch.randn(t.shape, generator=generator) * 0.1 for k, t in weights.items()}
    steps = steps_of(base, CUTS[0], 3)
    wanted = train_reference(splitter, weights, steps, ADAMW)
    for cut in CUTS:
        _, found = train_split(splitter, weights, cut, steps, ADAMW, privacy=privacy(splitter))
        assert largest_difference(found, wanted) <= 1e-6


def _forget_a_group(self: PrivateGradients, scale: float) -> None:
    self._groups.pop(2, None)
    CLIPPING(self, scale)


def _clip_the_sum(self: PrivateGradients, scale: float) -> None:
    del scale  # gradients pile up; `put_sums` clips them once
    self._piled = True  # type: ignore[attr-defined]


CLIPPING, SUMMING = PrivateGradients.add_example, PrivateGradients.put_sums


def _put_clipped_sum(self: PrivateGradients) -> None:
    CLIPPING(self, 1.0)
    SUMMING(self)


@pytest.mark.parametrize("mistake", ["group", "sum"])
def test_a_wrong_clip_is_caught(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if mistake == "group":
        monkeypatch.setattr(PrivateGradients, "add_example", _forget_a_group)
    else:
        monkeypatch.setattr(PrivateGradients, "add_example", _clip_the_sum)
        monkeypatch.setattr(PrivateGradients, "put_sums", _put_clipped_sum)
    splitter = bert()
    weights, steps = splitter.initial_weights(seed=3), steps_of(splitter, CUTS[0])
    wanted = train_reference(splitter, weights, steps, SGD)
    _, found = train_split(splitter, weights, CUTS[1], steps, SGD, privacy=privacy(splitter))
    assert largest_difference(found, wanted) > 1e-4


def test_noise_is_that_of_the_mean_whatever_the_cut_and_replays_bit_for_bit() -> None:
    splitter = bert()
    weights, steps = splitter.initial_weights(seed=3), steps_of(splitter, CUTS[0])
    deviation = 0.5
    _, quiet = train_split(splitter, weights, CUTS[0], steps, SGD, privacy=privacy(splitter))
    drawn: dict[str, list[Tensor]] = {}
    for secret, cuts in (("aa", CUTS[:1]), ("bb", CUTS[1:])):
        for cut in cuts:
            loud = privacy(splitter, deviation, secret)
            _, found = train_split(splitter, weights, cut, steps, SGD, privacy=loud)
            noise = torch.cat([(found[k] - quiet[k]).flatten() for k in found])
            drawn.setdefault(secret, []).append(noise)
            close = {k: (found[k] - quiet[k]).std() for k in found if found[k].numel() > 500}
            for name, std in close.items():
                assert float(std) == pytest.approx(deviation / len(EXAMPLES), rel=0.15), name
        assert all((each - drawn[secret][0]).abs().max() <= 1e-6 for each in drawn[secret])
    assert (drawn["aa"][0] - drawn["bb"][0]).std() > deviation / len(EXAMPLES)
    _, again = train_split(
        splitter, weights, CUTS[2], steps, SGD, privacy=privacy(splitter, deviation, "bb")
    )
    assert all(torch.equal(again[key], found[key]) for key in found)


def test_drawn_numbers_are_normal_and_independent_of_each_other() -> None:
    count = 2 * private_gradients._CHUNK + 1
    one = draw_normal(b"secret", 3, "w", count)
    assert len(one) == count
    assert float(one.mean()) == pytest.approx(0, abs=0.01)
    assert float(one.std()) == pytest.approx(1, abs=0.01)
    assert float((one.abs() > 1.96).float().mean()) == pytest.approx(0.05, abs=0.002)
    assert torch.equal(one, draw_normal(b"secret", 3, "w", count))
    for other in (
        draw_normal(b"secret", 4, "w", count),
        draw_normal(b"secret", 3, "v", count),
        draw_normal(b"Secret", 3, "w", count),
        one.roll(private_gradients._CHUNK),  # the other number of a pair
    ):
        assert abs(float((one * other).mean())) < 0.01


def test_no_number_of_a_single_example_is_reported() -> None:
    splitter = bert()
    order = order_of(CUTS[1], splitter.initial_weights(seed=3), SGD)
    order = replace(order, privacy=privacy(splitter, 0.1))
    batches = micro_batches(splitter, steps_of(splitter, CUTS[1]))
    result = train_round(splitter, order, batches, ThreadFleet(ThreadEdge()))
    assert [report.small_square_norm for report in result.reports] == [0.0] * 4
    assert all(report.big_square_norm > 0 for report in result.reports)
    assert "00" not in repr(order.privacy)


LEARNING = LearningSettings(
    labels_at_home=True, privacy=NoiseConfig(clip_norm=0.05, noise_multiplier=2.0)
)


def test_every_order_draws_a_secret_of_its_own() -> None:
    one, other = (draw_privacy(bert(), LEARNING, CUTS[0].plan()) for _ in range(2))
    assert one is not None and other is not None
    assert one.secret != other.secret
    assert (one.group_norm, one.deviation) == (0.05 / (BLOCKS + 2) ** 0.5, 0.1)
    assert draw_privacy(bert(), LearningSettings(), CUTS[0].plan()) is None


@pytest.mark.parametrize(
    ("learning", "choices", "said"),
    [
        (replace(LEARNING, labels_at_home=False), {}, "privacy.labels=home"),
        (replace(LEARNING, execution=Execution(clip_norm=1.0)), {}, "train.clip-norm"),
        (LEARNING, {"ties": "rows"}, "model.ties=untie"),
        (LEARNING, {"shared": "sum"}, "model.shared=freeze"),
        (LEARNING, {"whole_batches": True}, "whole batches"),
    ],
)
def test_what_would_break_the_guarantee_is_refused(
    learning: LearningSettings, choices: dict[str, Any], said: str
) -> None:
    splitter = bert()
    if choices:
        spec = make_spec("seq2seq", model_type="t5", overrides=OVERRIDES["t5"], **TOKENS)
        splitter = Splitter(replace(spec, **choices))
    with pytest.raises(ConfigError, match=said):
        draw_privacy(splitter, learning, CUTS[0].plan())


def test_a_split_model_is_refused() -> None:
    batch = {"x": torch.randn(2, 5), "labels": torch.zeros(2, dtype=torch.int64)}
    described = SplitModel(own_losses.Net(), example=batch)
    with pytest.raises(ConfigError, match=r"described by SplitModel, of which only models of tran"):
        draw_privacy(described.splitter, LEARNING, CUTS[0].plan())


def test_micro_batches_of_several_examples_are_refused() -> None:
    plan = replace(CUTS[0].plan(), micro_batch_size=2)
    with pytest.raises(ScheduleError, match="must hold one"):
        draw_privacy(bert(), LEARNING, plan)

"""Own heads and losses: the split model trains as the user's own loop on the whole batch does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    BartForConditionalGeneration,
    BertForMaskedLM,
    MBartForConditionalGeneration,
)

from collapipe_flwr.cluster.control_unit import evaluate_batches
from collapipe_flwr.cluster.evaluation import PredictionConfig
from collapipe_flwr.cluster.fleet import ThreadFleet
from collapipe_flwr.cluster.hosted import ThreadEdge
from collapipe_flwr.cluster.order import LearningSettings, TrainingOrder
from collapipe_flwr.core import imports
from collapipe_flwr.core.errors import ModelError
from collapipe_flwr.models.spec import ModelSpec
from collapipe_flwr.models.spec import spec_of as read_spec
from collapipe_flwr.models.split_model import SplitModel
from collapipe_flwr.models.splitter import Splitter
from collapipe_flwr.models.tasks import recognize_task
from collapipe_flwr.pipeline.optimizer import OptimizerConfig
from tests.closeness import assert_near, near
from tests.models import own_models
from tests.rounds import (
    SGD,
    Cut,
    micro_batches,
    train_split,
    train_whole,
)
from tests.thorough import few

CUTS = (
    Cut(stops=(4,), micro_batches=(6,)),
    Cut(stops=(1, 4), micro_batches=(3, 3)),
    Cut(stops=(1, 2, 4), micro_batches=(2, 2, 2), schedule="1f1b"),
)

# Attention's keys have biases whose true gradient is 0; a rule that divides by its size would make
# a direction of what rounding leaves.
CALM = OptimizerConfig(name="adamw", learning_rate=1e-3, eps=1e-4)


@pytest.fixture(autouse=True)
def _importable() -> None:
    imports.allow(own_models.__name__)


def spec_of(kind: type, **choices: Any) -> ModelSpec:
    config = own_models.bert_config()
    config.return_dict = True
    return ModelSpec(
        task=recognize_task(kind),
        config_json=config.to_json_string(use_diff=False),
        model_class=imports.find_path(kind, "the model"),
        **choices,
    )


def batch(seed: int, examples: int = 6) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, 9, (examples,), generator=random)
    mask = (torch.arange(8)[None] < lengths[:, None]).long()
    return {
        "input_ids": torch.randint(3, 50, (examples, 8), generator=random) * mask,
        "attention_mask": mask,
        "labels": torch.randint(0, 3, (examples,), generator=random),
        "tones": torch.randn(examples, generator=random),
        "sample_weight": torch.rand(examples, generator=random) + 0.1,
    }


def cut_up(whole: Mapping[str, Tensor], sizes: Sequence[int]) -> list[dict[str, Tensor]]:
    pieces = {key: torch.split(tensor, list(sizes)) for key, tensor in whole.items()}
    return [{key: pieces[key][i] for key in whole} for i in range(len(sizes))]


def by_hand(
    model: nn.Module, loss_of: Callable[[Any, Any], Tensor], steps: Sequence[Any], adamw: bool
) -> list[float]:
    """The loop that a user has now."""
    rates = {"lr": CALM.learning_rate, "weight_decay": 0.01, "eps": CALM.eps}
    optimizer: Any = torch.optim.AdamW(model.parameters(), **rates)
    if not adamw:
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model.train()
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def two_heads_loss(model: Any, step: dict[str, Tensor]) -> Tensor:
    return model(**step)["loss"]


def smoothed_loss(model: Any, step: dict[str, Tensor]) -> Tensor:
    known = {key: step[key] for key in ("input_ids", "attention_mask")}
    return own_models.smoothed(model(**known), step)


CASES = {
    "own forward": (
        spec_of(own_models.TwoHeads, weight="sample_weight"),
        own_models.TwoHeads,
        two_heads_loss,
    ),
    "own head, named loss": (
        spec_of(
            own_models.TwoHeads,
            loss="tests.models.own_models:two_losses",
            weight="sample_weight",
        ),
        own_models.TwoHeads,
        two_heads_loss,
    ),
    "named loss": (
        spec_of(own_models.Smoothed, loss="tests.models.own_models:smoothed"),
        own_models.Smoothed,
        smoothed_loss,
    ),
    "named loss, library's class": (
        replace(
            spec_of(own_models.Smoothed, loss="tests.models.own_models:smoothed"), model_class=""
        ),
        own_models.Smoothed,
        smoothed_loss,
    ),
}


@pytest.mark.parametrize("cut", few(CUTS, len(CUTS) - 1), ids=str)
@pytest.mark.parametrize("case", CASES)
def test_three_steps_equal_the_users_own_loop(case: str, cut: Cut) -> None:
    spec, kind, loss_of = CASES[case]
    splitter = Splitter(read_spec(spec.to_json()))
    model = kind(own_models.bert_config())
    weights = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    assert set(weights) == set(splitter.all_keys())
    steps = [batch(seed) for seed in range(3)]
    cut_steps = [cut_up(step, cut.micro_batches) for step in steps]
    losses, split = train_split(splitter, weights, cut, cut_steps, CALM)
    assert losses == near(tuple(by_hand(model, loss_of, steps, adamw=True)))
    assert_near(split, dict(model.state_dict()))


@pytest.mark.parametrize(
    ("kind", "config", "reads"),
    [
        (own_models.OnElectra, own_models.electra_config, ("input_ids", "attention_mask")),
        (own_models.OnScaledBody, own_models.bert_config, ("input_ids",)),
    ],
)
def test_own_heads_on_bodies_without_a_record(
    kind: Any, config: Callable[[], Any], reads: tuple[str, ...]
) -> None:
    model = kind(config())
    steps = [{key: batch(seed)[key] for key in (*reads, "labels")} for seed in range(3)]
    split_model = SplitModel(model, example=steps[0])
    assert not split_model.splitter.has_record
    cut_steps = [cut_up(batch(seed), (3, 3)) for seed in range(3)]  # with a mask that one ignores
    weights = {key: tensor.clone() for key, tensor in split_model.weights().items()}
    losses, split = train_split(split_model.splitter, weights, CUTS[1], cut_steps, CALM)
    assert losses == near(tuple(by_hand(model, two_heads_loss, steps, adamw=True)))
    assert_near(split_model.splitter.whole_state(split), dict(model.state_dict()), depth=3)


def test_what_a_body_keeps_from_call_to_call_has_values() -> None:
    """The trace computes the same positions on fake tensors, before anything else does."""
    rng = torch.Generator().manual_seed(1)
    pictures = torch.randn(6, 3, 16, 16, generator=rng)
    step = {"pixel_values": pictures, "labels": torch.arange(6) % 3}
    model = own_models.OnDino(own_models.dino_config(rescale=None))
    splitter = SplitModel(model, example=step).splitter
    weights = splitter.initial_weights(seed=1)
    losses, split = train_split(splitter, weights, CUTS[1], [cut_up(step, (3, 3))], SGD)
    whole_losses, whole = train_whole(splitter, weights, [[step]], SGD)
    assert losses == near(whole_losses)
    assert_near(split, whole)


def test_positions_that_are_drawn_at_random_are_refused() -> None:
    """Every machine would draw others for its own blocks."""
    with pytest.raises(ModelError, match=r"'position_embeddings' .* drawn at random"):
        SplitModel(own_models.OnDino(own_models.dino_config(rescale=2.0)), batch_size=6)


@pytest.mark.parametrize("case", CASES)
def test_gradients_equal_the_users_own(case: str) -> None:
    spec, kind, loss_of = CASES[case]
    splitter, model = Splitter(spec), kind(own_models.bert_config())
    weights = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    steps = [batch(5)]
    _, split = train_split(splitter, weights, CUTS[1], [cut_up(steps[0], (4, 2))], SGD)
    by_hand(model, loss_of, steps, adamw=False)
    assert_near(split, dict(model.state_dict()))


@pytest.mark.parametrize("case", CASES)
def test_logits_come_back(case: str) -> None:
    spec, kind, _ = CASES[case]
    splitter, model = Splitter(spec), kind(own_models.bert_config()).eval()
    weights = dict(model.state_dict())
    whole, cut = batch(9), CUTS[1]
    order = TrainingOrder(
        plan=cut.plan(),
        weights=weights,
        learning=LearningSettings(optimizer=SGD, deadline_s=20.0),
    )
    found = evaluate_batches(
        splitter,
        order,
        micro_batches(splitter, [cut_up(whole, cut.micro_batches)]),
        ThreadFleet(ThreadEdge()),
        wanted=PredictionConfig(logits=True),
    )
    known = {key: whole[key] for key in ("input_ids", "attention_mask")}
    with torch.no_grad():
        expected = model(**known)["logits"]
    assert_near({"": torch.cat(found.predictions[0])}, {"": expected})
    assert found.targets == near(
        float(whole["sample_weight"].sum()) if spec.weight else len(whole["labels"])
    )


def test_a_head_that_reads_all_hidden_states_is_refused() -> None:
    splitter = Splitter(spec_of(own_models.AllStates))
    edge = splitter.build_edge(splitter.initial_weights(seed=0))
    context = splitter.context(batch(0))
    with pytest.raises(ModelError, match="asks its base model for output_hidden_states"):
        edge(torch.zeros(6, 8, 32), context)


@pytest.mark.parametrize(
    ("kind", "task"),
    [
        (BartForConditionalGeneration, "seq2seq"),
        (MBartForConditionalGeneration, "seq2seq"),
        (BertForMaskedLM, "masked-lm"),
    ],
)
def test_the_task_of_a_class(kind: type, task: str) -> None:
    assert recognize_task(kind) == task


def test_a_tensor_that_is_missing_is_named() -> None:
    splitter = Splitter(CASES["own forward"][0])
    with pytest.raises(ModelError, match="needs the tensor 'sample_weight'"):
        splitter.weight_of({"labels": torch.zeros(3)})


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("nowhere", "no import path"),
        ("os:system", "--import os"),
        ("transformers:pipeline", "no class of"),
        ("tests.models.own_models:Nothing", "leads nowhere"),
        ("tests.models.own_models:functional.cross_entropy", "no class of"),
        ("tests.models.own_models:two_losses", "no class of"),
        ("tests.models.own_models:nn.Linear", "no class of"),
    ],
)
def test_a_path_that_leads_to_no_model_is_refused(path: str, reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        Splitter(replace(CASES["own forward"][0], model_class=path))


def test_only_functions_of_allowed_modules_are_losses() -> None:
    for path in ("torch.nn.functional:cross_entropy", "tests.models.own_models:TwoHeads"):
        with pytest.raises(ModelError, match="no function of a module that --import names"):
            Splitter(replace(CASES["named loss"][0], loss=path))

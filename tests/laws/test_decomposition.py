"""The law of decomposition: micro-batches give the step of the unsplit model, or there are none.

What may be cut is told when a model is described; its batches may then be as uneven as they like.
One SGD step with rate 1 moves every weight by minus its gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    BertForMaskedLM,
    BertForNextSentencePrediction,
    BertForPreTraining,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    PreTrainedModel,
    ViTConfig,
    ViTForImageClassification,
)

from collapipe_flwr.cluster.order import LearningSettings
from collapipe_flwr.core.errors import ModelError, ScheduleError
from collapipe_flwr.federation.planner import DescribedClusters, planner_of
from collapipe_flwr.models.split_model import SplitModel
from collapipe_flwr.models.splitter import splitter_of
from tests.closeness import assert_near, near
from tests.models import own_losses as own
from tests.models.own_models import BatchNormed, bert_config
from tests.models.test_own_models import by_hand, cut_up
from tests.rounds import SGD, Cut, train_split
from tests.thorough import few

EXAMPLES = 6
LENGTH = 8
WHOLE = Cut(stops=(1, 4), micro_batches=(6,))
UNEVEN = Cut(stops=(1, 4), micro_batches=(3, 2, 1))
Batches = Callable[[torch.Generator], dict[str, Tensor]]


def features(random: torch.Generator) -> dict[str, Tensor]:
    return {"x": torch.randn(EXAMPLES, 5, generator=random)}


def classes(random: torch.Generator, *sizes: int) -> Tensor:
    return torch.randint(0, own.CLASSES, (EXAMPLES, *sizes), generator=random)


def classified(random: torch.Generator) -> dict[str, Tensor]:
    return {**features(random), "labels": classes(random)}


def ignoring(random: torch.Generator) -> dict[str, Tensor]:
    """As the example may not show."""
    found = classified(random)
    found["labels"][:2] = -100
    return found


def in_rows(random: torch.Generator) -> dict[str, Tensor]:
    labels = classes(random, LENGTH)
    labels[torch.arange(LENGTH) > torch.tensor([[7], [1], [4], [2], [6], [3]])] = -100
    return {"x": torch.randn(EXAMPLES, LENGTH, 5, generator=random), "labels": labels}


def late(random: torch.Generator) -> dict[str, Tensor]:
    """As the first label may not show whether a loss reads it."""
    found = in_rows(random)
    found["labels"][:, 0] = -100
    return found


def counted(random: torch.Generator) -> dict[str, Tensor]:
    found = in_rows(random)
    return {**found, "counted": (found["labels"][:, 1:] != -100).sum(1)}


def weighted(random: torch.Generator) -> dict[str, Tensor]:
    return {**classified(random), "weights": torch.rand(EXAMPLES, generator=random) + 0.1}


def by_class(random: torch.Generator) -> dict[str, Tensor]:
    found = classified(random)
    return {**found, "weights": own.WEIGHTS[found["labels"]]}


def viewed(random: torch.Generator) -> dict[str, Tensor]:
    views, others = torch.randn(2, EXAMPLES, own.CLASSES, generator=random)
    return {**features(random), "views": views, "others": others}


def tall(random: torch.Generator) -> dict[str, Tensor]:
    return {**features(random), "heights": torch.randn(EXAMPLES, generator=random)}


def labelled_often(random: torch.Generator) -> dict[str, Tensor]:
    labels = torch.rand(EXAMPLES, own.CLASSES, generator=random).round()
    return {**features(random), "labels": labels}


def one_class(random: torch.Generator) -> dict[str, Tensor]:
    """Of which no two weigh differently."""
    return {**features(random), "labels": torch.ones(EXAMPLES, dtype=torch.long)}


def of_two(random: torch.Generator) -> dict[str, Tensor]:
    return {**classified(random), "y": torch.randn(EXAMPLES, 5, generator=random)}


def of_kinds(random: torch.Generator) -> dict[str, Tensor]:
    return {**features(random), "kinds": classes(random)}


def half_labelled(random: torch.Generator) -> dict[str, Tensor]:
    kinds = classes(random)
    kinds[1:3] = -100
    return {**classified(random), "kinds": kinds}


def spoken(random: torch.Generator) -> dict[str, Tensor]:
    words = torch.randint(1, own.CLASSES, (EXAMPLES, 3), generator=random)
    lengths = torch.tensor([3, 1, 2, 3, 1, 2])
    return {"x": in_rows(random)["x"], "words": words, "lengths": lengths}


def painted(random: torch.Generator) -> dict[str, Tensor]:
    pieces = torch.randn(EXAMPLES, LENGTH, own.CLASSES, generator=random)
    x = torch.randn(EXAMPLES, LENGTH, 5, generator=random)
    places = torch.tensor([[7], [1], [4], [2], [6], [3]])
    return {"x": x, "pieces": pieces, "covered": (torch.arange(LENGTH) < places).float()}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model with its loss, whether its batches may be cut, and what it learns from."""

    cut: bool
    loss: Any = None
    batches: Batches = classified
    example: Batches | None = None  # where it tells less than the batches
    model: type[torch.nn.Module] = own.Net
    choices: Mapping[str, Any] = field(default_factory=dict)


BLOCKS = {"blocks": "blocks"}
NET = {
    "cross entropy": Case(cut=True, batches=ignoring, example=classified),
    "cross entropy of one's own": Case(
        cut=True, loss=own.cross_entropy, batches=ignoring, example=classified
    ),
    "that says it is over examples": Case(
        cut=True,
        loss=own.cross_entropy,
        batches=ignoring,
        example=classified,
        choices={"weight": "examples"},
    ),
    "labels in rows": Case(cut=True, loss=own.cross_entropy, batches=in_rows),
    "label smoothing": Case(cut=True, loss=own.smoothed, batches=ignoring, example=classified),
    "focal": Case(cut=True, loss=own.focal),
    "several labels": Case(cut=True, loss=own.several, batches=labelled_often),
    "regression": Case(cut=True, loss=own.squares, batches=tall),
    "triplets": Case(cut=True, loss=own.triplets, batches=viewed),
    "sample weights": Case(
        cut=True, loss=own.sample_weighted, batches=weighted, choices={"weight": "weights"}
    ),
    "class weights by a tensor": Case(
        cut=True, loss=own.class_weighted, batches=by_class, choices={"weight": "weights"}
    ),
    "shifted labels by a tensor": Case(
        cut=True, loss=own.shifted, batches=counted, choices={"weight": "counted"}
    ),
    "shifted labels": Case(
        cut=True, loss=own.shifted, batches=in_rows, choices={"weight": "labels"}
    ),
    "shifted labels, answers alone": Case(
        cut=True, loss=own.shifted, batches=in_rows, example=late
    ),
    "labels, answers alone": Case(cut=True, loss=own.cross_entropy, batches=in_rows, example=late),
    "shifted labels by name": Case(
        cut=True, loss=own.shifted, batches=in_rows, choices={"weight": "shifted-labels"}
    ),
    "labels of another name": Case(cut=True, loss=own.named_otherwise, batches=of_kinds),
    "connectionist": Case(cut=True, loss=own.connectionist, batches=spoken),
    "covered pieces by a tensor": Case(
        cut=True, loss=own.of_covered_pieces, batches=painted, choices={"weight": "covered"}
    ),
    "experts": Case(cut=True, loss=own.unbalanced, model=own.Experts, choices=BLOCKS),
    "a dataclass": Case(cut=True, loss=own.of_fields, model=own.Returning),
    "unnamed arguments": Case(
        cut=True, batches=of_two, model=own.Named, choices={"inputs": ("x", "y")}
    ),
    "unnamed weights": Case(cut=False, loss=own.sample_weighted, batches=weighted),
    "class weights": Case(cut=False, loss=own.class_weighted),
    "class weights, one class": Case(cut=False, loss=own.class_weighted, example=one_class),
    "a sum": Case(cut=False, loss=own.summed),
    "covered pieces": Case(cut=False, loss=own.of_covered_pieces, batches=painted),
    "contrastive": Case(cut=False, loss=own.contrastive, batches=viewed),
    "ranked": Case(cut=False, loss=own.ranked, batches=tall),
    "dice": Case(cut=False, loss=own.dice, batches=labelled_often),
    "root of a mean": Case(cut=False, loss=own.root_of_squares, batches=tall),
    "two means": Case(cut=False, loss=own.two_tasks, batches=half_labelled),
    "balanced experts": Case(cut=False, loss=own.balanced, model=own.Experts, choices=BLOCKS),
    "statistics of the batch": Case(cut=False, model=own.Centred),
    "BatchNorm in the head": Case(cut=False, model=own.NormedHead),
    "BatchNorm in blocks": Case(cut=False, model=BatchNormed),
    "asked for": Case(cut=False, choices={"whole_batches": True}),
}


def batch_of(batches: Batches, seed: int) -> dict[str, Tensor]:
    return batches(torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", few(NET, *range(0, len(NET), 2)))
def test_a_step_is_that_of_the_unsplit_module(name: str) -> None:
    case = NET[name]
    torch.manual_seed(2)
    model: Any = case.model()
    example = batch_of(case.example or case.batches, 0)
    described = SplitModel(model, example=example, loss=case.loss, **case.choices)
    inputs = described.spec.inputs

    def loss_of(model: Any, batch: dict[str, Tensor]) -> Tensor:
        outputs = model(**{key: batch[key] for key in inputs})
        return (case.loss or own.cross_entropy)(outputs, batch)

    check(described, loss_of, batch_of(case.batches, 1), cut=case.cut)


def check(
    described: SplitModel,
    loss_of: Callable[[Any, dict[str, Tensor]], Tensor],
    batch: dict[str, Tensor],
    *,
    cut: bool,
) -> None:
    """One step of the pipeline is the user's own, in micro-batches if there may be any."""
    splitter = splitter_of(described.spec.to_json())
    assert splitter.whole_batches is not cut
    weights = {key: tensor.clone() for key, tensor in described.weights().items()}
    if not cut:
        with pytest.raises(ScheduleError, match="plan one micro-batch"):
            train_split(splitter, weights, UNEVEN, [cut_up(batch, UNEVEN.micro_batches)], SGD)
    plan = UNEVEN if cut else WHOLE
    losses, split = train_split(splitter, weights, plan, [cut_up(batch, plan.micro_batches)], SGD)
    model: Any = described.model
    assert losses == near(tuple(by_hand(model, loss_of, [batch], adamw=False)))
    found, wanted = splitter.whole_state(split), dict(model.state_dict())
    floats = [key for key, tensor in wanted.items() if tensor.is_floating_point()]
    assert_near({key: found[key] for key in floats}, {key: wanted[key] for key in floats})
    assert any(not torch.equal(found[key], weights[key]) for key in floats if key in weights)


def tokens(random: torch.Generator) -> dict[str, Tensor]:
    lengths = torch.tensor([8, 3, 6, 4, 7, 5])
    mask = (torch.arange(LENGTH)[None] < lengths[:, None]).long()
    ids = torch.randint(3, 50, (EXAMPLES, LENGTH), generator=random) * mask
    return {"input_ids": ids, "attention_mask": mask}


def texts(random: torch.Generator) -> dict[str, Tensor]:
    return {**tokens(random), "labels": classes(random)}


def tagged(random: torch.Generator) -> dict[str, Tensor]:
    found = tokens(random)
    labels = classes(random, LENGTH).masked_fill(found["attention_mask"] == 0, -100)
    return {**found, "labels": labels}


def hidden(random: torch.Generator) -> dict[str, Tensor]:
    found = tokens(random)
    drawn = torch.rand(EXAMPLES, LENGTH, generator=random) < 0.4
    drawn[:, 0] = True
    return {**found, "labels": found["input_ids"].masked_fill(~drawn, -100)}


def continued(random: torch.Generator) -> dict[str, Tensor]:
    found = tokens(random)
    return {**found, "labels": found["input_ids"].masked_fill(found["attention_mask"] == 0, -100)}


def followed(random: torch.Generator) -> dict[str, Tensor]:
    return {**hidden(random), "next_sentence_label": classes(random) % 2}


def answered(random: torch.Generator) -> dict[str, Tensor]:
    starts, ends = torch.randint(0, LENGTH, (2, EXAMPLES), generator=random)
    return {**tokens(random), "start_positions": starts, "end_positions": ends}


def answered_later(random: torch.Generator) -> dict[str, Tensor]:
    """The library leaves answers behind the end of the window out."""
    found = answered(random)
    found["start_positions"][1:3] = LENGTH + 4
    found["end_positions"][1:4] = LENGTH + 4
    return found


def marked(random: torch.Generator) -> dict[str, Tensor]:
    return {**tokens(random), "labels": torch.rand(EXAMPLES, generator=random)}


def marked_often(random: torch.Generator) -> dict[str, Tensor]:
    return {**tokens(random), "labels": labelled_often(random)["labels"]}


def pictures(random: torch.Generator) -> dict[str, Tensor]:
    pixels = torch.randn(EXAMPLES, 3, 16, 16, generator=random)
    return {"pixel_values": pixels, "labels": classes(random)}


def bert(kind: type[PreTrainedModel], **changes: Any) -> Callable[[], PreTrainedModel]:
    return lambda: kind(bert_config(**changes))


def gpt2(kind: type[PreTrainedModel], **changes: Any) -> PreTrainedModel:
    off = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    sizes = {"vocab_size": 50, "n_positions": 16, "n_embd": 32, "n_layer": 4, "n_head": 2}
    return kind(GPT2Config(**{**sizes, **off, "num_labels": 3, "eos_token_id": 1, **changes}))


def vit() -> PreTrainedModel:
    sizes = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2}
    off = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    shape = {"intermediate_size": 48, "image_size": 16, "patch_size": 4, "num_labels": 3}
    return ViTForImageClassification(ViTConfig(**sizes, **off, **shape))


OFTEN = {"problem_type": "multi_label_classification"}
LIBRARY: dict[str, tuple[Callable[[], Any], Batches, bool]] = {
    "classes": (bert(BertForSequenceClassification), texts, True),
    "regression": (bert(BertForSequenceClassification, num_labels=1), marked, True),
    "several labels": (bert(BertForSequenceClassification, **OFTEN), marked_often, True),
    "tags": (bert(BertForTokenClassification), tagged, True),
    "masked tokens": (bert(BertForMaskedLM, tie_word_embeddings=False), hidden, True),
    "next sentences": (bert(BertForNextSentencePrediction), texts, True),
    "next tokens": (lambda: gpt2(GPT2LMHeadModel, tie_word_embeddings=False), continued, True),
    "classes by a decoder": (
        lambda: gpt2(GPT2ForSequenceClassification, pad_token_id=0),
        texts,
        True,
    ),
    "pictures": (vit, pictures, True),
    "two means": (bert(BertForPreTraining, tie_word_embeddings=False), followed, False),
    "answers": (bert(BertForQuestionAnswering, num_labels=2), answered_later, False),
}


def by_library(model: Any, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss


def two_labels(random: torch.Generator) -> dict[str, Tensor]:
    found = texts(random)
    return {**found, "labels": found["labels"] % 2}


@pytest.mark.parametrize("name", few(LIBRARY, 3, 4, 7, 9, 10))
def test_a_step_is_that_of_the_unsplit_library_model(name: str) -> None:
    build, batches, cut = LIBRARY[name]
    torch.manual_seed(2)
    batches = two_labels if name == "next sentences" else batches
    described = SplitModel(build(), example=batch_of(batches, 0), ties="untie")
    check(described, by_library, batch_of(batches, 1), cut=cut)


def test_an_example_within_the_window_does_not_hide_answers_behind_it() -> None:
    model = BertForQuestionAnswering(bert_config(num_labels=2))
    described = SplitModel(model, example=batch_of(answered, 0))
    check(described, by_library, batch_of(answered_later, 1), cut=False)


def test_a_task_of_the_library_needs_no_example(caplog: pytest.LogCaptureFixture) -> None:
    for build in (*(LIBRARY[n][0] for n in ("classes", "tags", "next tokens", "pictures")),):
        assert not SplitModel(build(), batch_size=6, length=LENGTH).splitter.whole_batches
    assert "flwr.collapipe" not in {record.name for record in caplog.records}


def test_what_the_library_knows_no_task_of_is_uncut_without_an_example(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = BertForQuestionAnswering(bert_config(num_labels=2))
    assert SplitModel(model, batch_size=6, length=LENGTH).splitter.whole_batches
    (line,) = (r.getMessage() for r in caplog.records if r.name == "flwr.collapipe")
    assert "pass example=" in line and "\n" not in line


@pytest.mark.parametrize("choices", [{}, {"example": batch_of(texts, 0)}], ids=["bare", "example"])
def test_a_decoder_that_cannot_see_padding_classifies_nothing(choices: dict[str, Any]) -> None:
    """The library refuses its batches, but not their examples one by one."""
    given = {"batch_size": 6, "length": LENGTH, **choices}
    with pytest.raises(ModelError, match="'gpt2' models need pad_token_id"):
        SplitModel(gpt2(GPT2ForSequenceClassification), **given)


def test_batches_that_stay_whole_are_planned_and_told_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    described = SplitModel(own.Net(), example=batch_of(viewed, 0), loss=own.contrastive)
    (line,) = (r.getMessage() for r in caplog.records if r.name == "flwr.collapipe")
    assert line.startswith("Net gets whole batches, uncut: ") and "weight=" in line
    planner = planner_of("dssda", described, lambda _: LearningSettings())
    assert isinstance(planner, DescribedClusters)
    assert planner._planning.settings.batches == ((EXAMPLES, 1),)


def test_dropout_does_not_hinder_a_cut() -> None:
    described = SplitModel(own.Forgetful(), example=batch_of(classified, 0))
    assert described.splitter.drops and not described.splitter.whole_batches


@pytest.mark.parametrize("kind", [own.Mixes, own.Remembers])
def test_examples_that_meet_are_not_cut_apart(kind: type[torch.nn.Module]) -> None:
    described = SplitModel(kind(), example=batch_of(classified, 0))
    assert described.splitter.whole_batches


def test_labels_to_ignore_that_the_example_did_not_show_are_refused() -> None:
    described = SplitModel(own.Net(), example=batch_of(of_kinds, 0), loss=own.named_otherwise)
    parts = cut_up(batch_of(half_labelled, 1), (3, 2, 1))
    splitter = splitter_of(described.spec.to_json())
    with pytest.raises(ModelError, match=r"labels to ignore .* 'kinds'.*whole_batches=True"):
        splitter.check_parts(parts)
    splitter.check_parts(cut_up(batch_of(of_kinds, 1), (3, 2, 1)))
    splitter.check_parts([batch_of(half_labelled, 1)])

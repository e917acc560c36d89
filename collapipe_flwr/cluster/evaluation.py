"""Predictions of a model for a test set: its best classes, or greedily generated texts.

A sequence-to-sequence chain generates after it has computed its losses: the encoder runs over the
devices, the decoder at the edge, one example at a time.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig

from collapipe_flwr.data.batches import Example
from collapipe_flwr.data.metrics import Tally, add_counts
from collapipe_flwr.models.front import FrontPart
from collapipe_flwr.models.parts import EmbeddingPart
from collapipe_flwr.models.tasks import choose_best
from collapipe_flwr.pipeline.config import StageConfig
from collapipe_flwr.pipeline.generation import ATTENTION_MASK, INPUT_IDS
from collapipe_flwr.pipeline.generation_driver import GenerationDriver
from collapipe_flwr.pipeline.link import Link
from collapipe_flwr.pipeline.step import CLASSES, LOGITS, MicroBatch

if TYPE_CHECKING:  # which needs the extra `data`
    from collapipe_flwr.data.tasks import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionConfig:
    """How a model predicts; ``most_tokens`` is for models that generate.

    With ``logits`` it returns all scores of the labels' positions, and generates nothing.
    """

    most_tokens: int = 0
    padding_id: int = 0
    logits: bool = False

    def generates(self, decodes: bool) -> bool:
        """Return whether a model generates texts; ``decodes`` says that it has a decoder."""
        return decodes and not self.logits

    @property
    def kind(self) -> str:
        """The predictions requested from the last stage."""
        return LOGITS if self.logits else CLASSES

    def make_keywords(self) -> dict[str, Any]:
        """Make the keywords of ``generate`` for greedy decoding."""
        return {"max_new_tokens": self.most_tokens, "num_beams": 1, "do_sample": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalResult:
    """The mean loss over the ``targets`` labels of a test set (0 over none), and predictions.

    ``predictions`` are there on request, by batch and micro-batch: ids (B,) or (B, T) of the best
    classes or of generated texts, or logits (B, C) or (B, T, C).
    """

    loss: float
    targets: float
    predictions: tuple[tuple[Tensor, ...], ...] = ()

    @staticmethod
    def average(
        parts: Iterable[tuple[float, float]], predictions: tuple[tuple[Tensor, ...], ...] = ()
    ) -> EvalResult:
        """Average over parts, each given as mean loss and number of labels."""
        pairs = list(parts)
        targets = sum(count for _, count in pairs)
        total = sum(loss * count for loss, count in pairs)
        loss = total / targets if targets else 0.0
        return EvalResult(loss=loss, targets=targets, predictions=predictions)


def predict_unsplit(model: Any, batch: Any, scores: Tensor, wanted: PredictionConfig) -> Tensor:
    """Predict with the unsplit model for a batch whose ``scores`` it has computed."""
    if wanted.logits:
        return scores
    decodes = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    if not wanted.generates(bool(decodes)):
        return choose_best(scores)
    found: Tensor = model.generate(
        batch[INPUT_IDS], attention_mask=batch[ATTENTION_MASK], **wanted.make_keywords()
    )
    return found


def generate_texts(
    embedding: EmbeddingPart | FrontPart,
    chain: Link,
    settings: StageConfig,
    batches: Sequence[Sequence[MicroBatch]],
    wanted: PredictionConfig,
) -> tuple[tuple[Tensor, ...], ...]:
    """Generate the texts (B, T) of each micro-batch over a chain, and end the chain."""
    driver = GenerationDriver(embedding, chain, settings, cached=False, slots=1)
    own = GenerationConfig.from_model_config(embedding.model.config).to_dict()
    config = json.dumps({**own, **wanted.make_keywords()})

    def generated(part: MicroBatch) -> Tensor:
        rows = zip(part.inputs[INPUT_IDS], part.inputs[ATTENTION_MASK].bool(), strict=True)
        texts = [torch.cat(list(driver.generate(ids[mask][None], config))) for ids, mask in rows]
        return pad_sequence(texts, batch_first=True, padding_value=wanted.padding_id)

    found = tuple(tuple(map(generated, batch)) for batch in batches)
    driver.finish()
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class TestPart:
    """One micro-batch of a test: its examples, and their collated tensors."""

    examples: Sequence[Example]
    tensors: Mapping[str, Tensor]

    @staticmethod
    def from_examples(task: Task, examples: Sequence[Example]) -> TestPart:
        return TestPart(examples=examples, tensors=task.collate(examples))


def choose_prediction(task: Task) -> PredictionConfig:
    """Choose how a model predicts in this task."""
    padding = task.tokenizer.pad_token_id if task.text_columns else 0
    return PredictionConfig(most_tokens=task.settings.max_target_length, padding_id=int(padding))


def count_metrics(task: Task, parts: Iterable[TestPart], predictions: Iterable[Tensor]) -> Tally:
    """Sum the counts of all metrics over the parts."""
    tally: Tally = {}
    for part, ids in zip(parts, predictions, strict=True):
        references = task.references(part.examples, part.tensors)
        tally = add_counts(tally, task.count(task.read(ids, part.tensors), references))
    return tally

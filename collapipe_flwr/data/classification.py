"""Texts to one of several labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import ClassVar

import torch
from datasets import Dataset
from torch import Tensor

from collapipe_flwr.core.errors import DataError
from collapipe_flwr.data import metrics
from collapipe_flwr.data.batches import Example
from collapipe_flwr.data.encoding import encode
from collapipe_flwr.data.reader import Reader
from collapipe_flwr.data.settings import DataSettings
from collapipe_flwr.data.tasks import Task
from collapipe_flwr.data.vocabulary import Vocabulary


class Classification(Task):
    """A text and a label column of the user's data; labels may be numbers or names.

    Raises DataError for a label that the vocabulary does not have.
    """

    model_task: ClassVar[str] = "sequence-classification"
    metric_name: ClassVar[str] = "accuracy"
    text_columns: ClassVar[tuple[str, ...]] = ("text",)
    starts_with_bos: ClassVar[bool] = True
    usual_partition: ClassVar[str] = "iid"
    group_column: ClassVar[str] = "label"

    def __init__(self, settings: DataSettings, vocabulary: Vocabulary | None = None) -> None:
        super().__init__(settings, vocabulary)
        self._reader = Reader(settings, {"text": "text_column", "label": "label_column"})

    @cached_property
    def train(self) -> Dataset:
        return self._with_known_labels(self._reader.train, "data.train")

    @cached_property
    def test(self) -> Dataset:
        return self._with_known_labels(self._reader.test, "data.test")

    def find_labels(self) -> tuple[str, ...]:
        labels = sorted(set(self._reader.every_row["label"]))
        if all(label.isdecimal() for label in labels):
            labels.sort(key=int)
        if len(labels) < 2:
            raise DataError(
                f'data.label-column "{self.settings.label_column}" holds only the label '
                f'"{labels[0]}": classification needs at least two'
            )
        return tuple(labels)

    def collate(self, examples: Sequence[Example]) -> dict[str, Tensor]:
        texts = [example["text"] for example in examples]
        inputs = encode(self.tokenizer, texts, self.settings.max_source_length)
        ids = [self._id_of[label] for label in self.references(examples)]
        return {**inputs, "labels": torch.tensor(ids)}

    def decode(self, outputs: Tensor) -> list[str]:
        return [self.labels[index] for index in outputs.argmax(dim=-1).tolist()]

    def references(self, examples: Sequence[Example]) -> list[str]:
        return [example["label"] for example in examples]

    def score(self, predictions: Sequence[str], references: Sequence[str]) -> dict[str, float]:
        return {"accuracy": metrics.match_rate(predictions, references)}

    @cached_property
    def _id_of(self) -> Mapping[str, int]:
        return {label: index for index, label in enumerate(self.labels)}

    def _with_known_labels(self, examples: Dataset, key: str) -> Dataset:
        unknown = sorted(set(examples["label"]) - set(self.labels))
        if unknown:
            raise DataError(
                f"{key} has {len(unknown)} labels that the training data lacks, such as "
                f'"{unknown[0]}": add training examples of them, or remove their rows'
            )
        return examples

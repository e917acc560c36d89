"""Examples that get one of several labels: texts here, pictures in ``images``."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from math import isfinite
from typing import ClassVar

import torch
from torch import Tensor

from collapipe_flwr.core.errors import DataError, extra
from collapipe_flwr.data.batches import Example
from collapipe_flwr.data.metrics import Measure, match_rate
from collapipe_flwr.data.reader import TableTask
from collapipe_flwr.data.tasks import Batch
from collapipe_flwr.data.tokenizer import IGNORED_TAG, encode

with extra("data"):
    from datasets import Dataset


class Labelled(TableTask):
    """Examples with a column ``label`` of the user's data; labels may be numbers or names.

    Raises DataError for a label that the vocabulary does not have.
    """

    metric_name: ClassVar[str] = "accuracy"
    measures: ClassVar[Mapping[str, Measure]] = {"accuracy": match_rate}
    group_column: ClassVar[str] = "label"

    @abstractmethod
    def inputs(self, examples: Sequence[Example]) -> dict[str, Tensor]:
        """What the model reads of a micro-batch, without labels."""

    def find_labels(self) -> tuple[str, ...]:
        declared = self._reader.class_names("label")
        if len(declared) > 1:
            return declared
        labels = sorted(set(self._reader.every_row["label"]))
        if IGNORED_TAG in labels:
            raise DataError(
                f'data.label-column "{self.settings.label_column}" holds the label {IGNORED_TAG}, '
                "which marks what has no label: remove these rows, or rename the class"
            )
        if all(label.isdecimal() for label in labels):
            labels.sort(key=int)
        fractions = [label for label in labels if _is_fraction(label)]
        if fractions and all(map(_is_number, labels)):
            raise DataError(
                f'data.label-column "{self.settings.label_column}" holds numbers such as '
                f"{fractions[0]}, but classification sorts into classes and does not estimate "
                'quantities: write classes as names, such as "high"'
            )
        if len(labels) < 2:
            raise DataError(
                f'data.label-column "{self.settings.label_column}" holds only the label '
                f'"{labels[0]}": classification needs at least two'
            )
        return tuple(labels)

    def collate(self, examples: Sequence[Example]) -> dict[str, Tensor]:
        ids = [self._id_of[example["label"]] for example in examples]
        return {**self.inputs(examples), "labels": torch.tensor(ids)}

    def read(self, guesses: Tensor, batch: Batch) -> list[str]:
        del batch
        return [self.labels[index] for index in guesses.tolist()]

    def references(self, examples: Sequence[Example], batch: Batch) -> list[str]:
        del batch
        return [example["label"] for example in examples]

    @cached_property
    def _id_of(self) -> Mapping[str, int]:
        return {label: index for index, label in enumerate(self.labels)}

    def checked(self, examples: Dataset, key: str) -> Dataset:
        unknown = sorted(set(examples["label"]) - set(self.labels))
        if unknown:
            raise DataError(
                f"{key} has {len(unknown)} labels that the training data lacks, such as "
                f'"{unknown[0]}": add training examples of them, or remove their rows'
            )
        return examples


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _is_fraction(text: str) -> bool:
    return _is_number(text) and isfinite(float(text)) and not float(text).is_integer()


class Classification(Labelled):
    """A text and a label column of the user's data."""

    columns: ClassVar[Mapping[str, str]] = {"text": "text_column", "label": "label_column"}
    model_task: ClassVar[str] = "sequence-classification"
    text_columns: ClassVar[tuple[str, ...]] = ("text",)
    starts_with_bos: ClassVar[bool] = True

    def inputs(self, examples: Sequence[Example]) -> dict[str, Tensor]:
        texts = [example["text"] for example in examples]
        return encode(self.tokenizer, texts, self.settings.max_source_length)

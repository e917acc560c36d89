"""A tag for every word: named entities, parts of speech.

A tag stands at the first token of its word; the word's other tokens, special tokens and padding
are no targets. A word that was cut off counts as tagged O. A word with the tag -100 is read but is
no target: it takes no part in the loss, the metrics or the list of classes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, zip_longest
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from collapipe_flwr.core.errors import DataError
from collapipe_flwr.data.batches import Example
from collapipe_flwr.data.metrics import OUTSIDE, Measure, Tally, entity_f1, match_rate
from collapipe_flwr.data.reader import ReadColumn, class_names, list_column
from collapipe_flwr.data.tasks import Batch, Task
from collapipe_flwr.data.tokenizer import IGNORED_LABEL, IGNORED_TAG, encode_words

if TYPE_CHECKING:
    from datasets import Dataset


def _count_words(predictions: Sequence[str], references: Sequence[str]) -> list[float]:
    return match_rate.count(" ".join(predictions).split(), " ".join(references).split())


word_accuracy = Measure(count=_count_words, value=match_rate.value)


class TokenClassification(Task):
    """A column of words and a column of tags, each a list per row, of the user's data.

    Rows without any word are skipped. Raises DataError where a row has not as many tags as words,
    or a tag that training lacks.
    """

    model_task: ClassVar[str] = "token-classification"
    metric_name: ClassVar[str] = "f1"
    measures: ClassVar[Mapping[str, Measure]] = {"f1": entity_f1, "accuracy": word_accuracy}
    text_columns: ClassVar[tuple[str, ...]] = ("tokens",)
    starts_with_bos: ClassVar[bool] = True
    columns: ClassVar[Mapping[str, str]] = {"tokens": "tokens_column", "tags": "tags_column"}
    readers: ClassVar[Mapping[str, ReadColumn]] = {"tokens": list_column, "tags": list_column}

    def find_labels(self) -> tuple[str, ...]:
        found = set(chain.from_iterable(self.every_row["tags"])) - {IGNORED_TAG}
        spaced = sorted(tag for tag in found if len(tag.split()) != 1)
        if spaced:
            raise DataError(f'data.tags-column has the tag "{spaced[0]}": tags hold no spaces')
        if len(found) < 2:
            raise DataError(
                f'data.tags-column "{self.settings.tags_column}" holds only one tag: at least two '
                "are needed"
            )
        if declared := class_names(self.training_table, self.settings.tags_column):
            return tuple(name for name in declared if name != IGNORED_TAG)
        return tuple(sorted(found, key=lambda tag: (tag != OUTSIDE, tag)))

    def collate(self, examples: Sequence[Example]) -> dict[str, Tensor]:
        words = [example["tokens"] for example in examples]
        inputs, first_tokens = encode_words(self.tokenizer, words, self.settings.max_source_length)
        labels = torch.full_like(inputs["input_ids"], IGNORED_LABEL)
        for row, (example, places) in enumerate(zip(examples, first_tokens, strict=True)):
            tags = example["tags"][: len(places)]
            labels[row, places] = torch.tensor([self.label_ids[tag] for tag in tags])
        return {**inputs, "labels": labels}

    def read(self, guesses: Tensor, batch: Batch) -> list[str]:
        return [
            " ".join(self.labels[index] for index in row[label != IGNORED_LABEL].tolist())
            for row, label in zip(guesses, batch["labels"], strict=True)
        ]

    def references(self, examples: Sequence[Example], batch: Batch) -> list[str]:
        del batch
        wanted = [[t for t in example["tags"] if t != IGNORED_TAG] for example in examples]
        return [" ".join(tags) for tags in wanted]

    def count(self, predictions: Sequence[str], references: Sequence[str]) -> Tally:
        ours = [_as_long_as(p, r) for p, r in zip(predictions, references, strict=True)]
        return super().count(ours, references)

    def bad_rows(self, found: Mapping[str, Sequence[Any]]) -> dict[str, list[int]]:
        rows = list(enumerate(zip(found["tokens"], found["tags"], strict=True)))
        odd = [row for row, (row_words, row_tags) in rows if len(row_words) != len(row_tags)]
        empty = [row for row, (row_words, _) in rows if not all(w.strip() for w in row_words)]
        words, tags = self.settings.tokens_column, self.settings.tags_column
        bad = {
            f'data.tags-column "{tags}" has not as many tags as words': odd,
            f'data.tokens-column "{words}" has an empty word': empty,
        }
        return {**super().bad_rows(found), **{what: each for what, each in bad.items() if each}}

    def checked(self, examples: Dataset, key: str) -> Dataset:
        rows = zip(examples["tokens"], examples["tags"], strict=True)
        examples = examples.select([row for row, pair in enumerate(rows) if any(pair)])
        for tags in examples["tags"]:
            unknown = set(tags).difference(self.label_ids)
            if unknown:
                raise DataError(
                    f'{key} has the tag "{min(unknown)}" that the training data lacks: add '
                    "training examples of it, or remove its rows"
                )
        return examples


def _as_long_as(predicted: str, reference: str) -> str:
    """Words that were cut off are O; there are never more predictions than words."""
    pairs = zip_longest(predicted.split(), reference.split())
    return " ".join(tag or OUTSIDE for tag, word in pairs if word is not None)

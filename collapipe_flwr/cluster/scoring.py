"""A test set in the micro-batches that a model runs, and what its guesses count for the metrics."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from collapipe_flwr.cluster.guessing import Guessing
from collapipe_flwr.data.batches import Example
from collapipe_flwr.data.metrics import Tally, added
from collapipe_flwr.data.tasks import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class TestPart:
    """One micro-batch of a test: its examples, and what they collate to."""

    examples: Sequence[Example]
    tensors: Mapping[str, Tensor]

    @staticmethod
    def of(task: Task, examples: Sequence[Example]) -> TestPart:
        """The examples, collated."""
        return TestPart(examples=examples, tensors=task.collate(examples))


def guessing_for(task: Task) -> Guessing:
    """How a model guesses in this task."""
    padding = task.tokenizer.pad_token_id if task.text_columns else 0
    return Guessing(most_tokens=task.settings.max_target_length, padding_id=int(padding))


def tally_of(task: Task, parts: Iterable[TestPart], guesses: Iterable[Tensor]) -> Tally:
    """The counts of all metrics together."""
    tally: Tally = {}
    for part, ids in zip(parts, guesses, strict=True):
        predictions = task.read(ids, part.tensors)
        references = task.references(part.examples, part.tensors)
        tally = added(tally, task.count(predictions, references))
    return tally

"""The seam for what differs between tasks: their examples, inputs, outputs and metric.

Everything is lazy: a control unit never touches the test set, and only the examples of a round
are turned into tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor
from transformers import PreTrainedTokenizerFast

from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.data.batches import Example
from collapipe_flwr.data.config import TRAIN_TOKENIZER, DataConfig
from collapipe_flwr.data.metrics import Measure, Tally
from collapipe_flwr.data.partitions import partition_rows
from collapipe_flwr.data.tokenizer import (
    Vocabulary,
    load_tokenizer,
    tokenizer_from_json,
    tokenizer_to_json,
    train_tokenizer,
)

if TYPE_CHECKING:
    from datasets import Dataset

Batch = Mapping[str, Tensor]
_MOST_TOKENIZER_TEXTS = 100_000  # more change nothing in a vocabulary of some thousand tokens


class Task(ABC):
    """One task over one data set, made by ``reader.load_task``.

    With a ``vocabulary`` (on a control unit: the server's) nothing is learned from local data.
    Without one the tokenizer is trained or loaded, and the labels are those of the training set.
    """

    model_task: ClassVar[str]  # what the model is built for, as in ModelSpec.task
    metric_name: ClassVar[str]  # the metric that counts
    measures: ClassVar[Mapping[str, Measure]]  # all of them but those of the loss
    text_columns: ClassVar[tuple[str, ...]]  # the tokenizer's training texts; () if there are none
    starts_with_bos: ClassVar[bool]  # how a trained tokenizer begins a text
    needs_mask_token: ClassVar[bool] = False  # of a trained tokenizer
    usual_partition: ClassVar[str]  # what data.partition "auto" means
    group_column: ClassVar[str]  # of an example: what other partitions go by; "" if there is none

    known_labels: tuple[str, ...] = ()  # those of the checkpoint, set before anything is read

    def __init__(self, settings: DataConfig, vocabulary: Vocabulary | None = None) -> None:
        self.settings = settings
        self._given_vocabulary = vocabulary

    @cached_property
    @abstractmethod
    def train(self) -> Dataset:
        """All training examples that this machine can read."""

    @cached_property
    @abstractmethod
    def test(self) -> Dataset:
        """The test examples."""

    def read_file(self, name: str) -> Dataset:
        """Examples of a file that arrived in ``data.stream``, with the columns of ``train``."""
        del name
        raise ConfigError(
            f'data.stream is set, but data.task "{self.settings.task}" reads none: leave it empty'
        )

    @abstractmethod
    def collate(self, examples: Sequence[Example]) -> dict[str, Tensor]:
        """The inputs of one micro-batch, padded to its longest example.

        ``input_ids`` and ``attention_mask`` (B, T), or ``pixel_values`` (B, C, H, W); ``labels``
        (B,) or (B, T), padded with -100.
        """

    def decode(self, outputs: Tensor, batch: Batch) -> list[str]:
        """What a model's outputs for a collated batch mean, a text per example.

        Outputs are scores, (B, C) or (B, T, C), or for text to text generated ids (B, T).
        """
        return self.read(outputs.argmax(dim=-1), batch)

    @abstractmethod
    def read(self, guesses: Tensor, batch: Batch) -> list[str]:
        """The same of what the model holds for best: ids (B,) or (B, T)."""

    @abstractmethod
    def references(self, examples: Sequence[Example], batch: Batch) -> list[str]:
        """The texts that ``decode`` should give for these examples and what they collate to."""

    def count(self, predictions: Sequence[str], references: Sequence[str]) -> Tally:
        """What adds up over parts of a test set, for each metric; see ``score_of``."""
        return {name: m.count(predictions, references) for name, m in self.measures.items()}

    def score_of(self, tally: Tally) -> dict[str, float]:
        """Metrics by name, of the added counts of all parts."""
        return {name: self.measures[name].value(counts) for name, counts in tally.items()}

    def score(self, predictions: Sequence[str], references: Sequence[str]) -> dict[str, float]:
        """Metrics of the texts by name."""
        return self.score_of(self.count(predictions, references))

    def score_loss(self, loss: float) -> dict[str, float]:
        """Metrics that follow from the mean loss; together with ``score`` all of the task."""
        del loss
        return {}

    def examples(self, rows: Dataset) -> Dataset:
        """What is learnt from these rows of ``train`` or ``test``: usually the rows themselves."""
        return rows

    def collate_for(self, examples: Sequence[Example], round_index: int) -> dict[str, Tensor]:
        """``collate`` for training; a task that draws by chance draws anew every round."""
        del round_index
        return self.collate(examples)

    def lengths(self, examples: Sequence[Example]) -> list[int]:
        """Tokens that the encoder computes on for each example; all 1 where nothing is padded."""
        mask = self.collate(examples).get("attention_mask")
        return [1] * len(examples) if mask is None else mask.sum(dim=1).tolist()

    def save_inputs(self, directory: Path) -> None:
        """Put beside a saved model what turns raw examples into its inputs."""
        self.tokenizer.save_pretrained(directory)

    def find_labels(self) -> tuple[str, ...]:
        """Label names of the data in the order of their ids; none unless the task classifies."""
        return ()

    @cached_property
    def labels(self) -> tuple[str, ...]:
        """The vocabulary's label names; empty unless the task classifies.

        A checkpoint that knows all labels of the data keeps its own order: its head has learnt it.
        """
        if self._given_vocabulary is not None:
            return self._given_vocabulary.labels
        found, known = self.find_labels(), self.known_labels
        return known if found and set(found) <= set(known) else found

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The tokenizer and labels that every machine must share."""
        if self._given_vocabulary is not None:
            return self._given_vocabulary
        text = tokenizer_to_json(self._make_tokenizer()) if self.text_columns else ""
        return Vocabulary(tokenizer_json=text, labels=self.labels)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        """The vocabulary's tokenizer, the same object on every call."""
        return tokenizer_from_json(self.vocabulary.tokenizer_json)

    def partition(self, index: int, count: int) -> Dataset:
        """The training examples of cluster ``index`` out of ``count``.

        Parts are disjoint, together complete, and the same on every machine that reads the same
        data. Raises DataError if the data cannot be cut so.
        """
        method = self.settings.partition
        rows = partition_rows(
            self.train,
            count,
            method=self.usual_partition if method == "auto" else method,
            by=self._group_column(),
            settings=self.settings,
        )
        return self.train.select(rows[index])

    def _group_column(self) -> str:
        return "group" if "group" in self.train.column_names else self.group_column

    def _make_tokenizer(self) -> PreTrainedTokenizerFast:
        if self.settings.tokenizer != TRAIN_TOKENIZER:
            return load_tokenizer(self.settings.tokenizer)
        return train_tokenizer(
            list(islice(self._texts(), _MOST_TOKENIZER_TEXTS)),
            vocab_size=self.settings.vocab_size,
            starts_with_bos=self.starts_with_bos,
            with_mask=self.needs_mask_token,
        )

    def _texts(self) -> Iterator[str]:
        columns = [self.train[name] for name in self.text_columns]
        for row in zip(*columns, strict=True):
            yield from (text if isinstance(text, str) else " ".join(text) for text in row)

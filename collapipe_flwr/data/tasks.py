"""A task over the user's data: its examples, inputs, outputs and metrics."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from importlib import import_module
from itertools import chain, islice
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from collapipe_flwr.core.domain import IGNORED_LABEL
from collapipe_flwr.core.errors import DataError, name_extra
from collapipe_flwr.data.batches import Example, partition_rows
from collapipe_flwr.data.config import TASK_CLASSES, TRAIN_TOKENIZER, DataConfig, key_of
from collapipe_flwr.data.files import is_one_table, load_table
from collapipe_flwr.data.metrics import Measure, Tally
from collapipe_flwr.data.reader import ReadColumn, declare_classes, format_rows, read_column
from collapipe_flwr.data.tokenizer import (
    IGNORED_TAG,
    Languages,
    Vocabulary,
    encode,
    load_tokenizer,
    tokenizer_from_json,
    tokenizer_to_json,
    train_tokenizer,
)

with name_extra("data"):
    from datasets import Dataset

Batch = Mapping[str, Tensor]
HELD_OUT_SHARE = 0.1
_CLASS_COLUMNS = ("label", "tags")
_MOST_TOKENIZER_TEXTS = 100_000  # more change nothing in a vocabulary of some thousand tokens


class Task(ABC):
    """One task over the user's own data, ``data.train`` and ``data.test``; see `load_task`.

    Everything is read on first use: a control unit never reads the test set, and only the
    examples of a round are tokenized. With a ``vocabulary`` (on a control unit: the server's)
    tokenizer and labels do not depend on local data. Without one the tokenizer is trained or
    loaded, and the labels are those of the training set.

    With a ``data.partition-column`` the training examples also get a column ``group``. Without
    ``data.test`` a seeded choice of the rows of ``data.train`` is held out for the test:
    ``data.test-examples`` of them, or a tenth. All properties raise DataError.
    """

    model_task: ClassVar[str]  # what the model is built for, as in ModelSpec.task
    metric_name: ClassVar[str]  # the main metric
    measures: ClassVar[Mapping[str, Measure]]  # all metrics but those of the loss
    columns: ClassVar[tuple[str, ...]]  # of the examples; `text_column` names the user's "text"
    readers: ClassVar[Mapping[str, ReadColumn]] = {}  # of columns that need no text in each row
    text_columns: ClassVar[tuple[str, ...]]  # the tokenizer's training texts; () if there are none
    starts_with_bos: ClassVar[bool]  # how a trained tokenizer begins a text
    needs_mask_token: ClassVar[bool] = False  # of a trained tokenizer
    usual_partition: ClassVar[str] = "iid"  # data.partition "auto"
    group_column: ClassVar[str] = ""  # the column of other partitions without a partition-column

    def __init__(
        self,
        settings: DataConfig,
        vocabulary: Vocabulary | None = None,
        known_labels: tuple[str, ...] = (),
    ) -> None:
        self.settings = settings
        self._given_vocabulary = vocabulary
        self._known_labels = known_labels
        self.skipped: dict[str, str] = {}  # by file, what was left out of it and why
        self.warnings: list[str] = []  # what may be a mistake in the data

    @cached_property
    def train(self) -> Dataset:
        """All training examples that this machine can read."""
        rows = self._shuffle(len(self.every_row))[self._held_out :]
        chosen = _choose(self.every_row, rows, self.settings.train_examples)
        return self.select_usable(chosen, "data.train")

    @cached_property
    def test(self) -> Dataset:
        """The test examples: a seeded choice of ``data.test-examples`` (0: all)."""
        name = self.settings.test
        if not name:
            order = self._shuffle(len(self.every_row))
            rows = _choose(self.every_row, order[: self._held_out], 0)
        elif name == self.settings.train and is_one_table(name):
            raise DataError(  # a folder or hub data set may hold both splits
                f'data.test "{name}" is also data.train, so the test would be on training examples:'
                " leave data.test empty to hold out a share of the rows"
            )
        else:
            table = self._read(self._load("test"), name)
            rows = _choose(table, self._shuffle(len(table)), self.settings.test_examples)
        return self.select_usable(
            rows, "data.test" if name else "data.train, in the held-out rows,"
        )

    def read_file(self, name: str) -> Dataset:
        """Read a file that arrived in ``data.stream``: examples in the columns of ``train``."""
        return self.select_usable(self.read_rows(name), f'data.stream "{name}"')

    def read_rows(self, name: str) -> Dataset:
        """Read all rows of a file in ``data.stream``."""
        table = self._load_table(name, key="data.stream", split="train", grows=True)
        return self._read(table, name)

    def select_usable(self, examples: Dataset, key: str) -> Dataset:
        """Return the examples that can be learned from; raises DataError, naming ``key``."""
        del key
        return examples

    @cached_property
    def every_row(self) -> Dataset:
        """All of ``data.train``, the held-out rows included."""
        groups = ("group",) if self.settings.partition_column else ()
        return self._read(self.training_table, self.settings.train, *groups)

    @cached_property
    def training_table(self) -> Dataset:
        """The user's own table, columns and all; files are mapped, so it takes no memory."""
        return self._load("train")

    @abstractmethod
    def collate(self, examples: Sequence[Example]) -> dict[str, Tensor]:
        """Return the inputs of one micro-batch, padded to its longest example.

        ``input_ids`` and ``attention_mask`` (B, T), or ``pixel_values`` (B, C, H, W); ``labels``
        (B,) or (B, T), padded with -100.
        """

    @abstractmethod
    def read(self, guesses: Tensor, batch: Batch) -> list[str]:
        """Return the text of each example's predicted classes or generated ids, (B,) or (B, T).

        ``batch`` are the collated examples.
        """

    def references(self, examples: Sequence[Example], batch: Batch) -> list[str]:
        """Return the texts that ``read`` should give for these examples, collated to ``batch``.

        Usually they are in the last of ``columns``.
        """
        del batch
        return [example[self.columns[-1]] for example in examples]

    def count(self, predictions: Sequence[str], references: Sequence[str]) -> Tally:
        """Count for each metric what adds up over parts of a test set; see ``score``."""
        return {name: m.count(predictions, references) for name, m in self.measures.items()}

    def score(self, tally: Tally) -> dict[str, float]:
        """Compute metrics by name, from the added counts of all parts."""
        return {name: self.measures[name].value(counts) for name, counts in tally.items()}

    def score_loss(self, loss: float) -> dict[str, float]:
        """Compute metrics from the mean loss; with those of ``score`` all metrics of the task."""
        del loss
        return {}

    def make_examples(self, rows: Dataset) -> Dataset:
        """Make examples of these rows of ``train`` or ``test``; usually the rows themselves."""
        return rows

    def examine(self) -> dict[str, str]:
        """Look through all examples; return remarks for the run's log, as in ``skipped``."""
        return {}

    def count_answers(self, model: Any, examples: Sequence[Example]) -> Tally:
        """Count as `count` does, for answers that the whole model generates to test examples.

        Only tasks of models that continue texts generate them; others count nothing.
        """
        del model, examples
        return {}

    def collate_for(self, examples: Sequence[Example], round_index: int) -> dict[str, Tensor]:
        """Collate for training; random choices differ from round to round."""
        del round_index
        return self.collate(examples)

    def lengths(self, examples: Sequence[Example]) -> list[int]:
        """Return the encoder's tokens for each example; all 1 if nothing is padded."""
        mask = self.collate(examples).get("attention_mask")
        return [1] * len(examples) if mask is None else mask.sum(dim=1).tolist()

    def save_inputs(self, directory: Path) -> None:
        """Save the tokenizer or preprocessor of a saved model beside it."""
        self.tokenizer.save_pretrained(directory)

    def find_labels(self) -> tuple[str, ...]:
        """Return the data's label names by their ids; none unless the task classifies."""
        return ()

    @cached_property
    def labels(self) -> tuple[str, ...]:
        """The vocabulary's label names; empty unless the task classifies.

        If a checkpoint has all labels of the data, the order is that of its head.
        """
        if self._given_vocabulary is not None:
            return self._given_vocabulary.labels
        found, known = self.find_labels(), self._known_labels
        return known if found and set(found) <= set(known) else found

    @cached_property
    def label_ids(self) -> Mapping[str, int]:
        """The id of each label; that of the mark for no label is -100."""
        return {**{label: i for i, label in enumerate(self.labels)}, IGNORED_TAG: IGNORED_LABEL}

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

    def encode_column(
        self, examples: Sequence[Example], column: str, max_length: int
    ) -> dict[str, Tensor]:
        """Tokenize a column of texts as ``input_ids`` and ``attention_mask`` (B, T)."""
        return dict(encode(self.tokenizer, [e[column] for e in examples], max_length))

    def partition(self, index: int, count: int) -> Dataset:
        """Return the training examples of cluster ``index`` out of ``count``.

        Parts are disjoint, together complete, and the same on every machine that reads the same
        data. Raises DataError if the data cannot be cut so.
        """
        method = self.settings.partition
        rows = partition_rows(
            self.train,
            count,
            method=self.usual_partition if method == "auto" else method,
            by="group" if "group" in self.train.column_names else self.group_column,
            settings=self.settings,
        )
        return self.train.select(rows[index])

    def _shuffle(self, size: int) -> list[int]:
        order: list[int] = np.random.default_rng(self.settings.seed).permutation(size).tolist()
        return order

    @cached_property
    def _held_out(self) -> int:
        if self.settings.test:
            return 0
        size = len(self.every_row)
        held_out = self.settings.test_examples or max(1, round(size * HELD_OUT_SHARE))
        if held_out >= size:
            raise DataError(
                f"data.train has {size} rows, too few to hold out {held_out} for the test: give "
                "more rows, a smaller data.test-examples, or a data.test"
            )
        return held_out

    def _load(self, which: str) -> Dataset:
        name = getattr(self.settings, which)
        if not name:
            raise DataError(
                f'data.train is empty, but data.task "{self.settings.task}" reads its examples '
                "from there: name a CSV or JSON file, a directory or a hub data set"
            )
        both = self.settings.train == self.settings.test
        return self._load_table(name, key=key_of(which), split=which, only_split_serves=not both)

    def _load_table(self, name: str, **which: Any) -> Dataset:
        """Load a table with the classes that ``data.label-names`` gives to its numbers."""
        table = load_table(name, skip_bad_rows=self.settings.skip_bad_rows, **which)
        names = self.settings.label_names
        for ours in self.columns if names else ():
            if ours in _CLASS_COLUMNS:
                table = declare_classes(table, self._find_column(ours)[1], names)
        return table

    def _find_column(self, ours: str) -> tuple[str, str]:
        """Return the run-config key of one of our columns, and the name of the user's."""
        field = "partition_column" if ours == "group" else f"{ours}_column"
        return key_of(field), getattr(self.settings, field)

    def _read(self, table: Dataset, name: str, *further: str) -> Dataset:
        """Read the columns of ``table`` under our own names, without the bad rows.

        Raises DataError for bad rows unless they are to be skipped.
        """
        found = self.read_columns(table, name, *self.columns, *further)
        rows = Dataset.from_dict(found)
        bad = {what: which for what, which in self.find_bad_rows(found).items() if which}
        if not bad:
            return rows
        left_out = set().union(*bad.values())
        what = "; ".join(f"{what} in {format_rows(each)}" for what, each in bad.items())
        if not self.settings.skip_bad_rows or len(left_out) == len(rows):
            raise DataError(
                f'{len(left_out)} of {len(rows)} rows of "{name}" cannot be used: {what}; correct '
                "or remove them, or leave them out by data.skip-bad-rows=true"
            )
        self.skipped[name] = f'{len(left_out)} of {len(rows)} rows of "{name}" skipped: {what}'
        return rows.select([row for row in range(len(rows)) if row not in left_out])

    def read_columns(self, table: Dataset, name: str, *columns: str) -> dict[str, list[Any]]:
        """Read columns of ``table`` under our own names; raises DataError."""
        found: dict[str, list[Any]] = {}
        for ours in columns:
            read: ReadColumn = self.readers.get(ours, read_column)
            key, theirs = self._find_column(ours)
            found[ours] = read(table, theirs, key=key, of=name)
        return found

    def find_bad_rows(self, found: Mapping[str, Sequence[Any]]) -> dict[str, list[int]]:
        """Find the rows that cannot be used, by what is wrong with them; there may be none."""
        bad = {}
        for ours in (ours for ours in found if ours not in self.readers):
            key, theirs = self._find_column(ours)
            empty = [row for row, text in enumerate(found[ours]) if not text.strip()]
            bad[f'{key} "{theirs}" is empty'] = empty
        return bad

    def _make_tokenizer(self) -> PreTrainedTokenizerFast:
        languages = Languages(
            source=self.settings.source_language,
            target=self.settings.target_language,
            of_pairs=self.model_task == "seq2seq",
        )
        if self.settings.tokenizer != TRAIN_TOKENIZER:
            return load_tokenizer(self.settings.tokenizer, languages)
        languages.refuse('data.tokenizer "train" learns no languages')
        read = self.train.select(range(min(len(self.train), _MOST_TOKENIZER_TEXTS)))[:]
        rows = zip(*(read[name] for name in self.text_columns), strict=True)
        texts = (t if isinstance(t, str) else " ".join(t) for t in chain.from_iterable(rows))
        return train_tokenizer(
            list(islice(texts, _MOST_TOKENIZER_TEXTS)),
            vocab_size=self.settings.vocab_size,
            starts_with_bos=self.starts_with_bos,
            with_mask=self.needs_mask_token,
        )


def load_task(
    settings: DataConfig,
    vocabulary: Vocabulary | None = None,
    *,
    known_labels: tuple[str, ...] = (),
) -> Task:
    """Make the task of ``settings``; data is read on first use.

    A control unit passes the ``vocabulary`` that the server sent, a server the ``known_labels`` of
    a checkpoint in their order.
    """
    module, _, name = TASK_CLASSES[settings.task].partition(":")
    kind: type[Task] = getattr(import_module(f"collapipe_flwr.data.{module}"), name)
    return kind(settings, vocabulary, known_labels)


def _choose(table: Dataset, rows: list[int], limit: int) -> Dataset:
    """Choose the first ``limit`` (0: all) of the shuffled ``rows``, in the order of the table."""
    return table.select(sorted(rows[:limit] if limit else rows))

"""Examples from the user's own data, and the tasks over them: chosen columns, a held-out share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from collapipe_flwr.core.errors import DataError, extra
from collapipe_flwr.data.columns import class_names, column, with_names
from collapipe_flwr.data.config import DataConfig, key_of
from collapipe_flwr.data.files import is_one_table, load_table
from collapipe_flwr.data.tasks import Task
from collapipe_flwr.data.tokenizer import Vocabulary

with extra("data"):
    from datasets import Dataset

HELD_OUT_SHARE = 0.1
_CLASS_COLUMNS = {"label", "tags"}
ReadColumn = Callable[..., list[Any]]  # as columns.column


class Reader:
    """Reads ``data.train`` and ``data.test`` into examples, on first use.

    ``fields`` maps a column of the examples to the settings field that names the user's column.
    ``readers`` read the columns of ours that are no texts; see ``columns.column``.
    With a ``data.partition-column`` the training examples also get a column ``group``. Without
    ``data.test`` a seeded choice of the rows of ``data.train`` is held out for the test:
    ``data.test-examples`` of them, or a tenth. All properties raise DataError.
    """

    def __init__(
        self,
        settings: DataConfig,
        fields: Mapping[str, str],
        readers: Mapping[str, ReadColumn] | None = None,
    ) -> None:
        self._settings = settings
        self._fields = dict(fields)
        self._tables: dict[str, Dataset] = {}
        self._readers = {**dict.fromkeys([*fields, "group"], column), **(readers or {})}

    @cached_property
    def every_row(self) -> Dataset:
        """All of ``data.train``, the held-out rows included."""
        group = {"group": "partition_column"} if self._settings.partition_column else {}
        return self._read("train", {**self._fields, **group})

    @cached_property
    def train(self) -> Dataset:
        """Training examples: a seeded choice of ``data.train-examples`` (0: all)."""
        rows = self._shuffled_rows[self._held_out :]
        return _choose(self.every_row, rows, self._settings.train_examples)

    @cached_property
    def test(self) -> Dataset:
        """Test examples: a seeded choice of ``data.test-examples`` (0: all)."""
        if not self._settings.test:
            return _choose(self.every_row, self._shuffled_rows[: self._held_out], 0)
        self._refuse_training_file()
        table = self._read("test", self._fields)
        return _choose(table, self._shuffle(len(table)), self._settings.test_examples)

    def class_names(self, ours: str) -> tuple[str, ...]:
        """The classes that ``data.train`` declares for one of our columns; none where it does not.

        They stand in the order of its numbers, and may be more than its rows use.
        """
        return class_names(self._table("train"), getattr(self._settings, self._fields[ours]))

    @cached_property
    def _shuffled_rows(self) -> list[int]:
        return self._shuffle(len(self.every_row))

    @cached_property
    def _held_out(self) -> int:
        if self._settings.test:
            return 0
        size = len(self.every_row)
        held_out = self._settings.test_examples or max(1, round(size * HELD_OUT_SHARE))
        if held_out >= size:
            raise DataError(
                f"data.train has {size} rows, too few to hold out {held_out} for the test: give "
                "more rows, a smaller data.test-examples, or a data.test"
            )
        return held_out

    def _shuffle(self, size: int) -> list[int]:
        order: list[int] = np.random.default_rng(self._settings.seed).permutation(size).tolist()
        return order

    def file(self, name: str) -> Dataset:
        """Examples of one more file of ``data.stream``, with the same columns as ``data.train``."""
        table = self._named(load_table(name, key="data.stream", split="train"))
        return self._columns(table, self._fields, name)

    def _read(self, which: str, fields: Mapping[str, str]) -> Dataset:
        return self._columns(self._table(which), fields, getattr(self._settings, which))

    def _table(self, which: str) -> Dataset:
        """The user's own table, columns and all; files are mapped, so it weighs nothing."""
        if which not in self._tables:
            self._tables[which] = self._load(which)
        return self._tables[which]

    def _load(self, which: str) -> Dataset:
        name = getattr(self._settings, which)
        if not name:
            raise DataError(
                f'data.train is empty, but data.task "{self._settings.task}" reads its examples '
                "from there: name a CSV or JSON file, a directory or a hub data set"
            )
        both = self._settings.train == self._settings.test
        table = load_table(name, key=key_of(which), split=which, only_split_serves=not both)
        return self._named(table)

    def _named(self, table: Dataset) -> Dataset:
        """The table with the classes that ``data.label-names`` gives to its numbers."""
        names = self._settings.label_names
        for ours in _CLASS_COLUMNS & self._fields.keys() if names else ():
            table = with_names(table, getattr(self._settings, self._fields[ours]), names)
        return table

    def _columns(self, table: Dataset, fields: Mapping[str, str], name: str) -> Dataset:
        return Dataset.from_dict(
            {
                ours: self._readers[ours](
                    table, getattr(self._settings, field), key=key_of(field), of=name
                )
                for ours, field in fields.items()
            }
        )

    def _refuse_training_file(self) -> None:
        """A directory or hub data set may hold both splits; a file or one split cannot."""
        test = self._settings.test
        if test == self._settings.train and is_one_table(test):
            raise DataError(
                f'data.test "{test}" is also data.train, so the test would be on training examples:'
                " leave data.test empty to hold out a share of the rows"
            )


class TableTask(Task):
    """A task over the user's own data; ``columns`` and ``readers`` are those of its Reader.

    Examples are split among clusters at random unless the run-config says otherwise.
    """

    columns: ClassVar[Mapping[str, str]]
    readers: ClassVar[Mapping[str, ReadColumn]] = {}
    usual_partition: ClassVar[str] = "iid"
    group_column: ClassVar[str] = ""

    def __init__(self, settings: DataConfig, vocabulary: Vocabulary | None = None) -> None:
        super().__init__(settings, vocabulary)
        self._reader = Reader(settings, self.columns, self.readers)

    @cached_property
    def train(self) -> Dataset:
        return self.checked(self._reader.train, "data.train")

    @cached_property
    def test(self) -> Dataset:
        return self.checked(self._reader.test, "data.test")

    def read_file(self, name: str) -> Dataset:
        return self.checked(self._reader.file(name), f'data.stream "{name}"')

    def checked(self, examples: Dataset, key: str) -> Dataset:
        """The examples that can be learnt from; raises DataError, naming ``key``."""
        del key
        return examples


def _choose(table: Dataset, rows: list[int], limit: int) -> Dataset:
    """The first ``limit`` (0: all) of the shuffled ``rows``, in the order of the table."""
    return table.select(sorted(rows[:limit] if limit else rows))

"""Examples from the user's own data, and the tasks over them: chosen columns, a held-out share.

Classes that a column holds as numbers have names that the data set declares or the user gives.
Their order is that of the numbers, which a sorted list of the names would not keep.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from importlib import import_module
from typing import Any, ClassVar

import numpy as np

from collapipe_flwr.core.errors import DataError, extra
from collapipe_flwr.data.config import TASK_CLASSES, DataConfig, key_of
from collapipe_flwr.data.files import is_one_table, load_table
from collapipe_flwr.data.tasks import Task
from collapipe_flwr.data.tokenizer import IGNORED_LABEL, IGNORED_TAG, Vocabulary

with extra("data"):
    from datasets import ClassLabel, Dataset, List, Value

HELD_OUT_SHARE = 0.1
_CLASS_COLUMNS = {"label", "tags"}
_PLAIN = (str, int, float)
ReadColumn = Callable[..., list[Any]]  # as ``column``


class TableTask(Task):
    """A task over the user's own data, ``data.train`` and ``data.test``, read on first use.

    ``columns`` maps a column of the examples to the settings field that names the user's column.
    ``readers`` read the columns of ours that are no texts; see ``column``.
    With a ``data.partition-column`` the training examples also get a column ``group``. Without
    ``data.test`` a seeded choice of the rows of ``data.train`` is held out for the test:
    ``data.test-examples`` of them, or a tenth. All properties raise DataError.
    Examples are split among clusters at random unless the run-config says otherwise.
    """

    columns: ClassVar[Mapping[str, str]]
    readers: ClassVar[Mapping[str, ReadColumn]] = {}
    usual_partition: ClassVar[str] = "iid"
    group_column: ClassVar[str] = ""

    @cached_property
    def train(self) -> Dataset:
        rows = self._shuffled_rows[self._held_out :]
        chosen = _choose(self.every_row, rows, self.settings.train_examples)
        return self.checked(chosen, "data.train")

    @cached_property
    def test(self) -> Dataset:
        return self.checked(self._test_rows(), "data.test")

    def read_file(self, name: str) -> Dataset:
        return self.checked(self.file_rows(name), f'data.stream "{name}"')

    def file_rows(self, name: str) -> Dataset:
        """All rows of one more file of ``data.stream``, with the same columns as ``data.train``."""
        table = self._named(load_table(name, key="data.stream", split="train"))
        return self._read(table, self.columns, name)

    def checked(self, examples: Dataset, key: str) -> Dataset:
        """The examples that can be learnt from; raises DataError, naming ``key``."""
        del key
        return examples

    @cached_property
    def every_row(self) -> Dataset:
        """All of ``data.train``, the held-out rows included."""
        group = {"group": "partition_column"} if self.settings.partition_column else {}
        return self._read(self._training_table, {**self.columns, **group}, self.settings.train)

    def class_names(self, ours: str) -> tuple[str, ...]:
        """The classes that ``data.train`` declares for one of our columns; none where it does not.

        They stand in the order of its numbers, and may be more than its rows use.
        """
        return class_names(self._training_table, getattr(self.settings, self.columns[ours]))

    @cached_property
    def _shuffled_rows(self) -> list[int]:
        return self._shuffle(len(self.every_row))

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

    def _test_rows(self) -> Dataset:
        """A seeded choice of ``data.test-examples`` (0: all)."""
        if not self.settings.test:
            return _choose(self.every_row, self._shuffled_rows[: self._held_out], 0)
        self._refuse_training_file()
        table = self._read(self._load("test"), self.columns, self.settings.test)
        return _choose(table, self._shuffle(len(table)), self.settings.test_examples)

    @cached_property
    def _training_table(self) -> Dataset:
        """The user's own table, columns and all; files are mapped, so it weighs nothing."""
        return self._load("train")

    def _load(self, which: str) -> Dataset:
        name = getattr(self.settings, which)
        if not name:
            raise DataError(
                f'data.train is empty, but data.task "{self.settings.task}" reads its examples '
                "from there: name a CSV or JSON file, a directory or a hub data set"
            )
        both = self.settings.train == self.settings.test
        table = load_table(name, key=key_of(which), split=which, only_split_serves=not both)
        return self._named(table)

    def _named(self, table: Dataset) -> Dataset:
        """The table with the classes that ``data.label-names`` gives to its numbers."""
        names = self.settings.label_names
        for ours in _CLASS_COLUMNS & self.columns.keys() if names else ():
            table = with_names(table, getattr(self.settings, self.columns[ours]), names)
        return table

    def _read(self, table: Dataset, fields: Mapping[str, str], name: str) -> Dataset:
        """The columns of ``table`` that ``fields`` names, under our own names."""
        found = {}
        for ours, field in fields.items():
            read: ReadColumn = self.readers.get(ours, column)
            found[ours] = read(table, getattr(self.settings, field), key=key_of(field), of=name)
        return Dataset.from_dict(found)

    def _refuse_training_file(self) -> None:
        """A directory or hub data set may hold both splits; a file or one split cannot."""
        test = self.settings.test
        if test == self.settings.train and is_one_table(test):
            raise DataError(
                f'data.test "{test}" is also data.train, so the test would be on training examples:'
                " leave data.test empty to hold out a share of the rows"
            )


def load_task(
    settings: DataConfig,
    vocabulary: Vocabulary | None = None,
    *,
    known_labels: tuple[str, ...] = (),
) -> Task:
    """The task of ``settings``; data is read on first use.

    A control unit passes the ``vocabulary`` that the server sent, a server the ``known_labels`` of
    a checkpoint in their order.
    """
    module, _, name = TASK_CLASSES[settings.task].partition(":")
    kind: type[Task] = getattr(import_module(f"collapipe_flwr.data.{module}"), name)
    task = kind(settings, vocabulary)
    task.known_labels = known_labels
    return task


def _choose(table: Dataset, rows: list[int], limit: int) -> Dataset:
    """The first ``limit`` (0: all) of the shuffled ``rows``, in the order of the table."""
    return table.select(sorted(rows[:limit] if limit else rows))


def class_names(table: Dataset, name: str) -> tuple[str, ...]:
    """What the data set calls the numbers of a column (or of the lists in it); () if nothing."""
    feature: Any = table.features.get(name)
    feature = getattr(feature, "feature", feature)
    return tuple(feature.names) if isinstance(feature, ClassLabel) else ()


def with_names(table: Dataset, name: str, names: Sequence[str]) -> Dataset:
    """The table with a column of numbers (or of lists of them) declared as these classes.

    Lists of texts may also hold "-100", which becomes one more class; as a number it stays what
    it is. Raises DataError for any other value that is neither a number nor a name of a class.
    """
    if name not in table.column_names:
        return table  # whoever reads the column says so
    feature = table.features[name]
    try:
        if not isinstance(feature, List):
            return table.cast_column(name, ClassLabel(names=list(names)))
        marks = [IGNORED_TAG] if feature.feature == Value("string") else []
        return table.cast_column(name, List(ClassLabel(names=[*names, *marks])))
    except (ValueError, TypeError, NotImplementedError) as error:
        raise DataError(
            f'data.label-names has {len(names)} names, which do not fit the column "{name}" '
            f"({error}): give one for every number from 0 on"
        ) from error


def name_of(number: Any, names: Sequence[str], what: str) -> str:
    """The name of a class; raises DataError for a number that has none."""
    if not isinstance(number, int) or not 0 <= number < len(names):
        raise DataError(
            f"{what} holds the class {number}, but only 0 to {len(names) - 1} have names: correct "
            "the row, or name all classes in data.label-names"
        )
    return names[number]


def column(table: Dataset, name: str, *, key: str, of: str) -> list[str]:
    """A column as texts; the names of class labels instead of their numbers.

    Raises DataError, naming ``key``, if the column is not there or a row of it is empty.
    """
    texts = sparse_column(table, name, key=key, of=of)
    _refuse_empty(texts, f'{key} "{name}" of "{of}"')
    return texts


def sparse_column(table: Dataset, name: str, *, key: str, of: str) -> list[str]:
    """The same, but rows may be empty. A field in an object is named ``column.field``."""
    if "." in name and name not in table.column_names:
        table = table.flatten()
    require_column(table, name, key=key, of=of)
    values, what = table[name][:], f'{key} "{name}" of "{of}"'
    _refuse_nested(values, what, name)
    if names := class_names(table, name):
        unknown = (None, -1)  # as datasets marks rows whose class is held back
        values = [None if v in unknown else name_of(v, names, what) for v in values]
    return ["" if value is None else str(value) for value in values]


def require_column(table: Dataset, name: str, *, key: str, of: str) -> None:
    """Raise DataError, naming ``key``, where the table has no such column."""
    if name not in table.column_names:
        raise DataError(
            f'{key} "{name}" is not a column of "{of}", which has {", ".join(table.column_names)}'
        )


def _refuse_nested(values: list[Any], what: str, name: str) -> None:
    odd = next((value for value in values if isinstance(value, dict | list)), None)
    if isinstance(odd, dict):
        raise DataError(
            f"{what} holds objects: name one of their fields, such as "
            f'"{name}.{next(iter(odd), "field")}"'
        )
    if odd is not None:
        raise DataError(f"{what} holds lists: name a column with one text or number in each row")


def _refuse_empty(texts: list[str], what: str) -> None:
    empty = [row for row, text in enumerate(texts, start=1) if not text.strip()]
    if empty:
        raise DataError(
            f"{what} is empty in {len(empty)} of {len(texts)} rows, first in row {empty[0]}: "
            "fill or remove these rows"
        )


def list_column(table: Dataset, name: str, *, key: str, of: str) -> list[list[str]]:
    """A column of lists as texts, the names of class labels instead of their numbers.

    The number -100, in whatever type, is the text "-100". A row may also be one text, which is
    cut at its spaces. Raises DataError, naming ``key``.
    """
    require_column(table, name, key=key, of=of)
    rows = [row.split() if isinstance(row, str) else list(row or ()) for row in table[name][:]]
    if names := class_names(table, name):
        what = f'{key} "{name}" of "{of}"'
        return [[_named(value, names, what) for value in row] for row in rows]
    odd = next((value for row in rows for value in row if not isinstance(value, _PLAIN)), 0)
    if odd is None or odd:
        raise DataError(
            f'{key} "{name}" of "{of}" holds {odd!r:.40} where one word or tag should stand: give '
            "a list of texts in every row"
        )
    return [[IGNORED_TAG if v == IGNORED_LABEL else str(v) for v in row] for row in rows]


def _named(value: Any, names: Sequence[str], what: str) -> str:
    return IGNORED_TAG if value == IGNORED_LABEL else name_of(value, names, what)

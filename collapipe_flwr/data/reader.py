"""Columns of the user's own tables as texts, or as lists of texts.

The names of classes that a column holds as numbers are declared by the data set or given by the
user. They keep the order of the numbers, unlike a sorted list.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from math import isfinite
from typing import Any

from collapipe_flwr.core.domain import IGNORED_LABEL
from collapipe_flwr.core.errors import DataError, name_extra
from collapipe_flwr.data.headers import no_such_column
from collapipe_flwr.data.tokenizer import IGNORED_TAG

with name_extra("data"):
    from datasets import ClassLabel, Dataset, List, Value

_BLANKS = re.compile(r"[ \t\r\n]+")
_PLAIN = (str, int, float)
_BINARY = (bytes, bytearray)
_LEAST_ROUNDED = 2.0**53  # from here on, two whole numbers may be one fraction
_MOST_NAMED = 20  # rows in a sentence
ReadColumn = Callable[..., list[Any]]  # as `read_column`


def read_class_names(table: Dataset, name: str) -> tuple[str, ...]:
    """Return the class names that the data set declares for a column (or its lists), or ().

    They are in the order of the numbers, and may be more than the rows use.
    """
    feature: Any = table.features.get(name)
    feature = getattr(feature, "feature", feature)
    return tuple(feature.names) if isinstance(feature, ClassLabel) else ()


def declare_classes(table: Dataset, name: str, names: Sequence[str]) -> Dataset:
    """Declare a column of numbers (or of lists of them) as these classes.

    Lists of texts may also hold "-100", which becomes one more class; the number stays unchanged.
    Raises DataError for any other value that is neither a number nor a name of a class.
    """
    if name not in table.column_names:
        return table  # refused where the column is read
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
    """Return the name of a class; raises DataError for a number that has none."""
    if not isinstance(number, int) or not 0 <= number < len(names):
        raise DataError(
            f"{what} holds the class {number}, but only 0 to {len(names) - 1} have names: correct "
            "the row, or name all classes in data.label-names"
        )
    return names[number]


def format_rows(rows: Sequence[int], what: str = "row") -> str:
    """Write row numbers from 0 on as ``rows 3, 8 and 41``; shorten a long list."""
    shown = [str(row + 1) for row in rows[:_MOST_NAMED]]
    left = len(rows) - len(shown)
    if left:
        return f"{what}s {', '.join(shown)} and {left} more"
    *first, last = shown
    return f"{what}s {', '.join(first)} and {last}" if first else f"{what} {last}"


def read_column(table: Dataset, name: str, *, key: str, of: str) -> list[str]:
    """Read a column as texts, empty where a row has none; class labels by name, not number.

    A field in an object is named ``column.field``. Raises DataError, naming ``key``, if the column
    is not there or holds no texts.
    """
    if "." in name and name not in table.column_names:
        table = table.flatten()
    require_column(table, name, key=key, of=of)
    values, what = table[name][:], f'{key} "{name}" of "{of}"'
    odd = next((value for value in values if isinstance(value, dict | list)), None)
    if isinstance(odd, dict):
        raise DataError(
            f"{what} holds objects: name one of their fields, such as "
            f'"{name}.{next(iter(odd), "field")}"'
        )
    if odd is not None:
        raise DataError(f"{what} holds lists: name a column with one text or number in each row")
    if any(isinstance(value, _BINARY) for value in values):
        raise DataError(f"{what} holds bytes: store them as texts, or name another column")
    _refuse_mixed(table.features[name], what)
    if names := read_class_names(table, name):
        unknown = (None, -1)  # hidden labels of a hub's test set
        values = [None if v in unknown else name_of(v, names, what) for v in values]
    rounded = next((v for v in values if isinstance(v, float) and abs(v) >= _LEAST_ROUNDED), 0.0)
    if isfinite(rounded) and rounded:
        raise DataError(
            f"{what} holds whole numbers of more than 15 digits, such as one near {rounded:.3g}, "
            "which are rounded on reading: write them as texts, in quotation marks"
        )
    return ["" if value is None or value != value else str(value) for value in values]


def _refuse_mixed(feature: Any, what: str) -> None:
    """Raise DataError for values of several kinds: datasets makes numbers of texts among them."""
    if not isinstance(feature, Value | ClassLabel):
        raise DataError(
            f'{what} holds values of several kinds, such as 1 and "1": write all of them as texts'
        )


def split_words(text: str) -> list[str]:
    """Split a text at blanks; other spaces, such as no-break spaces, are within words."""
    return [word for word in _BLANKS.split(text) if word]


def require_column(table: Dataset, name: str, *, key: str, of: str) -> None:
    """Raise DataError, naming ``key``, where the table has no such column."""
    if name not in table.column_names:
        raise no_such_column(key, name, of, table.column_names)


def read_lists(table: Dataset, name: str, *, key: str, of: str) -> list[list[str]]:
    """Read a column of lists as texts, the names of class labels instead of their numbers.

    The number -100, in whatever type, is the text "-100". A row may also be one text, which is
    cut at its spaces. Raises DataError, naming ``key``.
    """
    require_column(table, name, key=key, of=of)
    values, what = table[name][:], f'{key} "{name}" of "{of}"'
    values = [None if row != row else row for row in values]  # not a number: a missing one
    other = next((row for row in values if not isinstance(row, str | list | None)), None)
    if other is not None:
        raise DataError(
            f"{what} holds {other!r:.40} where a row's words or tags should stand: give a list of "
            "texts in every row"
        )
    rows = [split_words(row) if isinstance(row, str) else list(row or ()) for row in values]
    if names := read_class_names(table, name):
        return [
            [IGNORED_TAG if v == IGNORED_LABEL else name_of(v, names, what) for v in row]
            for row in rows
        ]
    odd = [v for row in rows for v in row if not isinstance(v, _PLAIN) or v != v][:1]
    if odd:
        raise DataError(
            f"{what} holds {odd[0]!r:.40} where one word or tag should stand: give a list of "
            "texts in every row"
        )
    if isinstance(feature := table.features[name], List):
        _refuse_mixed(feature.feature, what)
    return [[IGNORED_TAG if v == IGNORED_LABEL else str(v) for v in row] for row in rows]

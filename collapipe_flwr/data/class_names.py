"""Names for classes that a column holds as numbers, declared by the data set or by the user.

Their order is that of the numbers, which a sorted list of the names would not keep.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from collapipe_flwr.core.errors import DataError
from collapipe_flwr.core.extras import extra
from collapipe_flwr.data.encoding import IGNORED_TAG

with extra("data"):
    from datasets import ClassLabel, Dataset, List, Value


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

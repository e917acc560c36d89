"""Laws of every partition: disjoint, complete, repeatable, none empty; else a clear error."""

from __future__ import annotations

import pytest
from datasets import Dataset

from collapipe_flwr.core.errors import DataError
from collapipe_flwr.data.batches import partition_rows
from collapipe_flwr.data.config import DataConfig

LABELS = ["a", "b", "c", "d", "e", "f"]
EXAMPLES = Dataset.from_dict({"group": [LABELS[row % 6] for row in range(120)]})
METHODS = ["iid", "natural", "dirichlet"]


def cut(
    method: str, count: int, *, examples: Dataset = EXAMPLES, by: str = "group", alpha: float = 0.5
) -> list[list[int]]:
    settings = DataConfig(alpha=alpha, seed=3)
    return partition_rows(examples, count, method=method, by=by, settings=settings)


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("method", METHODS)
def test_parts_are_disjoint_complete_and_repeatable(method: str, count: int) -> None:
    parts = cut(method, count)
    assert len(parts) == count
    assert all(parts)
    assert sorted(row for part in parts for row in part) == list(range(len(EXAMPLES)))
    assert cut(method, count) == parts


def test_iid_parts_differ_by_at_most_one() -> None:
    sizes = [len(part) for part in cut("iid", 7)]
    assert max(sizes) - min(sizes) <= 1


def test_natural_parts_share_no_value() -> None:
    values = [{LABELS[row % 6] for row in part} for part in cut("natural", 4)]
    assert sorted(value for part in values for value in part) == LABELS


def test_small_alpha_is_more_uneven_than_a_large_one() -> None:
    def spread(alpha: float) -> int:
        counts = [
            sum(row % 6 == label for row in part)
            for part in cut("dirichlet", 2, alpha=alpha)
            for label in range(6)
        ]
        return max(counts) - min(counts)

    assert spread(0.1) > spread(1_000.0)


def test_too_few_examples() -> None:
    with pytest.raises(DataError, match="120 training examples are too few for 121 clusters"):
        cut("iid", 121)


def test_too_few_values() -> None:
    with pytest.raises(
        DataError, match=r"finds 6 values .* 7 clusters: name another data\.partition-column"
    ):
        cut("natural", 7)


@pytest.mark.parametrize("method", ["natural", "dirichlet"])
def test_no_column_to_go_by(method: str) -> None:
    with pytest.raises(DataError, match=r"data\.partition-column"):
        cut(method, 2, by="")


def test_hopeless_alpha() -> None:
    one_label = Dataset.from_dict({"group": ["a"] * 4})
    with pytest.raises(DataError, match=r"data\.alpha"):
        cut("dirichlet", 4, examples=one_label, alpha=1e-4)

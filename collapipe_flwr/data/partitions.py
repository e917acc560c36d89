"""Cuts the training examples into one part per cluster: deterministic, disjoint, complete.

Dirichlet is the job of flwr-datasets. It is imported only then: the import alone takes seconds,
and in a Flower deployment every message starts a new process. The other two are one line each.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import numpy as np

from collapipe_flwr.core.errors import DataError, extra
from collapipe_flwr.data.config import DataConfig

if TYPE_CHECKING:
    from datasets import Dataset


def partition_rows(
    examples: Dataset, count: int, *, method: str, by: str, settings: DataConfig
) -> list[list[int]]:
    """Row numbers of each of ``count`` parts, cut by ``method`` along column ``by``.

    Raises DataError if a part would be empty or there is no column to go by.
    """
    if len(examples) < count:
        raise DataError(
            f"{len(examples)} training examples are too few for {count} clusters: "
            "raise data.train-examples or give more rows"
        )
    if method == "iid":
        return iid(examples, count, seed=settings.seed)
    if not by:
        raise DataError(
            f'data.partition "{method}" needs a column to go by: name it in data.partition-column, '
            'or choose data.partition "iid"'
        )
    if method == "natural":
        return natural(examples, count, by=by)
    return dirichlet(examples, count, by=by, alpha=settings.alpha, seed=settings.seed)


def iid(examples: Dataset, count: int, *, seed: int) -> list[list[int]]:
    """Row numbers of ``count`` random parts whose sizes differ by at most one."""
    order = np.random.default_rng(seed).permutation(len(examples))
    return [sorted(part.tolist()) for part in np.array_split(order, count)]


def natural(examples: Dataset, count: int, *, by: str) -> list[list[int]]:
    """Deals the values of column ``by``, in sorted order, to the parts in turn.

    Raises DataError if there are fewer values than parts.
    """
    values = list(examples[by])
    part_of = {value: turn % count for turn, value in enumerate(sorted(set(values)))}
    if len(part_of) < count:
        raise DataError(
            f'data.partition "natural" finds {len(part_of)} values to go by, too few for {count} '
            'clusters: name another data.partition-column, or choose data.partition "iid"'
        )
    parts: list[list[int]] = [[] for _ in range(count)]
    for row, value in enumerate(values):
        parts[part_of[value]].append(row)
    return parts


def dirichlet(
    examples: Dataset, count: int, *, by: str, alpha: float, seed: int
) -> list[list[int]]:
    """Draws each cluster's share of every value of column ``by`` from Dirichlet(alpha).

    Raises DataError if a part stays empty after ten draws.
    """
    with extra("data"):
        from flwr_datasets.partitioner import DirichletPartitioner

    partitioner = DirichletPartitioner(
        num_partitions=count, partition_by=by, alpha=alpha, min_partition_size=1, seed=seed
    )
    numbered = examples.select_columns([by]).add_column("row", list(range(len(examples))))
    partitioner.dataset = numbered
    try:
        with warnings.catch_warnings(action="ignore"):  # one for each draw that is repeated
            return [sorted(partitioner.load_partition(part)["row"]) for part in range(count)]
    except ValueError as error:
        raise DataError(
            f"data.alpha {alpha} leaves one of {count} clusters without examples of "
            f"{len(examples)}: use a larger alpha, more examples or fewer clusters"
        ) from error

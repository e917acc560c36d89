"""The examples of a cluster and of each of its rounds, and the cut of a step into micro-batches.

All depends on the seed and the place in the run alone, so a resumed run repeats it exactly.
"""

from __future__ import annotations

import warnings
from bisect import bisect_left
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from collapipe_flwr.core.errors import DataError, name_extra
from collapipe_flwr.data.config import DataConfig

if TYPE_CHECKING:
    from datasets import Dataset

Example = dict[str, Any]  # a row of the task's own table: texts, lists, pictures
Order = NDArray[np.int64]  # row numbers of one pass
Rows = list[int]
T = TypeVar("T")


def partition_rows(
    examples: Dataset, count: int, *, method: str, by: str, settings: DataConfig
) -> list[Rows]:
    """Cut the rows into ``count`` parts by ``method`` along column ``by``; return row numbers.

    Parts are disjoint, together complete, and repeatable. Raises DataError if a part would be empty
    (by Dirichlet: after ten draws), or there are fewer values than parts or no column to go by.
    """
    if len(examples) < count:
        raise DataError(
            f"{len(examples)} training examples are too few for {count} clusters: "
            "raise data.train-examples or give more rows"
        )
    if method == "iid":  # random parts whose sizes differ by at most one
        order = np.random.default_rng(settings.seed).permutation(len(examples))
        return [sorted(part.tolist()) for part in np.array_split(order, count)]
    if not by:
        raise DataError(
            f'data.partition "{method}" needs a column to go by: name it in data.partition-column, '
            'or choose data.partition "iid"'
        )
    if method == "natural":
        return _deal_values(examples, count, by)
    return _draw_shares(examples, count, by, settings)


def _deal_values(examples: Dataset, count: int, by: str) -> list[Rows]:
    """Deal the values of column ``by``, in sorted order, to the parts in turn."""
    values = list(examples[by])
    part_of = {value: turn % count for turn, value in enumerate(sorted(set(values)))}
    if len(part_of) < count:
        raise DataError(
            f'data.partition "natural" finds {len(part_of)} values to go by, too few for {count} '
            'clusters: name another data.partition-column, or choose data.partition "iid"'
        )
    parts: list[Rows] = [[] for _ in range(count)]
    for row, value in enumerate(values):
        parts[part_of[value]].append(row)
    return parts


def _draw_shares(examples: Dataset, count: int, by: str, settings: DataConfig) -> list[Rows]:
    """Draw each cluster's share of every value of column ``by`` from Dirichlet(alpha)."""
    with name_extra("data"):  # imported here: it takes seconds, and every message starts a process
        from flwr_datasets.partitioner import DirichletPartitioner

    partitioner = DirichletPartitioner(
        num_partitions=count,
        partition_by=by,
        alpha=settings.alpha,
        min_partition_size=1,
        seed=settings.seed,
    )
    numbered = examples.select_columns([by]).add_column("row", list(range(len(examples))))
    partitioner.dataset = numbered
    try:
        with warnings.catch_warnings(action="ignore"):  # one for each draw that is repeated
            return [sorted(partitioner.load_partition(part)["row"]) for part in range(count)]
    except ValueError as error:
        raise DataError(
            f"data.alpha {settings.alpha} leaves one of {count} clusters without examples of "
            f"{len(examples)}: use a larger alpha, more examples or fewer clusters"
        ) from error


def draw_round_examples(examples: Dataset, **which: int) -> list[Example]:
    """Return the examples of a round; see `draw_round_rows`."""
    chosen: list[Example] = examples.select(draw_round_rows(len(examples), **which)).to_list()
    return chosen


def cut_batches(chosen: Sequence[T], batch_size: int) -> list[list[T]]:
    """Cut examples or rows into batches in order; the last one may be smaller."""
    return [list(chosen[start : start + batch_size]) for start in range(0, len(chosen), batch_size)]


def draw_round_rows(size: int, *, seed: int, rounds_done: int, cluster_id: int, limit: int) -> Rows:
    """Return ``limit`` (0: all) of ``size`` rows for the round after ``rounds_done``.

    Rounds walk through one shuffled pass after another, so that after any number of rounds two
    examples have been used equally often or once more; the same holds within each round. Each
    cluster and pass has its own order. The result depends on the arguments alone, so a resumed
    run sees what an unbroken one would have seen.
    """
    limit = limit or size
    epoch, offset = divmod(rounds_done * limit, size)
    begun = _draw_pass(epoch, size, limit, seed, cluster_id)[offset : offset + limit]
    rows: Rows = begun.tolist()
    while len(rows) < limit:
        epoch += 1
        order = _put_last(begun, _draw_order(epoch, size, seed, cluster_id))
        rows += order[: limit - len(rows)].tolist()
    return rows


def _draw_pass(epoch: int, size: int, limit: int, seed: int, cluster_id: int) -> Order:
    """Return the order of the rows in a pass.

    Where a round began in the pass before, its rows come last, so that no round has a row twice
    before it has had all.
    """
    passes = [epoch]  # and those before it, back to one that a round begins with
    while passes[-1] * size % limit:
        passes.append(_find_round_start(passes[-1], size, limit) // size)
    order = _draw_order(passes.pop(), size, seed, cluster_id)
    for later in reversed(passes):
        begun = order[_find_round_start(later, size, limit) % size :]
        order = _put_last(begun, _draw_order(later, size, seed, cluster_id))
    return order


def _find_round_start(epoch: int, size: int, limit: int) -> int:
    """Return where the round began in which this pass begins, in rows since the first pass."""
    return epoch * size // limit * limit


def _draw_order(epoch: int, size: int, seed: int, cluster_id: int) -> Order:
    return np.random.default_rng([seed, cluster_id, epoch]).permutation(size)


def _put_last(begun: Order, order: Order) -> Order:
    """Put those rows last that the round has used in the previous pass."""
    again = np.isin(order, begun)
    return np.concatenate([order[~again], order[again]])


def bucket_by_length(lengths: Sequence[int], count: int) -> list[Rows]:
    """Group rows of similar length into ``count`` groups, fewer if there are fewer rows.

    The largest group, in tokens after padding to its own longest row, is as small as it can be;
    it is never larger than that of an equal cut. Rows are in order of length; one without tokens
    counts as one token. A micro-batch counts with its share of a step's targets, so the gradient
    does not depend on the cut.
    """
    order = sorted(range(len(lengths)), key=lambda row: lengths[row])
    ascending = [max(1, lengths[row]) for row in order]
    count = min(count, len(order))
    # The higher the limit of padded tokens, the fewer groups are needed: bisect for the lowest.
    limits = range(max(ascending), count_padded_tokens(ascending) + 1)
    smallest = bisect_left(
        limits, True, key=lambda limit: len(_fill_groups(ascending, limit)) <= count
    )
    sizes = _split_until(_fill_groups(ascending, limits[smallest]), count)
    starts = [sum(sizes[:group]) for group in range(len(sizes))]
    return [order[start : start + size] for start, size in zip(starts, sizes, strict=True)]


def pack_rows(lengths: Sequence[int], limit: int) -> list[Rows]:
    """Group rows into few sums of at most ``limit`` tokens, of which the largest is small.

    No length may exceed ``limit``. Padded to the largest sum, groups have few tokens.
    """
    count = len(_fill_sums(lengths, limit))
    sums = range(max(lengths), limit + 1)
    least = bisect_left(sums, True, key=lambda most: len(_fill_sums(lengths, most)) <= count)
    return _fill_sums(lengths, sums[least])


def _fill_sums(lengths: Sequence[int], most: int) -> list[Rows]:
    """Put each row, the longest first, into the first group that has room for it."""
    groups: list[Rows] = []
    room: list[int] = []
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        place = next((p for p, left in enumerate(room) if lengths[row] <= left), len(room))
        if place == len(room):
            groups.append([])
            room.append(most)
        groups[place].append(row)
        room[place] -= lengths[row]
    return groups


def shuffle_groups(groups: Sequence[T], *place: int) -> list[T]:
    """Return the groups in an order that depends on ``place`` alone.

    The first micro-batch of a step stands for all where gradient noise is measured.
    """
    order = np.random.default_rng(place).permutation(len(groups))
    return [groups[index] for index in order]


def count_padded_tokens(lengths: Sequence[int]) -> int:
    """Return the tokens of one micro-batch, padding included."""
    return len(lengths) * max(lengths)


def _fill_groups(ascending: Sequence[int], limit: int) -> list[int]:
    """Fill the fewest groups of at most ``limit`` padded tokens; return their sizes, ascending.

    The longest row of a group decides how many fit, so each group takes as many as it can.
    """
    sizes: list[int] = []
    left = len(ascending)
    while left:
        size = min(left, limit // ascending[left - 1])
        sizes.insert(0, size)
        left -= size
    return sizes


def _split_until(sizes: list[int], count: int) -> list[int]:
    """Halve the group with most rows until there are ``count``."""
    while len(sizes) < count:
        largest = max(range(len(sizes)), key=lambda group: sizes[group])
        half = sizes[largest] // 2
        sizes[largest : largest + 1] = [half, sizes[largest] - half]
    return sizes

"""Which examples a cluster trains on in a round, in an order that can be repeated exactly."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from datasets import Dataset

Example = dict[str, Any]  # a row of the task's own table: texts, lists, pictures
Order = NDArray[np.int64]  # row numbers of one pass


def round_examples(
    examples: Dataset, *, seed: int, rounds_done: int, cluster_id: int, limit: int
) -> list[Example]:
    """The examples of the round after ``rounds_done``: ``limit`` of them (0: all).

    Rounds walk through one shuffled pass after another, so that after any number of rounds two
    examples have been used equally often or once more; the same holds within each round. Each
    cluster and pass has its own order. The result depends on the arguments alone, so a resumed
    run sees what an unbroken one would have seen.
    """
    rows = round_rows(
        len(examples), seed=seed, rounds_done=rounds_done, cluster_id=cluster_id, limit=limit
    )
    chosen: list[Example] = examples.select(rows).to_list()
    return chosen


def batches(chosen: list[Example], batch_size: int) -> list[list[Example]]:
    """Examples cut into batches in order; the last one may be smaller."""
    return [chosen[start : start + batch_size] for start in range(0, len(chosen), batch_size)]


def round_rows(size: int, *, seed: int, rounds_done: int, cluster_id: int, limit: int) -> list[int]:
    """The row numbers, out of ``size``, that a cluster uses in the round after ``rounds_done``."""
    limit = limit or size
    epoch, offset = divmod(rounds_done * limit, size)
    begun = _order_of(epoch, size, limit, seed, cluster_id)[offset : offset + limit]
    rows: list[int] = begun.tolist()
    while len(rows) < limit:
        epoch += 1
        order = _after(begun, _shuffled(epoch, size, seed, cluster_id))
        rows += order[: limit - len(rows)].tolist()
    return rows


def _order_of(epoch: int, size: int, limit: int, seed: int, cluster_id: int) -> Order:
    """The order of a pass. It depends on the pass in which the round began that it begins in."""
    passes = [epoch]
    while passes[-1] * size % limit:
        passes.append(_round_start(passes[-1], size, limit) // size)
    order = _shuffled(passes.pop(), size, seed, cluster_id)
    for later in reversed(passes):
        begun = order[_round_start(later, size, limit) % size :]
        order = _after(begun, _shuffled(later, size, seed, cluster_id))
    return order


def _round_start(epoch: int, size: int, limit: int) -> int:
    """Where the round began in which a pass begins, in rows since the first round."""
    return epoch * size // limit * limit


def _shuffled(epoch: int, size: int, seed: int, cluster_id: int) -> Order:
    return np.random.default_rng([seed, cluster_id, epoch]).permutation(size)


def _after(begun: Order, order: Order) -> Order:
    """``order``, but the rows that the round has used of an unfinished pass come last."""
    again = np.isin(order, begun)
    return np.concatenate([order[~again], order[again]])

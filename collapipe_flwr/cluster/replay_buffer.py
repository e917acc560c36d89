"""The batches of a round, kept while a replay may need them."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import count

from collapipe_flwr.pipeline.step import MicroBatch

Batch = Sequence[MicroBatch]


class ReplayBuffer:
    """The batches of a round; those of one interval are kept to be replayed.

    ``limit`` is the number of batches of an interval; 0: all.
    """

    def __init__(self, batches: Iterable[Batch], limit: int) -> None:
        self.first_done_s = 0.0  # end of the first step of the last replay
        self._source = iter(batches)
        self._next: Batch | None = None
        self._limit = limit or math.inf
        self._kept: list[Batch] = []
        self._given = 0  # of the last replay

    @property
    def kept(self) -> tuple[Batch, ...]:
        """The batches of the interval that were taken so far."""
        return tuple(self._kept)

    def has_next(self) -> bool:
        """Return whether there is a batch behind those that were taken."""
        if self._next is None:
            self._next = next(self._source, None)
        return self._next is not None

    @property
    def past_first(self) -> bool:
        """Whether the last replay has given more than one batch."""
        return self._given > 1

    def begin(self) -> None:
        self._kept = []

    def replay(self) -> Iterator[Batch]:
        """Yield the interval's batches from the first one on, taking new ones as needed."""
        for index in count():
            if index == 1:
                self.first_done_s = time.monotonic()
            if index == len(self._kept) and index < self._limit and self.has_next():
                assert self._next is not None
                self._kept.append(self._next)
                self._next = None
            if index == len(self._kept):
                return
            self._given = index + 1
            yield self._kept[index]

"""The examples of one cluster: found once per process, cut into the micro-batches of a round."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from collapipe_flwr.cluster.evaluation import TestPart
from collapipe_flwr.config.schema import AppConfig
from collapipe_flwr.core.errors import ConfigError, DataError
from collapipe_flwr.core.hub import expand_home
from collapipe_flwr.core.keys import Value
from collapipe_flwr.data.batches import (
    Example,
    Rows,
    bucket_by_length,
    cut_batches,
    draw_round_examples,
    shuffle_groups,
)
from collapipe_flwr.data.stream import Stream
from collapipe_flwr.data.tasks import load_task
from collapipe_flwr.data.tokenizer import Vocabulary

if TYPE_CHECKING:
    from datasets import Dataset

_log = logging.getLogger("flwr.collapipe")

_ALL_ROWS: Mapping[str, Value] = {
    "data.train-examples": 0,
    "data.test-examples": 0,
    "data.partition": "iid",
    "data.partition-column": "",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DataPlace:
    """The index of this node among the run's ``count`` clusters; from ``count`` on it is spare.

    With ``own_data`` it reads files that others do not have, so its share is all of them.
    """

    index: int
    count: int
    own_data: bool = False

    @property
    def share(self) -> tuple[int, int]:
        """The index of its share of the examples that it reads, and the number of shares."""
        return (0, 1) if self.own_data else (self.index, self.count)


class LocalData:
    """One cluster's share of the training examples."""

    def __init__(self, config: AppConfig, place: DataPlace, vocabulary: Vocabulary | None) -> None:
        self._config = config
        self._place = place
        self.task = load_task(config.seeded_data, vocabulary)

    @cached_property
    def _examples(self) -> Dataset:
        found = self.task.make_examples(self.task.partition(*self._place.share))
        if self._place.own_data:  # the server cannot examine it
            for sentence in (self.task.skipped | self.task.examine()).values():
                _log.warning(sentence)
        return found

    @cached_property
    def past(self) -> Dataset:
        """The cluster's first examples, in the columns of a file of ``data.stream``."""
        grouped = "group" in self._examples.column_names
        return self._examples.remove_columns("group") if grouped else self._examples

    def open_stream(self, folder: str) -> Stream:
        """Open the cluster's own folder of arriving files; raises DataError where there is none."""
        own = expand_home(folder) / str(self._place.index)
        return Stream(own, self.task.read_file, self.task.make_examples)

    @property
    def count(self) -> int:
        """The number of the cluster's examples."""
        return len(self._examples)

    def select(self, rows: Rows) -> list[Example]:
        """Return the examples of these numbers."""
        chosen: list[Example] = self._examples.select(rows).to_list()
        return chosen

    @property
    def examples_per_round(self) -> int:
        return self._config.train.examples_per_round or len(self._examples)

    def cut_test_steps(self, batch_size: int, micro_batch_size: int) -> Iterator[list[TestPart]]:
        """Yield the cluster's share of the test set, each example once; raises DataError if empty.

        It takes every ``count``-th example, so shares are disjoint and together complete.
        """
        test, (index, count) = self.task.test, self._place.share
        if len(test) < count:
            raise DataError(
                f"{len(test)} test examples are too few for {count} clusters to evaluate: "
                "raise data.test-examples or set evaluation.federated to false"
            )
        share = self.task.make_examples(test.select(range(index, len(test), count)))
        rows: list[Example] = share.to_list()
        for batch in cut_batches(rows, batch_size):
            cut = self._cut(batch, micro_batch_size)
            yield [
                TestPart.from_examples(self.task, [batch[row] for row in places]) for places in cut
            ]

    def draw_examples(self, rounds_done: int) -> list[Example]:
        """Draw the examples of the cluster's next round, in training order."""
        return draw_round_examples(
            self._examples,
            seed=self._config.run.seed,
            rounds_done=rounds_done,
            cluster_id=self._place.index,
            limit=self.examples_per_round,
        )

    def seen_share(self, rounds_done: int) -> float:
        """Return the share of a round's examples that an earlier one has drawn."""
        size, unseen = self.examples_per_round, self.count - rounds_done * self.examples_per_round
        return 1.0 - min(max(unseen, 0), size) / size

    def cut_steps(
        self, chosen: list[Example], round_index: int, batch_size: int, micro_batch_size: int
    ) -> Iterator[list[dict[str, Tensor]]]:
        """Yield the micro-batches of each optimizer step over ``chosen``, tokenized as needed."""
        place = (self._config.run.seed, self._place.index, round_index)
        for step, batch in enumerate(cut_batches(chosen, batch_size)):
            cut = self._cut(batch, micro_batch_size)
            if self._config.data.bucketing != "none":
                cut = shuffle_groups(cut, *place, step)
            yield [self.task.collate_for([batch[row] for row in rows], round_index) for rows in cut]

    def _cut(self, batch: list[Example], micro_batch_size: int) -> list[Rows]:
        """Group a step's rows into micro-batches, with little padding if the run-config asks."""
        cut = cut_batches(range(len(batch)), micro_batch_size)
        if self._config.data.bucketing == "none" or len(cut) == 1:
            return cut
        return bucket_by_length(self.task.lengths(batch), len(cut))


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalExamples:
    """The `Batches` of one round: ``chosen`` in training order, ``fresh`` ones have just come.

    ``seen_share`` is that of the next round, None where nobody knows yet what it will draw.
    """

    data: LocalData
    round_index: int
    chosen: list[Example]
    fresh: list[Example] = field(default_factory=list)
    seen_share: float | None = None
    epochs: int = 1

    @property
    def examples(self) -> int:
        return len(self.chosen)

    @property
    def population(self) -> int:
        """The number of the cluster's examples."""
        return self.data.count

    @property
    def visits(self) -> int:
        """How often one may come in this round, which is not from a stream."""
        return -(-len(self.chosen) // self.population)

    @property
    def fresh_examples(self) -> int:
        return len(self.fresh)

    def count_batches(self, batch_size: int) -> int:
        return -(-len(self.chosen) // batch_size)

    def cut_steps(
        self, batch_size: int, micro_batch_size: int
    ) -> Iterator[list[dict[str, Tensor]]]:
        return self.data.cut_steps(self.chosen, self.round_index, batch_size, micro_batch_size)

    def probe(self, batch_size: int, micro_batch_size: int) -> Iterator[list[dict[str, Tensor]]]:
        return self.data.cut_steps(self.fresh, self.round_index, batch_size, micro_batch_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledExamples:
    """The `SampledBatches` of a round; accounts of privacy assume that nobody can repeat a draw."""

    data: LocalData
    round_index: int
    largest_batch: int
    examples: int
    epochs: int = 1
    fresh_examples: int = 0

    @property
    def population(self) -> int:
        """The number of examples that are drawn from."""
        return self.data.count

    def count_batches(self, batch_size: int) -> int:
        return -(-self.examples // batch_size)

    def cut_steps(
        self, batch_size: int, micro_batch_size: int
    ) -> Iterator[list[dict[str, Tensor]]]:
        """Yield the micro-batches of every step, which draws no example twice."""
        rng = np.random.default_rng(secrets.randbits(128))
        for _ in range(self.count_batches(batch_size)):
            rows = rng.choice(self.population, batch_size, replace=False)
            chosen = self.data.select(rows.tolist())
            yield from self.data.cut_steps(chosen, self.round_index, batch_size, micro_batch_size)

    def probe(self, batch_size: int, micro_batch_size: int) -> Iterator[list[dict[str, Tensor]]]:
        del batch_size, micro_batch_size
        return iter(())


@lru_cache(maxsize=16)
def load_local_data(
    config: AppConfig, place: DataPlace, vocabulary: Vocabulary | None
) -> LocalData:
    """Make the `LocalData` of a node once per process, which clusters share in simulation."""
    return LocalData(config, place, vocabulary)


def read_own_data(node_config: Mapping[str, Value]) -> dict[str, Value]:
    """Read the run-config keys of the cluster's own data from ``--node-config``.

    All rows of `data.train` are its share; a tenth is held out if there is no `data.test`. Raises
    ConfigError.
    """
    train, test = (node_config.get(key, "") for key in ("data.train", "data.test"))
    for key, name in (("data.train", train), ("data.test", test)):
        if not isinstance(name, str):
            raise ConfigError(f"node-config {key} must be the name of a file or folder: {name!r}")
    if test and not train:
        raise ConfigError(f'node-config data.test "{test}" needs a data.train beside it')
    if not train:
        return {}
    return {"data.train": train, "data.test": test, **_ALL_ROWS}

"""Examples that arrive while training runs: a folder to which files are added.

A cluster reads the files in the order in which it first saw them (by name within one look), each
once. Whoever writes them must move a finished file into the folder; names that begin with a dot
or end in ``.tmp`` or ``.part`` are left alone. What was read stays on disk, so the past needs no
buffer: a round replays rows drawn from everything before its place in the stream.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from datasets import Dataset, concatenate_datasets

from collapipe_flwr.core.errors import DataError

_UNFINISHED = (".tmp", ".part")


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamPlace:
    """How far a cluster has read, and what it read in its last round.

    The rows of all ``files``, one after another, are the stream: ``start`` to ``stop`` were fresh
    in round ``server_round``. A round that is repeated after a failure gets the same rows again.
    ``rows`` are as many as the files had when they were read.
    """

    server_round: int = 0
    files: tuple[str, ...] = ()
    start: int = 0
    stop: int = 0
    rows: int = 0


class Stream:
    """One cluster's folder; ``read`` turns a file into examples and is called once per file."""

    def __init__(self, folder: Path, read: Callable[[str], Dataset]) -> None:
        if not folder.is_dir():
            raise DataError(
                f'data.stream has no folder "{folder}" for this cluster: make it, and move files '
                "with new examples there while training runs"
            )
        self._folder = folder
        self._read = read
        self._tables: dict[str, Dataset] = {}

    def files(self, known: tuple[str, ...]) -> tuple[str, ...]:
        """``known`` and the names of what has arrived since; raises DataError if one is gone."""
        names = {path.name for path in self._folder.iterdir() if _finished(path)}
        gone = set(known) - names
        if gone:
            raise DataError(
                f'data.stream "{self._folder}" no longer has {sorted(gone)[0]}: files must stay, '
                "because later rounds replay them"
            )
        return (*known, *sorted(names - set(known)))

    def rows(self, files: tuple[str, ...]) -> Dataset:
        """All examples of ``files`` in order."""
        tables = [self._table(name) for name in files]
        return concatenate_datasets(tables) if tables else Dataset.from_dict({})

    def check(self, place: StreamPlace) -> None:
        """Raise DataError if a file that was read has got more rows or fewer since."""
        found = sum(len(self._table(name)) for name in place.files)
        if found != place.rows:
            raise DataError(
                f'data.stream "{self._folder}" has {found} rows where {place.rows} were read: '
                "files must stay as they are, so put new examples into new ones"
            )

    def _table(self, name: str) -> Dataset:
        if name not in self._tables:
            self._tables[name] = self._read(str(self._folder / name))
        return self._tables[name]


def _finished(path: Path) -> bool:
    return path.is_file() and path.name[0] != "." and not path.name.endswith(_UNFINISHED)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamRound:
    """The examples of one round: ``fresh`` ones for the first time, then ``replayed`` ones."""

    place: StreamPlace
    fresh: Dataset
    replayed: Dataset


def next_round(
    stream: Stream,
    before: StreamPlace,
    past: Dataset,
    *,
    server_round: int,
    limit: int,
    replay_share: float,
    rng: np.random.Generator,
) -> StreamRound:
    """``limit`` examples: at most ``1 - replay_share`` of them fresh, the rest drawn from before.

    ``past`` are the examples that the cluster started with. When little has arrived, replay fills
    the round, so that a round always is as long as planned. Raises DataError when there is
    nothing at all, or when files that were read have changed.
    """
    stream.check(before)
    place = before
    if server_round != before.server_round:
        files = stream.files(before.files)
        most = limit - int(limit * replay_share)
        rows = len(stream.rows(files))
        place = StreamPlace(
            server_round=server_round,
            files=files,
            start=before.stop,
            stop=min(rows, before.stop + most),
            rows=rows,
        )
    arrived = stream.rows(place.files)
    seen = concatenate_datasets([past, _between(arrived, 0, place.start)])
    return StreamRound(
        place=place,
        fresh=_between(arrived, place.start, place.stop),
        replayed=_draw(seen, limit - (place.stop - place.start), rng),
    )


def _between(table: Dataset, start: int, stop: int) -> Dataset:
    return table.select(list(range(start, stop)))  # datasets refuses an empty range past the end


def _draw(seen: Dataset, wanted: int, rng: np.random.Generator) -> Dataset:
    """``wanted`` rows, none a second time before each came once."""
    if wanted and not len(seen):
        raise DataError("data.stream and data.train are both empty: there is nothing to train on")
    rows: list[int] = []
    while len(rows) < wanted:
        rows += rng.permutation(len(seen))[: wanted - len(rows)].tolist()
    return seen.select(rows)

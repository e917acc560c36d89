"""Examples that arrive while training runs: a folder to which files are added.

A cluster reads the files in the order in which it first saw them (by name within one look), each
row once. Files may grow at their end, row by row; rows that were read must stay, since later
rounds replay them: a round draws from all rows before its place in the stream, without a buffer.
Names that begin with a dot or end in ``.tmp`` or ``.part`` are ignored.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import pairwise
from pathlib import Path

import numpy as np

from collapipe_flwr.core.errors import DataError, name_extra
from collapipe_flwr.data.headers import CONLL_SUFFIXES

with name_extra("data"):
    from datasets import Dataset, concatenate_datasets

_log = logging.getLogger("flwr.collapipe")
_UNFINISHED = (".tmp", ".part")
_CLOSED = (".parquet",)  # formats that cannot grow row by row
# The end of a complete last row, in formats where an incomplete row could be read as a row.
_ROW_ENDS = {
    **dict.fromkeys((".csv", ".tsv", ".txt"), b"\n"),
    **dict.fromkeys(CONLL_SUFFIXES, b"\n\n"),
}
_TAIL_BYTES, _CHUNK_BYTES = 4, 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePlace:
    """How far one file was read: ``read`` examples, from the first on.

    At the last look the file had ``size`` bytes with the digest ``sha256``, and ``pieces[-1]``
    rows. The earlier ``pieces`` are its rows at earlier looks: examples are made of the rows
    between two of them, so that growth does not change the examples that were read.
    """

    name: str
    read: int = 0
    pieces: tuple[int, ...] = ()
    size: int = 0
    sha256: str = ""


StreamPlace = tuple[FilePlace, ...]  # how far a cluster has read, in the order of the stream


@dataclass(frozen=True, slots=True)
class Stream:
    """One cluster's folder.

    ``read`` returns the rows of a file and ``examples`` the training examples of rows; both raise
    DataError.
    """

    folder: Path
    read: Callable[[str], Dataset]
    examples: Callable[[Dataset], Dataset]

    def __post_init__(self) -> None:
        if not self.folder.is_dir():
            raise DataError(
                f'data.stream has no folder "{self.folder}" for this cluster: make it, and move '
                "files with new examples there while training runs"
            )

    def files(self, before: StreamPlace) -> list[tuple[FilePlace, Dataset | None]]:
        """Return the files of ``before`` and those that have arrived since, as they are now.

        A file that cannot be read has no examples in this round and is logged. Raises DataError
        if a file of which rows were read is gone or has changed other than by growing.
        """
        known = {file.name: file for file in before}
        names = {path.name for path in self.folder.glob("[!.]*") if path.is_file()}
        names = {name for name in names if not name.endswith(_UNFINISHED)}
        for file in before:
            if file.read and file.name not in names:
                raise DataError(
                    f'data.stream no longer has "{self.folder / file.name}", of which '
                    f"{file.read} examples were read: put it back, because later rounds replay it"
                )
        order = [name for name in known if name in names] + sorted(names - known.keys())
        return [self._look(known.get(name, FilePlace(name=name))) for name in order]

    def find_end(self) -> StreamPlace:
        """Return the place after all rows that can be read now."""
        return tuple(replace(file, read=len(rows or ())) for file, rows in self.files(()))

    def _look(self, before: FilePlace) -> tuple[FilePlace, Dataset | None]:
        path = self.folder / before.name
        try:
            continues = _continues(path, before)
            if continues or not before.read:
                return self._read(path, before if continues else FilePlace(name=before.name))
        except (DataError, OSError) as error:
            _log.warning('data.stream "%s" is left out until it can be read: %s', path, error)
            return before, None
        raise DataError(
            f'data.stream "{path}" has changed since {before.read} examples of it were read: put '
            "it back as it was; new rows belong after its last line or into a new file"
        )

    def _read(self, path: Path, before: FilePlace) -> tuple[FilePlace, Dataset | None]:
        size = path.stat().st_size
        rows = self.read(str(path))
        whole = size == before.size or _ends_with_a_row(path, size)
        stop = len(rows) if whole else len(rows) - 1
        pieces = before.pieces
        if stop > max(pieces, default=0):
            pieces = (*pieces, stop)
        examples = [self.examples(rows.select(range(a, b))) for a, b in pairwise((0, *pieces))]
        digest = before.sha256 if size == before.size else _compute_digest(path, size)
        if path.stat().st_size != size:
            raise DataError("it is being written")
        place = replace(before, pieces=pieces, size=size, sha256=digest)
        return place, concatenate_datasets(examples) if examples else None


def _continues(path: Path, before: FilePlace) -> bool:
    """Return whether the file begins with all that was there at the last look."""
    size = path.stat().st_size
    if size < before.size or (size > before.size and path.suffix.lower() in _CLOSED):
        return False
    return not before.size or _compute_digest(path, before.size) == before.sha256


def _ends_with_a_row(path: Path, size: int) -> bool:
    end = _ROW_ENDS.get(path.suffix.lower(), b"")
    with path.open("rb") as file:
        file.seek(max(size - _TAIL_BYTES, 0))
        return file.read(_TAIL_BYTES).replace(b"\r", b"").endswith(end)


def _compute_digest(path: Path, size: int) -> str:
    """Return the SHA-256 of the first ``size`` bytes."""
    digest = sha256()
    with path.open("rb") as file:
        while size and (chunk := file.read(min(size, _CHUNK_BYTES))):
            digest.update(chunk)
            size -= len(chunk)
    return digest.hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamExamples:
    """The examples of one round: ``fresh`` ones for the first time, then ``replayed`` ones."""

    place: StreamPlace
    fresh: Dataset
    replayed: Dataset


def draw_stream_round(
    stream: Stream,
    before: StreamPlace,
    past: Dataset,
    *,
    limit: int,
    replay_share: float,
    rng: np.random.Generator,
) -> StreamExamples:
    """Draw ``limit`` examples, at most ``1 - replay_share`` of them fresh.

    ``past`` are the examples that the cluster started with. Replay of earlier examples fills the
    round, so that it always is as long as planned. Raises DataError when there are no examples at
    all, or when files that were read have changed.
    """
    room = limit - int(limit * replay_share)
    places: list[FilePlace] = []
    seen, fresh = [past], [past.select([])]
    for place, examples in stream.files(before):
        if examples is not None:
            stop = min(len(examples), place.read + room)
            seen.append(_take(examples, 0, place.read))
            fresh.append(_take(examples, place.read, stop))
            room -= stop - place.read
            place = replace(place, read=stop)
        places.append(place)
    arrived = concatenate_datasets(fresh)
    return StreamExamples(
        place=tuple(places),
        fresh=arrived,
        replayed=_draw(concatenate_datasets(seen), limit - len(arrived), rng),
    )


def _take(table: Dataset, start: int, stop: int) -> Dataset:
    return table.select(list(range(start, stop)))  # datasets refuses an empty range past the end


def _draw(seen: Dataset, wanted: int, rng: np.random.Generator) -> Dataset:
    """Draw ``wanted`` random rows; none is repeated before all were drawn."""
    if wanted and not len(seen):
        raise DataError("data.stream and data.train are both empty: there is nothing to train on")
    rows: list[int] = []
    while len(rows) < wanted:
        rows += rng.permutation(len(seen))[: wanted - len(rows)].tolist()
    return seen.select(rows)

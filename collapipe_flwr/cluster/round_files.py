"""What a cluster keeps from one round to the next, in files that outlive the process.

One file per round under one folder per run and cluster, made for its owner only. A file is moved to
its place once it is on disk, and those that it replaces are deleted after that; its name ends with
the SHA-256 of its bytes, so that a damaged one is not taken for another.

A run that is resumed trains the rounds behind its checkpoint again, so not only the newest file is
kept: also the newest one that each of the server's two last checkpoints goes on from.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from hashlib import file_digest, sha256
from pathlib import Path
from typing import TypeVar

from collapipe_flwr.core.durable import clean, draft, make_folder, publish
from collapipe_flwr.core.errors import CollaPipeError, ConfigError

_log = logging.getLogger("flwr.collapipe")
_NAME = re.compile(r"round-(\d{6,})-([0-9a-f]{64})")
Kept = TypeVar("Kept")


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundFiles:
    """The files with one ``suffix`` of one cluster in one run.

    The server writes a checkpoint ``every`` rounds; with 0 there are none to go on from.
    """

    folder: Path
    suffix: str
    every: int

    @staticmethod
    def of(state_dir: Path, run_id: str, place: int, suffix: str, every: int) -> RoundFiles:
        """Those of cluster number ``place``; ``run_id`` may be any text."""
        run = sha256(run_id.encode()).hexdigest()[:32]
        return RoundFiles(folder=state_dir / run / f"cluster-{place}", suffix=suffix, every=every)

    def recall(self, server_round: int, load: Callable[[Path], Kept]) -> Kept | None:
        """What the cluster's last round up to this one left; None where it cannot be had.

        Files of later rounds, which the run is about to train anew, are dropped. A file that is
        damaged, or that ``load`` refuses with a CollaPipeError, is named in the log.
        """
        found = dict(self._found())
        for path in (path for path, done in found.items() if done > server_round):
            path.unlink()
        before = [path for path, done in found.items() if done <= server_round]
        return _read(max(before, key=found.__getitem__), load) if before else None

    def remember(self, server_round: int, save: Callable[[Path], None]) -> None:
        """Keep what this round leaves; raises ConfigError when it cannot be written."""
        try:
            for folder in (self.folder.parents[1], self.folder.parent, self.folder):
                make_folder(folder, 0o700)
            clean(self.folder)
            kept = self._write(server_round, save)
            for path, done in self._found():
                stale = done == server_round and path != kept
                if stale or done not in self._wanted(server_round):
                    path.unlink()
        except OSError as error:
            raise ConfigError(f'state-dir: "{self.folder}" cannot be written: {error}') from error

    def _write(self, server_round: int, save: Callable[[Path], None]) -> Path:
        with draft(self.folder / f"round-{server_round:06d}{self.suffix}") as written:
            save(written)
            written.chmod(0o600)
            with written.open("rb") as file:
                digest = file_digest(file, "sha256").hexdigest()
            path = self.folder / f"round-{server_round:06d}-{digest}{self.suffix}"
            publish(written, path)
        return path

    def _wanted(self, server_round: int) -> set[int]:
        """The newest round, and the newest one at each checkpoint that may be resumed."""
        newest = (server_round - 1) // self.every * self.every if self.every else 0
        rounds = [done for _, done in self._found()]
        starts = (server_round, newest, newest - self.every)
        return {_newest(done for done in rounds if done <= start) for start in starts}

    def _found(self) -> Iterator[tuple[Path, int]]:
        paths = sorted(self.folder.iterdir()) if self.folder.is_dir() else ()
        for path in paths:
            named = _NAME.fullmatch(path.stem)
            if named and path.suffix == self.suffix:
                yield path, int(named[1])


def _newest(rounds: Iterable[int]) -> int:
    return max(rounds, default=0)


def _read(path: Path, load: Callable[[Path], Kept]) -> Kept | None:
    named = _NAME.fullmatch(path.stem)
    assert named is not None
    try:
        with path.open("rb") as file:
            if file_digest(file, "sha256").hexdigest() != named[2]:
                raise ConfigError("its bytes are not those that were written")
        return load(path)
    except (OSError, CollaPipeError) as error:
        _log.error("%s cannot be read: %s", path, error)
        return None

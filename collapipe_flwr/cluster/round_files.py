"""State of a cluster between rounds, in files that survive the process.

One file per round under one folder per run and cluster, made for its owner only. A file is moved to
its place once it is on disk, and those that it replaces are deleted after that; its name ends with
the SHA-256 of its bytes, so that a damaged one is not taken for another.

A file counts once the server has accepted its round: until then the cluster may be told to
continue from an earlier one. A resumed run trains the rounds behind its checkpoint again, so the
files that the server's checkpoints need are kept, too.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Iterator
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
    """The files with one ``suffix`` of one cluster in one run."""

    folder: Path
    suffix: str

    @staticmethod
    def of(state_dir: Path, run_id: str, place: int, suffix: str) -> RoundFiles:
        """Those of cluster number ``place``; ``run_id`` may be any text."""
        run = sha256(run_id.encode()).hexdigest()[:32]
        return RoundFiles(folder=state_dir / run / f"cluster-{place}", suffix=suffix)

    def recall(self, accepted: int, load: Callable[[Path], Kept]) -> Kept | None:
        """What the last accepted round left; None where it cannot be had.

        Files of later rounds, which the global model does not contain, are dropped. A file that is
        damaged, or that ``load`` refuses with a CollaPipeError, is named in the log.
        """
        found = [(path, done) for path, done in self._found() if done >= accepted]
        for path in (path for path, done in found if done > accepted):
            path.unlink()
        kept = [path for path, done in found if done == accepted]
        return _read(kept[0], load) if kept else None

    def remember(
        self, server_round: int, needed: Collection[int], save: Callable[[Path], None]
    ) -> None:
        """Keep what this round leaves, and of earlier rounds only what is still ``needed``.

        A round that ends after a later one has begun anew from the same files leaves nothing: the
        server has given it up. Raises ConfigError when the file cannot be written.
        """
        try:
            if any(done > server_round for _, done in self._found()):
                return
            for folder in (self.folder.parents[1], self.folder.parent, self.folder):
                make_folder(folder, 0o700)
            clean(self.folder)
            kept = self._write(server_round, save)
            for path, done in self._found():
                if path != kept and done not in needed:
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

    def _found(self) -> Iterator[tuple[Path, int]]:
        paths = sorted(self.folder.iterdir()) if self.folder.is_dir() else ()
        for path in paths:
            named = _NAME.fullmatch(path.stem)
            if named and path.suffix == self.suffix:
                yield path, int(named[1])


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

"""Tensors that outlive a session.

`TensorStore` keeps the last segment in memory, and `WeightCache` frozen weights on disk: a board
without the checkpoint gets the frozen weights of its segment from its control unit once, for all
rounds, segments and processes. Each file holds one tensor and is named by its digest, which is
checked when the file is read, so nothing has to wait until it is on disk.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from collapipe_flwr.core.durable import draft, make_own_folder
from collapipe_flwr.host.ledger import Account, Ledger, NoRoom
from collapipe_flwr.pipeline.meter import count_bytes
from collapipe_flwr.pipeline.state import compute_digest

_log = logging.getLogger(__name__)
_SUFFIX, _NAME = ".safetensors", "tensor"
_STORED = "last session"
_DIGEST = re.compile("[0-9a-f]{32}")  # as `compute_digest` writes it, and in the name of each file


def _list_own_files(folder: Path) -> list[Path]:
    """List the files with names like ours; the user may keep others in the folder."""
    return sorted(p for p in folder.glob(f"*{_SUFFIX}") if _DIGEST.fullmatch(p.stem))


class TensorStore:
    """Keeps one closed session's tensors for the next session, if `ledger` has room for them.

    Digests are computed when the next session asks, not while the last one closes.
    """

    def __init__(self, ledger: Ledger | None = None) -> None:
        self._account = Account(ledger or Ledger())
        self._tensors: tuple[Tensor, ...] = ()
        self._lock = threading.Lock()

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """Keep these tensors instead of the last session's."""
        kept = tuple(tensor.detach() for tensor in tensors)
        with self._lock:
            self._tensors = ()
            try:
                self._account.reserve({_STORED: count_bytes(kept)})
            except NoRoom:
                self._account.reserve({_STORED: 0})
            else:
                self._tensors = kept

    def take(self, digests: Collection[str]) -> dict[str, Tensor]:
        """Hand over the tensors with these digests and forget the others."""
        with self._lock:
            tensors, self._tensors = self._tensors, ()
            self._account.reserve({_STORED: 0})
        held = {compute_digest(tensor): tensor for tensor in tensors}
        return {digest: held[digest] for digest in digests if digest in held}

    @property
    def held_bytes(self) -> int:
        """The size of what is kept now."""
        return self._account.find_size(_STORED)


class WeightCache:
    """A folder with up to ``most_bytes`` of tensors; the least recently used ones make room.

    Raises ConfigError when the folder cannot be made.
    """

    def __init__(self, folder: Path, most_bytes: int) -> None:
        self._folder = make_own_folder(folder, "--cache-dir")
        self._most_bytes = most_bytes
        self._lock = threading.Lock()

    def find(self, digests: Mapping[str, str]) -> dict[str, Tensor]:
        """Find tensors by digest, each under the key that it is wanted for."""
        asked = {k: d for k, d in digests.items() if _DIGEST.fullmatch(d)}  # a peer wrote them
        found = {key: self._read(digest) for key, digest in asked.items()}
        return {key: tensor for key, tensor in found.items() if tensor is not None}

    def keep(self, tensors: Mapping[str, Tensor]) -> None:
        """Write the missing tensors; a full disk is a warning, not a failure."""
        with self._lock:
            try:
                with draft(self._folder / _NAME) as written:
                    for tensor in tensors.values():
                        self._write(tensor, written)
                self._make_room()
            except OSError as error:
                _log.warning("frozen weights cannot be kept in %s: %s", self._folder, error)

    def _read(self, digest: str) -> Tensor | None:
        path = self._path(digest)
        if not path.is_file():
            return None
        try:
            tensor: Tensor | None = load_file(path).get(_NAME)
            os.utime(path)
        except (OSError, SafetensorError) as error:
            _log.warning("%s cannot be read: %s", path, error)
            tensor = None
        if tensor is None or compute_digest(tensor) != digest:
            _log.warning("%s does not hold what its name says: it is removed", path)
            path.unlink(missing_ok=True)
            return None
        return tensor

    def _write(self, tensor: Tensor, written: Path) -> None:
        path = self._path(compute_digest(tensor))
        if not path.is_file():
            save_file({_NAME: tensor.detach().contiguous()}, written)
            written.replace(path)

    def _make_room(self) -> None:
        files = [(path, path.stat()) for path in _list_own_files(self._folder)]
        left = sum(stat.st_size for _, stat in files)
        for path, stat in sorted(files, key=lambda file: file[1].st_mtime):
            if left <= self._most_bytes:
                return
            path.unlink(missing_ok=True)
            left -= stat.st_size

    def _path(self, digest: str) -> Path:
        return self._folder / f"{digest}{_SUFFIX}"

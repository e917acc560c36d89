"""Tensors that wait in a file, and mappings that read them when they are asked for.

A control unit passes on all blocks of a model that may not fit its memory twice, and needs those
that a round began with again where a device is lost. So they lie in a file without a name: its
space is free when nobody can read it any more, also after a kill. What is written and read anew
each time takes no memory of the process; the kernel's cache gives way to whoever needs it.
"""

from __future__ import annotations

import logging
import math
import os
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from collapipe_flwr.core.errors import RunError

log = logging.getLogger("flwr.collapipe")
T = TypeVar("T")
STOWED_BYTES = 2**18  # smaller tensors stay in memory: all of a small model's
_DISK = Path("/var/tmp")  # /tmp is memory in many systems
_VARIABLES = ("TMPDIR", "TEMP", "TMP")


class Lookup(Mapping[str, T], Generic[T]):
    """Values that are made, or read, each time that they are asked for."""

    def __init__(self, readers: Mapping[str, Callable[[], T]]) -> None:
        self._readers = dict(readers)

    @staticmethod
    def of(*mappings: Mapping[str, T]) -> Lookup[T]:
        """What these hold, the last one going first; of others than lookups, the values now."""
        readers: dict[str, Callable[[], T]] = {}
        for found in mappings:
            if isinstance(found, Lookup):
                readers |= found._readers
            else:
                readers |= {key: partial(_same, value) for key, value in found.items()}
        return Lookup(readers)

    def only(self, keys: Iterable[str]) -> Lookup[T]:
        """These of them; raises KeyError."""
        return Lookup({key: self._readers[key] for key in keys})

    def pop(self, key: str) -> T:
        """A value, which is not here any more afterwards."""
        return self._readers.pop(key)()

    def __getitem__(self, key: str) -> T:
        return self._readers[key]()

    def __contains__(self, key: object) -> bool:
        return key in self._readers

    def __iter__(self) -> Iterator[str]:
        return iter(self._readers)

    def __len__(self) -> int:
        return len(self._readers)


class Stow:
    """A file of tensors. What does not go in, on a full disk, say, stays in memory.

    Reading, and writing by one thread at a time, may go on side by side.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder or scratch_folder()
        self._file: int | None = None
        self._end = 0
        self._fails = False

    def put(self, tensor: Tensor) -> Callable[[], Tensor]:
        """How to read a copy of ``tensor``, which may change afterwards only if it is large."""
        if tensor.nbytes < STOWED_BYTES or tensor.device.type != "cpu":
            return partial(_same, tensor)
        data = _bytes_of(tensor.detach().contiguous())
        return self.put_bytes(data, tensor.dtype, tensor.shape) or partial(_same, tensor)

    def put_bytes(
        self, data: memoryview, dtype: torch.dtype, shape: Iterable[int]
    ) -> Callable[[], Tensor] | None:
        """How to read a tensor of these bytes; None where they do not go in."""
        start = self._end
        if self._fails or not self._written(data):
            return None
        return partial(self._read, start, dtype, tuple(shape))

    def _written(self, data: memoryview) -> bool:
        """Whether the bytes stand at the end of the file."""
        try:
            if self._file is None:
                self._file = _nameless(self._folder)
                weakref.finalize(self, os.close, self._file)
            done = 0
            while done < len(data):
                done += os.pwrite(self._file, data[done:], self._end + done)
        except OSError as error:
            self._fails = True
            log.warning(
                "weights stay in memory: they cannot be written to %s (%s); TMPDIR may name "
                "another folder",
                self._folder,
                error.strerror,
            )
            return False
        self._end += done
        return True

    def _read(self, start: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """A copy of its own; raises RunError where the disk does not give it back."""
        assert self._file is not None
        tensor = passing_tensor(shape, dtype)
        data = _bytes_of(tensor)
        done = 0
        try:
            while done < len(data):
                count = os.preadv(self._file, [data[done:]], start + done)
                if not count:
                    raise OSError(0, "it is shorter than it was")
                done += count
        except OSError as error:
            raise RunError(
                f"weights that wait in a file in {self._folder} cannot be read: {error.strerror}"
            ) from error
        return tensor


def stowed(tensors: Mapping[str, Tensor]) -> Lookup[Tensor]:
    """The same, from a file of their own."""
    stow = Stow()
    return Lookup({key: stow.put(tensor) for key, tensor in tensors.items()})


def passing_tensor(shape: Iterable[int], dtype: torch.dtype) -> Tensor:
    """A tensor for what passes through; a large one in memory as numpy asks for it.

    torch asks for aligned memory, for which glibc wants room beyond the tensor's size: what a
    tensor of the same size left behind never fits, and the heap grows by all that passes.
    """
    shape = tuple(shape)
    size_bytes = math.prod(shape) * dtype.itemsize
    if size_bytes < STOWED_BYTES:
        return torch.empty(shape, dtype=dtype)
    raw = np.empty(size_bytes, dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype).reshape(shape)


def scratch_folder() -> Path:
    """Where large files for a while go: TMPDIR, else one that is on a disk."""
    named = any(os.environ.get(name) for name in _VARIABLES)
    fits = not named and os.access(_DISK, os.W_OK)
    return _DISK if fits else Path(tempfile.gettempdir())


def _nameless(folder: Path) -> int:
    """A file that ends with its last descriptor."""
    descriptor, name = tempfile.mkstemp(prefix="collapipe-", dir=folder)
    os.unlink(name)
    return descriptor


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _same(value: T) -> T:
    return value

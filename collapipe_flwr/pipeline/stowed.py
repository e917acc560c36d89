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


class OpenFile:
    """Tensors in a file that is closed when nobody can read them any more; ``name`` is for errors.

    Threads may read side by side.
    """

    def __init__(self, descriptor: int, name: str) -> None:
        self.descriptor = descriptor
        self._name = name
        weakref.finalize(self, os.close, descriptor)

    def read(self, start: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """The tensor that begins there; raises RunError where the disk does not give it back."""
        tensor = passing_tensor(shape, dtype)
        data, done = raw_bytes(tensor), 0
        try:
            while done < len(data):
                count = os.preadv(self.descriptor, [data[done:]], start + done)
                if not count:
                    raise OSError(0, "it is shorter than it was")
                done += count
        except OSError as error:
            raise RunError(f"weights in {self._name} cannot be read: {error.strerror}") from error
        return tensor


class Stow:
    """Takes tensors into a file. What does not go in, on a full disk, say, stays in memory."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder or scratch_folder()
        self._file: OpenFile | None = None
        self._end = 0
        self._fails = False

    def put(self, tensor: Tensor) -> Callable[[], Tensor]:
        """How to read ``tensor`` on the CPU, as it is now."""
        here = tensor.detach().to("cpu")
        large = here.nbytes >= STOWED_BYTES
        if large and (read := self.put_bytes(raw_bytes(here), here.dtype, here.shape)):
            return read
        return partial(_same, here.clone() if tensor.device.type == "cpu" else here)

    def put_bytes(
        self, data: memoryview, dtype: torch.dtype, shape: Iterable[int]
    ) -> Callable[[], Tensor] | None:
        """How to read a tensor of these bytes; None where they do not go in."""
        start = self._end
        try:
            if self._fails:
                return None
            if self._file is None:
                self._file = _nameless(self._folder)
            self._end += write_all(self._file.descriptor, data, start)
        except OSError as error:
            self._fails = True
            log.warning(
                "weights stay in memory: they cannot be written to %s (%s); TMPDIR may name "
                "another folder",
                self._folder,
                error.strerror,
            )
            return None
        return partial(self._file.read, start, dtype, tuple(shape))


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


def write_all(descriptor: int, data: memoryview, start: int) -> int:
    """Write the bytes at ``start`` of a file; how many they are. Raises OSError."""
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:], start + done)
    return done


def raw_bytes(tensor: Tensor) -> memoryview:
    """Those of a tensor; not copied where it is contiguous and on the CPU."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def _nameless(folder: Path) -> OpenFile:
    descriptor, name = tempfile.mkstemp(prefix="collapipe-", dir=folder)
    os.unlink(name)
    return OpenFile(descriptor, f"a file in {folder}")


def _same(value: T) -> T:
    return value

"""Tensors offloaded to disk, and mappings that read them on each access.

A control unit passes on all blocks of a model that may not fit its memory twice, and needs the
first weights of a round again when a device is lost. So they are written to a file without a name,
whose space is free once no process has it open, also after a kill. Tensors that are written and
read anew each time take no memory of the process, only of the kernel's cache.

Files that remain are in the format of safetensors, written and read tensor by tensor, while the
library would hold all of them:

    header's length (uint64, little endian) | JSON: dtype, shape and place of each tensor | tensors
"""

from __future__ import annotations

import json
import logging
import math
import os
import struct
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from collapipe_flwr.core.errors import RunError

log = logging.getLogger("flwr.collapipe")
T = TypeVar("T")
OFFLOAD_BYTES = 2**18  # smaller tensors stay in memory: all of a small model's
_DISK = Path("/var/tmp")  # /tmp is memory in many systems
_VARIABLES = ("TMPDIR", "TEMP", "TMP")
_LENGTH = struct.Struct("<Q")
_ALIGN = 8
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class LazyMapping(Mapping[str, T], Generic[T]):
    """A mapping whose values are made, or read, on each access."""

    def __init__(self, readers: Mapping[str, Callable[[], T]]) -> None:
        self._readers = dict(readers)

    @staticmethod
    def join(*mappings: Mapping[str, T]) -> LazyMapping[T]:
        """Join mappings, of which later ones take precedence; plain ones are read now."""
        readers: dict[str, Callable[[], T]] = {}
        for found in mappings:
            if isinstance(found, LazyMapping):
                readers |= found._readers
            else:
                readers |= {key: partial(_return_value, value) for key, value in found.items()}
        return LazyMapping(readers)

    def select(self, keys: Iterable[str]) -> LazyMapping[T]:
        """Return the mapping of these keys alone; raises KeyError."""
        return LazyMapping({key: self._readers[key] for key in keys})

    def rename(self, name_of: Callable[[str], str]) -> LazyMapping[T]:
        """Return the mapping of the same values under other keys."""
        return LazyMapping({name_of(key): read for key, read in self._readers.items()})

    def pop(self, key: str) -> T:
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
    """A file of tensors, closed with the last reference to it; ``name`` is for errors.

    Several threads may read at once.
    """

    def __init__(self, descriptor: int, name: str) -> None:
        self.descriptor = descriptor
        self._name = name
        weakref.finalize(self, os.close, descriptor)

    def read(self, start: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """Read the tensor that begins at ``start``; raises RunError when the disk fails."""
        tensor = allocate_tensor(shape, dtype)
        data, done = view_bytes(tensor), 0
        try:
            while done < len(data):
                count = os.preadv(self.descriptor, [data[done:]], start + done)
                if not count:
                    raise OSError(0, "it is shorter than it was")
                done += count
        except OSError as error:
            raise RunError(f"weights in {self._name} cannot be read: {error.strerror}") from error
        return tensor


class Offload:
    """Writes tensors to a file without a name. Where that fails, as on a full disk, they stay in
    memory.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder or find_scratch_folder()
        self._file: OpenFile | None = None
        self._end = 0
        self._fails = False

    def put(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Return a reader of ``tensor`` as it is now, on the CPU."""
        here = tensor.detach().to("cpu")
        large = here.nbytes >= OFFLOAD_BYTES
        if large and (read := self.put_bytes(view_bytes(here), here.dtype, here.shape)):
            return read
        return partial(_return_value, here.clone() if tensor.device.type == "cpu" else here)

    def put_bytes(
        self, data: memoryview, dtype: torch.dtype, shape: Iterable[int]
    ) -> Callable[[], Tensor] | None:
        """Write bytes; returns a reader of their tensor, or None where they cannot be written."""
        start = self._end
        try:
            if self._fails:
                return None
            if self._file is None:
                descriptor, name = tempfile.mkstemp(prefix="collapipe-", dir=self._folder)
                os.unlink(name)
                self._file = OpenFile(descriptor, f"a file in {self._folder}")
            self._end += _write_all(self._file.descriptor, data, start)
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


def offload(tensors: Mapping[str, Tensor]) -> LazyMapping[Tensor]:
    """Write tensors to a file of their own; the mapping reads them from there."""
    file = Offload()
    return LazyMapping({key: file.put(tensor) for key, tensor in tensors.items()})


def allocate_tensor(shape: Iterable[int], dtype: torch.dtype) -> Tensor:
    """Make an uninitialized tensor for short use; a large one in memory allocated by numpy.

    torch asks for aligned memory, for which glibc wants room beyond the tensor's size: the gap that
    a freed tensor of the same size left never fits, and the heap grows with every tensor.
    """
    shape = tuple(shape)
    size_bytes = math.prod(shape) * dtype.itemsize
    if size_bytes < OFFLOAD_BYTES:
        return torch.empty(shape, dtype=dtype)
    raw = np.empty(size_bytes, dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype).reshape(shape)


def find_scratch_folder() -> Path:
    """Return the folder of large temporary files: TMPDIR, else one that is on a disk."""
    named = any(os.environ.get(name) for name in _VARIABLES)
    fits = not named and os.access(_DISK, os.W_OK)
    return _DISK if fits else Path(tempfile.gettempdir())


def _write_all(descriptor: int, data: memoryview, start: int) -> int:
    """Write the bytes at ``start`` of a file and return their number. Raises OSError."""
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:], start + done)
    return done


def view_bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor; not copied where it is contiguous and on the CPU."""
    here = tensor.detach()
    if not (here.is_cpu and here.is_contiguous()):  # each call lets other threads go ahead
        here = here.to("cpu").contiguous()
    return here.view(-1).view(torch.uint8).numpy().data


def write_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write a file of safetensors; each tensor is read twice, one at a time. Raises OSError."""
    kinds = {key: (tensor.dtype, tuple(tensor.shape)) for key, tensor in tensors.items()}
    sizes = {key: tensor.nbytes for key, tensor in tensors.items()}
    keys = sorted(kinds, key=lambda key: -kinds[key][0].itemsize)  # so that all are aligned
    described, end = {}, 0
    for key in keys:
        dtype, shape = kinds[key]
        places = [end, end := end + sizes[key]]
        described[key] = {"dtype": _NAMES[dtype], "shape": shape, "data_offsets": places}
    head = json.dumps(described).encode()
    head += b" " * (-(_LENGTH.size + len(head)) % _ALIGN)
    with path.open("wb", buffering=0) as file:
        start = _write_all(file.fileno(), memoryview(_LENGTH.pack(len(head)) + head), 0)
        for key in keys:
            start += _write_all(file.fileno(), view_bytes(tensors[key]), start)


def read_tensors(path: Path) -> LazyMapping[Tensor]:
    """Map all tensors of a file of safetensors, readable also after the file is deleted.

    Raises SafetensorError for any other file, OSError where it cannot be opened.
    """
    with safe_open(path, framework="pt"):  # checks all of the header
        pass
    file = OpenFile(os.open(path, os.O_RDONLY), str(path))
    with path.open("rb") as stream:
        (length,) = _LENGTH.unpack(stream.read(_LENGTH.size))
        described = json.loads(stream.read(length))
    described.pop("__metadata__", None)
    begin = _LENGTH.size + length
    readers = {}
    for key, entry in described.items():
        start = begin + entry["data_offsets"][0]
        readers[key] = partial(file.read, start, _DTYPES[entry["dtype"]], tuple(entry["shape"]))
    return LazyMapping(readers)


def _return_value(value: T) -> T:
    return value

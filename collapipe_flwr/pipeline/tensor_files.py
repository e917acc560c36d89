"""Files in the format of safetensors, tensor by tensor: the library would hold all of them.

header's length (uint64, little endian) | JSON: dtype, shape and place of each tensor | tensors
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from collapipe_flwr.pipeline.stowed import Lookup, OpenFile, raw_bytes, write_all

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


def write_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write a file, reading every tensor when it is its turn (twice); raises OSError."""
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
        start = write_all(file.fileno(), memoryview(_LENGTH.pack(len(head)) + head), 0)
        for key in keys:
            start += write_all(file.fileno(), raw_bytes(tensors[key]), start)


def read_tensors(path: Path) -> Lookup[Tensor]:
    """All tensors of a file, which stays readable when its name is gone.

    Raises SafetensorError for what is no such file, OSError where it cannot be opened.
    """
    with safe_open(path, framework="pt"):  # checks all of the header
        pass
    file = OpenFile(os.open(path, os.O_RDONLY), str(path))
    with path.open("rb") as stream:
        (length,) = _LENGTH.unpack(stream.read(_LENGTH.size))
        described = json.loads(stream.read(length))
    described.pop("__metadata__", None)
    begin = _LENGTH.size + length
    return Lookup(
        {
            key: partial(
                file.read,
                begin + told["data_offsets"][0],
                _DTYPES[told["dtype"]],
                tuple(told["shape"]),
            )
            for key, told in described.items()
        }
    )

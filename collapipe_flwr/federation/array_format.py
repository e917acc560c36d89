"""The layout of an array's bytes, by its head and its metadata, before any value is decoded.

Flower's arrays are files of `numpy.save`, which numpy itself reads with trust: a head of a few
bytes makes it allocate what the head claims, evaluate Python literals, unpack archives. Here the
head must be that of a plain array, agree with the metadata beside it, and be followed by as many
bytes as it says, no more and no less. So nothing is allocated that was not sent.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from flwr.app import Array
from flwr.common.constant import SType

from collapipe_flwr.core.errors import ProtocolError
from collapipe_flwr.core.texts import SHORT, to_one_line

RAW_TORCH = "collapipe.torch"  # Array.stype of dtypes that numpy lacks
RAW_DTYPES: Mapping[str, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
}
_MAGIC = b"\x93NUMPY"
_LENGTHS = {1: 2, 2: 4, 3: 4}  # bytes of the head's length, by the version of the format
_MOST_HEAD_BYTES = 4096
_MOST_DIMENSIONS = 32
_MOST_ELEMENTS = 2**58  # also of the dimensions that are not 0: numpy multiplies them
_KINDS = "biufc"  # of dtypes: booleans and numbers, nothing that points elsewhere


class ArrayLayout(NamedTuple):
    """How values stand in an array's bytes: from ``begin`` on, the first index fastest or last."""

    dtype: np.dtype[np.generic]
    shape: tuple[int, ...]
    begin: int
    reordered: bool

    @property
    def value_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def layout_of(key: str, array: Array) -> ArrayLayout | None:
    """Return the layout of a numpy array; None for a dtype that numpy lacks.

    Raises ProtocolError for bytes that are not what head and metadata say.
    """
    try:
        if array.stype == RAW_TORCH:
            _check_raw(array)
            return None
        return _parse_numpy(array)
    except ValueError as error:
        shape = to_one_line(str(tuple(array.shape)), SHORT)
        raise ProtocolError(
            f"array {to_one_line(key, SHORT)} ({to_one_line(array.dtype, SHORT)}, shape {shape}, "
            f"{to_one_line(array.stype, SHORT)}, {len(array.data)} bytes) cannot be read: {error}"
        ) from error


def _check_raw(array: Array) -> None:
    if array.dtype not in RAW_DTYPES:
        raise ValueError("its dtype is unknown")
    _check_shape(tuple(array.shape))
    needed = math.prod(array.shape) * RAW_DTYPES[array.dtype].itemsize
    if len(array.data) != needed:
        raise ValueError(f"its shape needs {needed} bytes")


def _parse_numpy(array: Array) -> ArrayLayout:
    if array.stype != SType.NUMPY:
        raise ValueError("its serialisation is unknown")
    layout = _parse_head(_read_head(array.data))
    if (str(layout.dtype), layout.shape) != (array.dtype, tuple(array.shape)):
        raise ValueError(f"its data is of {layout.dtype} and shape {layout.shape}")
    if len(array.data) != (needed := layout.begin + layout.value_bytes):
        raise ValueError(f"its shape needs {needed} bytes")
    if layout.dtype.kind == "b" and not _are_booleans(array.data[layout.begin :]):
        raise ValueError("its data is no array of booleans")
    return layout


def _read_head(data: bytes) -> bytes:
    """Return the bytes before the values; raises ValueError without a proper head."""
    length = _LENGTHS.get(data[len(_MAGIC)]) if len(data) > len(_MAGIC) + 1 else None
    if length is None or not data.startswith(_MAGIC):
        raise ValueError("its data is no array")
    lead = len(_MAGIC) + 2 + length
    stop = lead + int.from_bytes(data[lead - length : lead], "little")
    if not lead < stop <= min(len(data), _MOST_HEAD_BYTES):
        raise ValueError("its data is no array: the head is cut off, or too long")
    return data[:stop]


@lru_cache(maxsize=1024)  # every round has the same ones
def _parse_head(head: bytes) -> ArrayLayout:
    lead = len(_MAGIC) + 2 + _LENGTHS[head[len(_MAGIC)]]
    try:
        said = ast.literal_eval(head[lead:].decode())
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError) as error:
        raise ValueError("its data is no array: the head cannot be read") from error
    if not isinstance(said, dict) or said.keys() != {"descr", "fortran_order", "shape"}:
        raise ValueError("its data is no array: the head has other keys")
    descr, reordered, shape = said["descr"], said["fortran_order"], said["shape"]
    if type(descr) is not str or type(reordered) is not bool or type(shape) is not tuple:
        raise ValueError("its data is no plain array of numbers")
    _check_shape(shape)
    return ArrayLayout(_parse_dtype(descr), shape, len(head), reordered)


def _parse_dtype(descr: str) -> np.dtype[np.generic]:
    """Return the dtype that `numpy.save` describes so, in this machine's byte order."""
    try:
        dtype = np.dtype(descr)
    except (TypeError, ValueError, SyntaxError) as error:
        raise ValueError("its dtype is unknown") from error
    if dtype.str != descr or dtype.kind not in _KINDS or not dtype.isnative:
        raise ValueError("its dtype is none of this machine's numbers")
    return dtype


def _check_shape(shape: tuple[object, ...]) -> None:
    sizes = [size for size in shape if type(size) is int and 0 <= size < _MOST_ELEMENTS]
    if len(sizes) < len(shape) or len(sizes) > _MOST_DIMENSIONS:
        raise ValueError("its shape is malformed")
    if math.prod(filter(None, sizes)) >= _MOST_ELEMENTS:
        raise ValueError("its shape is beyond every limit")


def _are_booleans(data: bytes) -> bool:
    return not data.translate(None, b"\0\1")

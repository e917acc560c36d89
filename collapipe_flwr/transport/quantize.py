"""How floating-point tensors are written on the wire: exact, halved, or 8 bits in blocks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

_BLOCK = 128  # elements that share one scale
_HALF_TOP = 15  # scaled numbers stay below 2 to the power of this, well within half precision
_LEAST_UNIT = -126  # its power of two is the smallest normal number of single precision
_SMALLEST = 1e-38  # blocks below are sent as zeros: the inverse of their scale would overflow


class WireCodec(Protocol):
    """A way to write the elements of a tensor."""

    def pack(self, tensor: Tensor) -> memoryview:
        """The bytes of a tensor of any shape."""
        ...

    def unpack(self, raw: bytearray, dtype: torch.dtype) -> Tensor:
        """The flat tensor of `dtype` behind the bytes; may share their memory."""
        ...

    def wire_bytes(self, elements: int, dtype: torch.dtype) -> int:
        """How many bytes `pack` makes of so many elements of `dtype`."""
        ...


class Exact:
    """The bytes as they are in memory, for every dtype."""

    def pack(self, tensor: Tensor) -> memoryview:
        """See `WireCodec.pack`."""
        return _bytes_of(tensor)

    def unpack(self, raw: bytearray, dtype: torch.dtype) -> Tensor:
        """See `WireCodec.unpack`."""
        return _flat(raw, dtype)

    def wire_bytes(self, elements: int, dtype: torch.dtype) -> int:
        """See `WireCodec.wire_bytes`."""
        return elements * dtype.itemsize


@dataclass(frozen=True, slots=True)
class Cast:
    """Rounded to a shorter type of the same range."""

    wire: torch.dtype

    def pack(self, tensor: Tensor) -> memoryview:
        """See `WireCodec.pack`."""
        return _bytes_of(tensor.to(self.wire))

    def unpack(self, raw: bytearray, dtype: torch.dtype) -> Tensor:
        """See `WireCodec.unpack`."""
        return _flat(raw, self.wire).to(dtype)

    def wire_bytes(self, elements: int, dtype: torch.dtype) -> int:
        """See `WireCodec.wire_bytes`."""
        _ = dtype
        return elements * self.wire.itemsize


class ScaledHalf:
    """Half precision, scaled per tensor by the power of two that brings its largest number on top.

    Half precision alone ends at 65504 and loses what is below 6e-8, and gradients of a mean over
    many labels are that small. Scaled, a number keeps its 11 bits down to 2^-28 of the largest one
    and vanishes below 2^-39 of it, wherever that lies. A tensor with an infinity or NaN is written
    as it is, so that an overflow stays visible.
    """

    def pack(self, tensor: Tensor) -> memoryview:
        """See `WireCodec.pack`."""
        flat = tensor.reshape(-1).to(torch.float32)
        if not flat.numel():
            return memoryview(b"")
        low, high = torch.aminmax(flat)
        unit = torch.tensor([_unit_of(float(torch.maximum(high, -low)))])
        return memoryview(b"".join((_bytes_of(unit), _bytes_of((flat / unit).to(torch.float16)))))

    def unpack(self, raw: bytearray, dtype: torch.dtype) -> Tensor:
        """See `WireCodec.unpack`."""
        unit, halves = _flat(raw[:4], torch.float32), _flat(raw[4:], torch.float16)
        return (halves.to(torch.float32) * unit).to(dtype)

    def wire_bytes(self, elements: int, dtype: torch.dtype) -> int:
        """See `WireCodec.wire_bytes`."""
        _ = dtype
        return 2 * elements + 4 if elements else 0


class Int8Blocks:
    """127 steps each way, scaled per block of 128 elements by its largest magnitude.

    The error of an element is at most 1/254 of the largest magnitude in its block. A block with
    an infinity or NaN arrives as NaN, so that an overflow stays visible.
    """

    def pack(self, tensor: Tensor) -> memoryview:
        """See `WireCodec.pack`."""
        flat = tensor.reshape(-1).to(torch.float32)
        blocks = _blocks(flat)
        largest = torch.maximum(blocks.amax(1, keepdim=True), -blocks.amin(1, keepdim=True))
        scale = largest / 127
        inverse = torch.where(scale > _SMALLEST, 1 / scale, 0.0)  # NaN and infinity give NaN or 0
        steps = (blocks * inverse).round_().to(torch.int8).reshape(-1)[: flat.numel()]
        return memoryview(b"".join((_bytes_of(scale), _bytes_of(steps))))

    def unpack(self, raw: bytearray, dtype: torch.dtype) -> Tensor:
        """See `WireCodec.unpack`."""
        blocks = -(-len(raw) // (_BLOCK + 4))
        scale, steps = _flat(raw[: 4 * blocks], torch.float32), _flat(raw[4 * blocks :], torch.int8)
        scale = torch.where(scale.isfinite(), scale, torch.nan)
        values = _blocks(steps) * scale.view(-1, 1)
        return values.reshape(-1)[: steps.numel()].to(dtype)

    def wire_bytes(self, elements: int, dtype: torch.dtype) -> int:
        """See `WireCodec.wire_bytes`."""
        _ = dtype
        return elements + 4 * -(-elements // _BLOCK)


WIRE_CODECS: Mapping[str, WireCodec] = {
    "fp32": Exact(),  # the tensor's own type, bit by bit
    "fp16": ScaledHalf(),
    "bf16": Cast(torch.bfloat16),
    "int8": Int8Blocks(),
}


def _unit_of(largest: float) -> float:
    """What 1 stands for in a tensor with this largest magnitude: a power of two."""
    if not math.isfinite(largest):
        return 1.0
    _, exponent = math.frexp(largest)
    return math.ldexp(1.0, max(exponent - _HALF_TOP, _LEAST_UNIT))


def _blocks(flat: Tensor) -> Tensor:
    """Rows of one block each; the last is filled up with zeros."""
    missing = -flat.numel() % _BLOCK
    full = torch.nn.functional.pad(flat, (0, missing)) if missing else flat
    return full.view(-1, _BLOCK)


def _bytes_of(tensor: Tensor) -> memoryview:
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def _flat(raw: bytearray, dtype: torch.dtype) -> Tensor:
    if dtype is torch.bool:  # a stranger's byte may be neither 0 nor 1
        return _flat(raw, torch.uint8) != 0
    return torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)

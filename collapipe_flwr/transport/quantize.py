"""How floating-point tensors are written on the wire: exact, halved, or 8 bits in blocks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from collapipe_flwr.pipeline.offload import raw_bytes

_BLOCK = 128  # elements that share one scale
_HALF_TOP = 15  # scaled numbers stay below 2 to the power of this, well within half precision
_LEAST_UNIT = -126  # its power of two is the smallest normal number of single precision
_SMALLEST = 1e-38  # blocks below are sent as zeros: the inverse of their scale would overflow


@dataclass(frozen=True, slots=True, kw_only=True)
class WireCodec:
    """A way to write the elements of a tensor.

    ``pack`` gives the bytes of a tensor of any shape, ``unpack`` the flat tensor of a dtype behind
    them, which may share their memory. ``wire_bytes`` is the number of bytes that ``pack`` makes of
    so many elements of a dtype.
    """

    pack: Callable[[Tensor], memoryview]
    unpack: Callable[[bytearray, torch.dtype], Tensor]
    wire_bytes: Callable[[int, torch.dtype], int]


def _pack_halves(tensor: Tensor) -> memoryview:
    """Half precision, scaled per tensor by the power of two that brings its largest number on top.

    Half precision alone ends at 65504 and loses what is below 6e-8, and gradients of a mean over
    many labels are that small. Scaled, a number keeps its 11 bits down to 2^-28 of the largest one
    and vanishes below 2^-39 of it, wherever that lies. A tensor with an infinity or NaN is written
    as it is, so that an overflow stays visible.
    """
    flat = tensor.reshape(-1).to(torch.float32)
    if not flat.numel():
        return memoryview(b"")
    low, high = torch.aminmax(flat)
    unit = torch.tensor([_unit_of(float(torch.maximum(high, -low)))])
    return memoryview(b"".join((raw_bytes(unit), raw_bytes((flat / unit).to(torch.float16)))))


def _unpack_halves(raw: bytearray, dtype: torch.dtype) -> Tensor:
    unit, halves = _flat(raw[:4], torch.float32), _flat(raw[4:], torch.float16)
    return (halves.to(torch.float32) * unit).to(dtype)


def _pack_int8(tensor: Tensor) -> memoryview:
    """127 steps each way, scaled per block of 128 elements by its largest magnitude.

    The error of an element is at most 1/254 of the largest magnitude in its block. A block with
    an infinity or NaN arrives as NaN, so that an overflow stays visible.
    """
    flat = tensor.reshape(-1).to(torch.float32)
    blocks = _blocks(flat)
    largest = torch.maximum(blocks.amax(1, keepdim=True), -blocks.amin(1, keepdim=True))
    scale = largest / 127
    inverse = torch.where(scale > _SMALLEST, 1 / scale, 0.0)  # NaN and infinity give NaN or 0
    steps = (blocks * inverse).round_().to(torch.int8).reshape(-1)[: flat.numel()]
    return memoryview(b"".join((raw_bytes(scale), raw_bytes(steps))))


def _unpack_int8(raw: bytearray, dtype: torch.dtype) -> Tensor:
    blocks = -(-len(raw) // (_BLOCK + 4))
    scale, steps = _flat(raw[: 4 * blocks], torch.float32), _flat(raw[4 * blocks :], torch.int8)
    scale = torch.where(scale.isfinite(), scale, torch.nan)
    values = _blocks(steps) * scale.view(-1, 1)
    return values.reshape(-1)[: steps.numel()].to(dtype)


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


def _flat(raw: bytearray, dtype: torch.dtype) -> Tensor:
    if dtype is torch.bool:  # a stranger's byte may be neither 0 nor 1
        return _flat(raw, torch.uint8) != 0
    return torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)


WIRE_CODECS: Mapping[str, WireCodec] = {
    "fp32": WireCodec(  # the tensor's own type, bit by bit
        pack=raw_bytes, unpack=_flat, wire_bytes=lambda count, dtype: count * dtype.itemsize
    ),
    "fp16": WireCodec(
        pack=_pack_halves,
        unpack=_unpack_halves,
        wire_bytes=lambda count, _: 2 * count + 4 if count else 0,
    ),
    "bf16": WireCodec(
        pack=lambda tensor: raw_bytes(tensor.to(torch.bfloat16)),
        unpack=lambda raw, dtype: _flat(raw, torch.bfloat16).to(dtype),
        wire_bytes=lambda count, _: 2 * count,
    ),
    "int8": WireCodec(
        pack=_pack_int8,
        unpack=_unpack_int8,
        wire_bytes=lambda count, _: count + 4 * -(-count // _BLOCK),
    ),
}

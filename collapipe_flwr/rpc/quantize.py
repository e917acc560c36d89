"""How floating-point tensors are written on the wire: exact, halved, or 8 bits in blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

_BLOCK = 128  # elements that share one scale


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
    """Rounded to a 16-bit type: values beyond its range become infinite."""

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


class Int8Blocks:
    """127 steps each way, scaled per block of 128 elements by its largest magnitude.

    The error of an element is at most 1/254 of the largest magnitude in its block. A block with
    an infinity or NaN arrives as NaN, so that an overflow stays visible.
    """

    def pack(self, tensor: Tensor) -> memoryview:
        """See `WireCodec.pack`."""
        flat = tensor.reshape(-1).to(torch.float32)
        blocks = torch.nn.functional.pad(flat, (0, -flat.numel() % _BLOCK)).view(-1, _BLOCK)
        scale = blocks.abs().amax(dim=1, keepdim=True) / 127 if flat.numel() else blocks[:, :1]
        steps = torch.nan_to_num(blocks / scale.clamp_min(torch.finfo(torch.float32).tiny))
        steps = steps.round().clamp(-127, 127).to(torch.int8).reshape(-1)[: flat.numel()]
        return memoryview(bytes(_bytes_of(scale)) + bytes(_bytes_of(steps)))

    def unpack(self, raw: bytearray, dtype: torch.dtype) -> Tensor:
        """See `WireCodec.unpack`."""
        blocks = -(-len(raw) // (_BLOCK + 4))
        scale, steps = _flat(raw[: 4 * blocks], torch.float32), _flat(raw[4 * blocks :], torch.int8)
        scale = torch.where(scale.isfinite(), scale, torch.nan)
        return (steps * scale.repeat_interleave(_BLOCK)[: steps.numel()]).to(dtype)

    def wire_bytes(self, elements: int, dtype: torch.dtype) -> int:
        """See `WireCodec.wire_bytes`."""
        _ = dtype
        return elements + 4 * -(-elements // _BLOCK)


WIRE_CODECS: Mapping[str, WireCodec] = {
    "fp32": Exact(),  # the tensor's own type, bit by bit
    "fp16": Cast(torch.float16),
    "bf16": Cast(torch.bfloat16),
    "int8": Int8Blocks(),
}


def _bytes_of(tensor: Tensor) -> memoryview:
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def _flat(raw: bytearray, dtype: torch.dtype) -> Tensor:
    if dtype is torch.bool:  # a stranger's byte may be neither 0 nor 1
        return _flat(raw, torch.uint8) != 0
    return torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)

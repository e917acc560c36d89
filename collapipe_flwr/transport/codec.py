"""Frames as bytes: a small header, then tensors, exact, in half precision, or in 8 or 4 bits.

    prefix | list | scalars (float64) | text | padding to 16 | tensor | padding to 16 | tensor ...

All numbers are little endian. The list is JSON: the names of the scalars, and the tensors. It is
the same in every micro-batch, so its encoding and decoding are cached.

Neither pickle nor protobuf is used. A frame is checked against its header, and the header against
the limits, before anything is allocated.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from collapipe_flwr.core.errors import ProtocolError
from collapipe_flwr.pipeline.link import GRAD, HIDDEN, Frame, FrameKind
from collapipe_flwr.pipeline.offload import view_bytes
from collapipe_flwr.transport.methods import LIMITS, FrameLimits, decode_message

_MAGIC = b"CPF2"
_PREFIX = struct.Struct("<4sIIIqq")  # also: kind, bytes of list and text, step, micro-batch
_ALIGN = 16
_REMEMBERED = 32  # lists, of at most ``FrameLimits.header_bytes`` each
_NAMES = "float64 float32 float16 bfloat16 int64 int32 int16 int8 uint8 bool"
_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _NAMES.split()}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_MOST_GROWTH = 8  # of a frame of the largest size, from the wire to memory; 4 bits hold float32
_BLOCK = 128  # elements that share one scale
_HALF_TOP = 15  # scaled numbers stay below 2 to the power of this, well within half precision
_LEAST_UNIT = -126  # its power of two is the smallest normal number of single precision
_TILE = 64  # elements that are rotated together and share one scale in 4 bits
_TILE_BYTES = 2 + _TILE // 2
_TILES_AT_A_TIME = 8192  # 2 MiB: caches hold them and what is computed from them
# Of a tile's norm: 16 steps of 0.335 lose least of a normal distribution (Max, 1960); with 0.3, a
# twentieth more, even tiles (constants, single spikes) fall into the middle of one.
_STEP = 0.3 / math.sqrt(_TILE)
_SMALLEST = 1e-38  # blocks below are sent as zeros: the inverse of their scale would overflow


@dataclass(frozen=True, slots=True, kw_only=True)
class WireCodec:
    """A way to write the elements of a tensor.

    ``pack`` returns the bytes of a tensor of any shape, ``unpack`` the flat tensor of a dtype that
    they hold, which may share their memory, and may end in the padding of its last block.
    ``wire_bytes`` is the number of bytes for so many elements of a dtype.
    """

    pack: Callable[[Tensor], memoryview]
    unpack: Callable[[bytearray, torch.dtype], Tensor]
    wire_bytes: Callable[[int, torch.dtype], int]


def _pack_halves(tensor: Tensor) -> memoryview:
    """Write half precision, scaled per tensor by a power of two to make full use of its range.

    Half precision alone ends at 65504 and loses numbers below 6e-8, and gradients of a mean over
    many labels are that small. Scaled, a number keeps its 11 bits down to 2^-28 of the largest one
    and vanishes below 2^-39 of it. A tensor with an infinity or NaN is not scaled, so that an
    overflow stays visible.
    """
    flat = tensor.reshape(-1).to(torch.float32)
    if not flat.numel():
        return memoryview(b"")
    low, high = torch.aminmax(flat)
    unit = torch.tensor([_choose_unit(float(torch.maximum(high, -low)))])
    return memoryview(b"".join((view_bytes(unit), view_bytes((flat / unit).to(torch.float16)))))


def _unpack_halves(raw: bytearray, dtype: torch.dtype) -> Tensor:
    unit, halves = _read_flat(raw[:4], torch.float32), _read_flat(raw[4:], torch.float16)
    return (halves.to(torch.float32) * unit).to(dtype)


def _pack_int8(tensor: Tensor) -> memoryview:
    """Write 127 steps each way, scaled per block of 128 elements by its largest magnitude.

    The error of an element is at most 1/254 of the largest magnitude in its block. A block with
    an infinity or NaN arrives as NaN, so that an overflow stays visible.
    """
    flat = tensor.reshape(-1).to(torch.float32)
    blocks = _cut_blocks(flat, _BLOCK)
    largest = torch.maximum(blocks.amax(1, keepdim=True), -blocks.amin(1, keepdim=True))
    scale = largest / 127
    inverse = torch.where(scale > _SMALLEST, 1 / scale, 0.0)  # NaN and infinity give NaN or 0
    steps = (blocks * inverse).round_().to(torch.int8).reshape(-1)[: flat.numel()]
    return memoryview(b"".join((view_bytes(scale), view_bytes(steps))))


def _unpack_int8(raw: bytearray, dtype: torch.dtype) -> Tensor:
    blocks = -(-len(raw) // (_BLOCK + 4))
    scale, steps = (
        _read_flat(raw[: 4 * blocks], torch.float32),
        _read_flat(raw[4 * blocks :], torch.int8),
    )
    scale = torch.where(scale.isfinite(), scale, torch.nan)
    values = _cut_blocks(steps, _BLOCK) * scale.view(-1, 1)
    return values.reshape(-1)[: steps.numel()].to(dtype)


def _pack_int4(tensor: Tensor) -> memoryview:
    """Write one of 16 even steps per element of a rotated tile of 64.

    The rotation spreads outliers over their tile, so that its elements are nearly normally
    distributed: the error of a tile is about a tenth of its norm, whatever it holds. If it holds
    an infinity or NaN, all of it arrives as NaN.
    """
    flat = tensor.reshape(-1).to(torch.float32)
    if not flat.numel():
        return memoryview(b"")
    low, high = torch.aminmax(flat)
    largest = float(torch.maximum(high, -low))
    unit, finite = _choose_unit(largest), math.isfinite(largest)
    turn = _make_rotation() / unit
    steps, codes = [], []
    tiles = _cut_blocks(flat, _TILE)
    for start in range(0, len(tiles), _TILES_AT_A_TIME):
        turned = tiles[start : start + _TILES_AT_A_TIME] @ turn
        norm = torch.linalg.vector_norm(turned, dim=1, keepdim=True)
        step = (norm * (unit * _STEP)).to(torch.bfloat16)
        scale = step.to(torch.float32) / unit
        turned *= torch.where(scale > _SMALLEST, 1 / scale, 0.0)
        if not finite:
            turned.nan_to_num_(0.0)
        code = turned.add_(8).clamp_(0, 15).to(torch.uint8)
        steps.append(step)
        codes.append(code[:, : _TILE // 2] << 4 | code[:, _TILE // 2 :])
    return memoryview(b"".join((view_bytes(torch.cat(steps)), view_bytes(torch.cat(codes)))))


def _unpack_int4(raw: bytearray, dtype: torch.dtype) -> Tensor:
    tiles = len(raw) // _TILE_BYTES
    step = _read_flat(raw[: 2 * tiles], torch.bfloat16).view(-1, 1).to(torch.float32)
    step = torch.where(step.isfinite(), step, torch.nan)
    codes = _read_flat(raw[2 * tiles :], torch.uint8).view(-1, _TILE // 2)
    back = _make_rotation().T.contiguous()
    found = torch.empty(tiles, _TILE)
    for start in range(0, tiles, _TILES_AT_A_TIME):
        part = slice(start, start + _TILES_AT_A_TIME)
        turned = torch.cat([codes[part] >> 4, codes[part] & 15], 1).to(torch.float32)
        torch.matmul(turned.sub_(7.5).mul_(step[part]), back, out=found[part])
    return found.view(-1).to(dtype)


@cache
def _make_rotation() -> Tensor:
    """Return the orthogonal matrix of a tile: Hadamard's, with the signs of a bent function.

    These signs also spread tiles evenly whose elements are all equal (Rothaus, 1976).
    """
    matrix = torch.ones(1, 1)
    while len(matrix) < _TILE:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    signs = torch.tensor([(-1.0) ** (n & n >> 1 & 0b010101).bit_count() for n in range(_TILE)])
    return signs.view(-1, 1) * matrix / math.sqrt(_TILE)


def _choose_unit(largest: float) -> float:
    """Return the power of two by which a tensor with this largest magnitude is divided."""
    if not math.isfinite(largest):
        return 1.0
    _, exponent = math.frexp(largest)
    return math.ldexp(1.0, max(exponent - _HALF_TOP, _LEAST_UNIT))


def _cut_blocks(flat: Tensor, size: int) -> Tensor:
    """Cut into one block per row; the last one is padded with zeros."""
    missing = -flat.numel() % size
    full = torch.nn.functional.pad(flat, (0, missing)) if missing else flat
    return full.view(-1, size)


def _read_flat(raw: bytearray, dtype: torch.dtype) -> Tensor:
    if dtype is torch.bool:  # a peer's byte may be neither 0 nor 1
        return _read_flat(raw, torch.uint8) != 0
    return torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)


WIRE_CODECS: Mapping[str, WireCodec] = {
    "fp32": WireCodec(  # the tensor's own type, bit by bit
        pack=view_bytes, unpack=_read_flat, wire_bytes=lambda count, dtype: count * dtype.itemsize
    ),
    "fp16": WireCodec(
        pack=_pack_halves,
        unpack=_unpack_halves,
        wire_bytes=lambda count, _: 2 * count + 4 if count else 0,
    ),
    "bf16": WireCodec(
        pack=lambda tensor: view_bytes(tensor.to(torch.bfloat16)),
        unpack=lambda raw, dtype: _read_flat(raw, torch.bfloat16).to(dtype),
        wire_bytes=lambda count, _: 2 * count,
    ),
    "int8": WireCodec(
        pack=_pack_int8,
        unpack=_unpack_int8,
        wire_bytes=lambda count, _: count + 4 * -(-count // _BLOCK),
    ),
    "int4": WireCodec(
        pack=_pack_int4,
        unpack=_unpack_int4,
        wire_bytes=lambda count, _: _TILE_BYTES * -(-count // _TILE),
    ),
}


class _Entry(NamedTuple):
    """One tensor in the header, checked."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    codec: WireCodec
    wire_bytes: int

    def unpack(self, raw: bytearray) -> Tensor:
        """Return the tensor that these bytes hold."""
        flat, size = self.codec.unpack(raw, self.dtype), math.prod(self.shape)
        return (flat if len(flat) == size else flat[:size]).view(self.shape)


_Described = tuple[str, str, tuple[int, ...], str]  # name, dtype, shape, codec
_KINDS = {int(kind): kind for kind in FrameKind}
_compact = json.JSONEncoder(separators=(",", ":"))


def encode_frame(frame: Frame, codec: str = "fp32") -> bytes:
    """Encode a frame; `codec` applies to hidden states and gradients, all else is exact."""
    described: list[_Described] = []
    chunks: list[bytes | memoryview] = []
    for name, tensor in frame.tensors.items():
        if tensor.dtype not in _DTYPE_NAMES:
            raise ProtocolError(f"tensors of {tensor.dtype} cannot travel")
        wire = codec if name in (HIDDEN, GRAD) and tensor.is_floating_point() else "fp32"
        raw = WIRE_CODECS[wire].pack(tensor.detach())
        described.append((name, _DTYPE_NAMES[tensor.dtype], tensor.shape, wire))
        chunks += [raw, b"\0" * (-len(raw) % _ALIGN)]
    listed = _encode_list(tuple(frame.scalars), tuple(described))
    numbers = struct.pack(f"<{len(frame.scalars)}d", *frame.scalars.values())
    text = frame.text.encode()
    sizes = frame.kind, len(listed), len(text)
    prefix = _PREFIX.pack(_MAGIC, *sizes, frame.step, frame.micro_batch)
    header_bytes = len(prefix) + len(listed) + len(numbers) + len(text)
    return b"".join([prefix, listed, numbers, text, b"\0" * (-header_bytes % _ALIGN), *chunks])


def decode_frame(data: bytes, limits: FrameLimits = LIMITS) -> Frame:
    """Decode a frame; tensors own writable memory. Raises ProtocolError on anything odd."""
    if len(data) > limits.frame_bytes:
        raise ProtocolError(f"a frame of {len(data)} bytes; {limits.frame_bytes} are allowed")
    if len(data) < _PREFIX.size:
        raise ProtocolError(f"a frame of {len(data)} bytes is too short")
    magic, kind, list_bytes, text_bytes, step, micro_batch = _PREFIX.unpack_from(data)
    list_stop = _PREFIX.size + list_bytes
    fits = list_bytes + text_bytes <= limits.header_bytes and list_stop <= len(data)
    if magic != _MAGIC or kind not in _KINDS or not fits:
        raise ProtocolError("a frame without a proper header")
    if step < 0 or micro_batch < 0:
        raise ProtocolError("a frame whose step or micro-batch is no number >= 0")
    names, entries, tensor_bytes = _read_list(data[_PREFIX.size : list_stop], limits)
    text_start = list_stop + 8 * len(names)
    start = _pad_size(text_start + text_bytes)
    if start + tensor_bytes != len(data):
        raise ProtocolError(f"a frame of {len(data)} bytes, which is not what its header says")
    numbers = struct.unpack_from(f"<{len(names)}d", data, list_stop)
    try:
        text = data[text_start : text_start + text_bytes].decode()
    except UnicodeDecodeError as error:
        raise ProtocolError("a frame whose text cannot be read") from error
    return Frame(
        kind=_KINDS[kind],
        step=step,
        micro_batch=micro_batch,
        tensors=_read_tensors(memoryview(data), start, entries),
        scalars=dict(zip(names, numbers, strict=True)),
        text=text,
    )


@lru_cache(_REMEMBERED)
def _encode_list(names: tuple[str, ...], tensors: tuple[_Described, ...]) -> bytes:
    return _compact.encode((names, tensors)).encode()


@lru_cache(_REMEMBERED)
def _read_list(line: bytes, limits: FrameLimits) -> tuple[tuple[str, ...], tuple[_Entry, ...], int]:
    """Read a header's list: names of scalars, tensors, and the bytes that these take.

    Raises ProtocolError if it is malformed.
    """
    names, found = decode_message(tuple[tuple[str, ...], tuple[_Described, ...]], line)
    if len(found) > limits.tensors:
        raise ProtocolError(f"a frame with {len(found)} tensors; {limits.tensors} are allowed")
    entries = tuple(_read_entry(described, limits) for described in found)
    memory_bytes = sum(math.prod(e.shape) * e.dtype.itemsize for e in entries)
    if memory_bytes > _MOST_GROWTH * limits.frame_bytes:
        raise ProtocolError(f"a frame whose tensors take {memory_bytes} bytes is beyond the limit")
    if len({e.name for e in entries}) < len(entries) or len(set(names)) < len(names):
        raise ProtocolError("a frame names a tensor or a scalar twice")
    return names, entries, sum(_pad_size(entry.wire_bytes) for entry in entries)


def _read_entry(described: _Described, limits: FrameLimits) -> _Entry:
    name, dtype_name, shape, codec_name = described
    if dtype_name not in _DTYPES or codec_name not in WIRE_CODECS:
        raise ProtocolError("a frame with a tensor of unknown dtype or in an unknown codec")
    if len(shape) > limits.dimensions or not all(map(_is_count, shape)):
        raise ProtocolError("a frame with a tensor of malformed shape")
    dtype, codec, elements = _DTYPES[dtype_name], WIRE_CODECS[codec_name], math.prod(shape)
    memory_bytes = elements * dtype.itemsize
    if math.prod(filter(None, shape)) >= 2**59:  # torch cannot count further
        raise ProtocolError(f"a tensor of {memory_bytes} bytes is beyond the limit")
    if codec_name != "fp32" and not dtype.is_floating_point:
        raise ProtocolError(f"a tensor of {dtype_name} in the codec {codec_name}")
    return _Entry(name, dtype, shape, codec, codec.wire_bytes(elements, dtype))


def _read_tensors(data: memoryview, start: int, entries: tuple[_Entry, ...]) -> dict[str, Tensor]:
    tensors = {}
    for entry in entries:
        raw = bytearray(data[start : start + entry.wire_bytes])
        tensors[entry.name] = entry.unpack(raw)
        start += _pad_size(entry.wire_bytes)
    return tensors


def _pad_size(size: int) -> int:
    return size + -size % _ALIGN


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**63

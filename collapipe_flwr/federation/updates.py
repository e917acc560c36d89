"""Coded updates: a reply carries the change of every float array, in a codec of the links.

Both ends have the model that was sent. With r the error of the cluster's last accepted reply,

    code = pack(trained + r - sent),   received = sent + unpack(code),   r' = trained + r - received

so what the server receives over the rounds differs from what was trained by the last r alone (error
feedback; Seide et al., 2014; Karimireddy et al., 2019). Exact, as ever, travel integers, arrays
that are not finite, and those of which a code would not be smaller.

In ``top-k`` (Aji and Heafield, 2017; Stich et al., 2018) a change is the quarter of its elements
that is largest in magnitude, of equal ones the first:

    whether each element is sent (a bit each, the first is the highest of its byte) | values (int4)

Four bits suffice for values: their rounding is small beside what is left out, and comes later, too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from flwr.app import Array, ArrayRecord
from torch import Tensor

from collapipe_flwr.core.errors import ProtocolError, prefix_errors
from collapipe_flwr.core.links import TOP_K
from collapipe_flwr.core.texts import SHORT, to_one_line
from collapipe_flwr.federation.arrays import decode_tensor, encode_tensor, widened
from collapipe_flwr.pipeline.offload import LazyMapping, Offload
from collapipe_flwr.transport.codec import WIRE_CODECS

EXACT = "fp32"  # no reply is coded
_CODED = "collapipe.update"  # Array.stype
# Elements of which top-k sends one. Of a hundred, as is usual for gradients, ten rounds would send
# a tenth of the model; a quarter holds 72 % of the square of normally distributed values.
_ELEMENTS = 4
_VALUES = WIRE_CODECS["int4"]
_FLOATS = {name: getattr(torch, name) for name in ("float64", "float32", "float16", "bfloat16")}


def is_coded(sent: Array, codec: str) -> bool:
    """Return whether the change of an array is coded: that of floats, where it saves bytes."""
    dtype = _FLOATS.get(sent.dtype)
    return dtype is not None and _code_bytes(sent, codec) < math.prod(sent.shape) * dtype.itemsize


def encode_update(
    reply: ArrayRecord, sent: Mapping[str, Tensor], errors: Mapping[str, Tensor], codec: str
) -> LazyMapping[Tensor]:
    """Put the coded changes since ``sent`` into a reply, array by array; returns their errors.

    ``sent`` holds the arrays that `is_coded`, ``errors`` those of the last accepted reply, of which
    another model's count for nothing.
    """
    stow, left = Offload(), {}
    for key in list(reply):
        if key not in sent or reply[key].dtype not in _FLOATS:
            continue
        start, trained = sent[key], widened(decode_tensor(key, reply[key]))
        if trained.shape != start.shape:
            continue
        if key in errors and errors[key].shape == trained.shape:
            trained = trained + errors[key]
        code = _pack(trained - widened(start), codec)
        error = trained - widened(_add(start, code, codec))
        if torch.isfinite(error).all():
            dtype = str(start.dtype).removeprefix("torch.")
            reply[key] = Array(dtype, tuple(start.shape), _CODED, code)
            left[key] = stow.put(error)
    return LazyMapping(left)


def decode_update(reply: ArrayRecord, sent: ArrayRecord, codec: str) -> ArrayRecord:
    """Return the arrays of a reply to a model, with those that are coded decoded.

    Raises ProtocolError for a code that is not of an array that was sent, before it is unpacked,
    and for one in ``top-k`` that sends more or fewer elements than that array needs.
    """
    found = ArrayRecord()
    for key, array in reply.items():
        found[key] = array
        if array.stype == _CODED:
            start = sent.get(key)
            if start is None or not _fits(array, start, codec):
                raise ProtocolError(
                    f"the change of {to_one_line(key, SHORT)} ({len(array.data)} bytes) is not, in "
                    f"{codec}, that of an array that was sent"
                )
            with prefix_errors(f"the change of {to_one_line(key, SHORT)}"):
                found[key] = encode_tensor(_add(decode_tensor(key, start), array.data, codec))
    return found


def _fits(array: Array, sent: Array, codec: str) -> bool:
    alike = (array.dtype, tuple(array.shape)) == (sent.dtype, tuple(sent.shape))
    return alike and is_coded(sent, codec) and len(array.data) == _code_bytes(sent, codec)


def _code_bytes(sent: Array, codec: str) -> int:
    count = math.prod(sent.shape)
    if codec == TOP_K:
        return _divide_up(count, 8) + _VALUES.wire_bytes(
            _divide_up(count, _ELEMENTS), torch.float32
        )
    return WIRE_CODECS[codec].wire_bytes(count, torch.float32)


def _divide_up(count: int, by: int) -> int:
    return -(-count // by)


def _add(start: Tensor, code: bytes, codec: str) -> Tensor:
    """Add a coded change to the array that was sent, in that one's dtype."""
    change = _unpack(bytearray(code), start.numel(), codec)
    return (widened(start) + change.view(start.shape)).to(start.dtype)


def _pack(change: Tensor, codec: str) -> bytes:
    if codec == TOP_K:
        return _pack_largest(change.reshape(-1))
    return bytes(WIRE_CODECS[codec].pack(change))


def _unpack(code: bytearray, count: int, codec: str) -> Tensor:
    if codec == TOP_K:
        return _unpack_largest(code, count)
    return WIRE_CODECS[codec].unpack(code, torch.float32)[:count]


def _pack_largest(flat: Tensor) -> bytes:
    """Write the largest elements; NaN counts as infinity."""
    size, kept = flat.abs().nan_to_num_(math.inf, math.inf), _divide_up(len(flat), _ELEMENTS)
    least = float(np.partition(size.numpy(), -kept)[-kept])
    chosen = size > least
    chosen[(size == least).nonzero()[: kept - int(chosen.count_nonzero())]] = True
    return b"".join((np.packbits(chosen.numpy()).data, _VALUES.pack(flat[chosen])))


def _unpack_largest(code: bytearray, count: int) -> Tensor:
    """Return the change; raises ProtocolError for a code of more or fewer elements."""
    kept, stop = _divide_up(count, _ELEMENTS), _divide_up(count, 8)
    bits = np.unpackbits(np.frombuffer(code[:stop], np.uint8))
    if np.count_nonzero(bits) != kept or bits[count:].any():
        raise ProtocolError(f"it does not send {kept} of {count} elements")
    change = torch.zeros(count)
    values = _VALUES.unpack(code[stop:], torch.float32)
    change[torch.from_numpy(bits[:count]).bool()] = values[:kept]
    return change

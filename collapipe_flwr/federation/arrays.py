"""Arrays between torch, Flower's ArrayRecord and the inner strategy, with every dtype kept.

numpy has no bfloat16 and no float8, so Flower refuses such tensors: they travel as raw bytes under
a serialisation type of our own, and the inner strategy averages them in float32. Flower's averaging
turns integers and booleans (step counters, masks) into floats, and a strategy may turn float32 into
float64: :func:`load_into` casts them back, as `torch.nn.Module.load_state_dict` does.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from io import BytesIO
from typing import Literal

import numpy as np
import torch
from flwr.app import Array, ArrayRecord
from flwr.common.constant import SType

from collapipe_flwr.core.errors import ProtocolError, RunError
from collapipe_flwr.federation.array_format import RAW_DTYPES, RAW_TORCH, layout_of
from collapipe_flwr.pipeline.offload import OFFLOAD_BYTES, LazyMapping, Offload

_RAW_NAMES = {dtype: name for name, dtype in RAW_DTYPES.items()}
_PLAIN_DTYPES = {
    np.dtype(name): getattr(torch, name) for name in ("float32", "float64", "float16", "int64")
}


def encode_tensors(tensors: Mapping[str, torch.Tensor]) -> ArrayRecord:
    """Encode a state dict as an ArrayRecord; :func:`decode_tensors` restores dtypes and shapes."""
    return ArrayRecord({key: encode_tensor(tensor) for key, tensor in tensors.items()})


def decode_tensors(record: ArrayRecord) -> dict[str, torch.Tensor]:
    """Copy an ArrayRecord into a state dict; raises ProtocolError on a malformed array."""
    return {key: decode_tensor(key, array) for key, array in record.items()}


def take_tensors(record: ArrayRecord) -> dict[str, torch.Tensor]:
    """Decode the tensors, emptying the record, so that a model is never in memory twice."""
    return {key: decode_tensor(key, record.pop(key)) for key in list(record)}


def offload_tensors(record: ArrayRecord) -> LazyMapping[torch.Tensor]:
    """Move the tensors into a file, from which each is read when it is asked for.

    Raises ProtocolError on a malformed array.
    """
    stow = Offload()
    return LazyMapping({key: _offload_tensor(stow, key, record.pop(key)) for key in list(record)})


def take_record(tensors: dict[str, torch.Tensor] | LazyMapping[torch.Tensor]) -> ArrayRecord:
    """Encode a state dict as an ArrayRecord, emptying it on the way."""
    return ArrayRecord({key: encode_tensor(tensors.pop(key)) for key in list(tensors)})


def is_floating(array: Array) -> bool:
    """Return whether an array can be averaged: integers and booleans cannot."""
    return array.dtype in RAW_DTYPES or not array.dtype.startswith(("int", "uint", "bool"))


def averaging_view(record: ArrayRecord) -> ArrayRecord:
    """Return the floats of a model, in dtypes that numpy has."""
    return inner_view(record, [key for key, array in record.items() if not is_floating(array)])


def inner_view(record: ArrayRecord, hidden: Collection[str] = ()) -> ArrayRecord:
    """Return the arrays that are not ``hidden``, in dtypes that numpy has.

    The inner strategy sees these. A record that needs no change is returned itself.
    """
    keys = [key for key in record if key not in hidden]
    if len(keys) == len(record) and not holds_raw(record):
        return record
    return ArrayRecord({key: _widen(key, record[key]) for key in keys})


def holds_raw(record: ArrayRecord) -> bool:
    return any(array.stype == RAW_TORCH for array in record.values())


def narrow_raw(view: ArrayRecord, template: ArrayRecord) -> ArrayRecord:
    """Cast arrays of ``view`` back to the dtypes of ``template`` that numpy lacks.

    Raises RunError if the shape of such an array changed.
    """
    if not holds_raw(template):
        return view
    raw = {key: array for key, array in template.items() if array.stype == RAW_TORCH}
    return ArrayRecord({k: _cast(k, a, raw[k]) if k in raw else a for k, a in view.items()})


def load_into(template: ArrayRecord, view: ArrayRecord) -> ArrayRecord:
    """Return ``template`` after `load_state_dict` of ``view``: in its order, shapes and dtypes.

    Arrays that ``view`` lacks stay as they are, and arrays that only ``view`` has are added. Raises
    RunError if a shape changed.
    """
    loaded = {k: _cast(k, view[k], array) if k in view else array for k, array in template.items()}
    return ArrayRecord({**loaded, **{k: a for k, a in view.items() if k not in loaded}})


def add_change(model: ArrayRecord, start: ArrayRecord, now: ArrayRecord) -> ArrayRecord:
    """Add the change of ``model`` since ``start`` to ``now``, in the dtypes of ``model``.

    Integers, and floats that are not finite (masks), are those of ``model``.
    """
    moved = ArrayRecord()
    for key, array in model.items():
        moved[key] = array
        if is_floating(array) and key in start and key in now:
            to, base, here = (widened(decode_tensor(key, r[key])) for r in (now, start, model))
            if torch.isfinite(here).all() and torch.isfinite(base).all():
                moved[key] = _cast(key, encode_tensor(to + (here - base)), array)
    return moved


def find_not_finite(record: ArrayRecord, like: ArrayRecord) -> str | None:
    """Find the first float array that is not finite though its counterpart in ``like`` is.

    Arrays that ``like`` lacks are not checked. Raises ProtocolError on a malformed array.
    """
    for key, array in record.items():
        if key in like and is_floating(array) and not _is_finite(key, array):
            before = like[key]
            if is_floating(before) and _is_finite(key, before):
                return key
    return None


def count_not_finite(record: ArrayRecord) -> int:
    """Count the float arrays with infinities or NaN; raises ProtocolError on a malformed one."""
    return sum(is_floating(a) and not _is_finite(key, a) for key, a in record.items())


def _is_finite(key: str, array: Array) -> bool:
    return bool(torch.isfinite(widened(decode_tensor(key, array))).all())


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """Widen to float32 at least: torch computes little in narrower dtypes."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def encode_tensor(tensor: torch.Tensor) -> Array:
    tensor = tensor.detach().cpu()
    if tensor.dtype not in _RAW_NAMES:
        return Array(str(tensor.numpy().dtype), tuple(tensor.shape), SType.NUMPY, _save_npy(tensor))
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    return Array(_RAW_NAMES[tensor.dtype], tuple(tensor.shape), RAW_TORCH, flat.numpy().tobytes())


def _save_npy(tensor: torch.Tensor) -> bytes:
    """Return the bytes of `numpy.save`, without its over-allocated buffer."""
    array, head = tensor.contiguous().numpy(), BytesIO()
    np.lib.format.write_array_header_1_0(head, np.lib.format.header_data_from_array_1_0(array))
    return b"".join((head.getvalue(), array.reshape(-1).data))


def _offload_tensor(stow: Offload, key: str, array: Array) -> Callable[[], torch.Tensor]:
    """Store one tensor and return its reader; large arrays are stored without decoding."""
    if len(array.data) >= OFFLOAD_BYTES and (found := _raw_bytes(key, array)):
        data, dtype = found
        if read := stow.put_bytes(data, dtype, array.shape):
            return read
    return stow.put(decode_tensor(key, array))


def _raw_bytes(key: str, array: Array) -> tuple[memoryview, torch.dtype] | None:
    """Return an array's bytes in torch's layout; None where it has to be decoded first."""
    layout, data = layout_of(key, array), memoryview(array.data)
    if layout is None:
        return data, RAW_DTYPES[array.dtype]
    dtype = _PLAIN_DTYPES.get(layout.dtype)
    return None if layout.reordered or dtype is None else (data[layout.begin :], dtype)


def decode_tensor(key: str, array: Array) -> torch.Tensor:
    layout = layout_of(key, array)
    if layout is None:
        raw = torch.frombuffer(bytearray(array.data), dtype=torch.uint8) if array.data else None
        flat = torch.empty(0, dtype=torch.uint8) if raw is None else raw
        return flat.view(RAW_DTYPES[array.dtype]).reshape(tuple(array.shape))
    order: Literal["F", "C"] = "F" if layout.reordered else "C"
    values = np.ndarray(layout.shape, layout.dtype, array.data, layout.begin, order=order)
    try:
        return torch.from_numpy(np.array(values))  # torch warns about read-only buffers: copy once
    except TypeError as error:
        raise ProtocolError(f"array {key} is of {array.dtype}, which torch lacks") from error


def _widen(key: str, array: Array) -> Array:
    if array.stype != RAW_TORCH:
        return array
    return Array(decode_tensor(key, array).to(torch.float32).numpy())


def _cast(key: str, array: Array, template: Array) -> Array:
    """Cast ``array`` to the dtype of ``template`` as torch does; raises RunError for its shape."""
    if tuple(array.shape) != tuple(template.shape):
        raise RunError(
            f"array {key} has shape {tuple(array.shape)} after aggregation but "
            f"{tuple(template.shape)} before; use a strategy that keeps shapes"
        )
    if array.dtype == template.dtype:
        return array
    return encode_tensor(decode_tensor(key, array).to(getattr(torch, template.dtype)))

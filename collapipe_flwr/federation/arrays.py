"""Arrays between torch, Flower's ArrayRecord and the inner strategy, with every dtype kept.

Three facts make this file. numpy has no bfloat16 and no float8, so Flower refuses such tensors:
they travel as raw bytes under a serialisation type of our own, which code that does not know it
refuses instead of misreading. Flower's averaging turns integers into floats, so integer and
boolean arrays (step counters, position ids, masks) stay out of it. And averaging in a narrow
dtype loses bits, so narrow floats that numpy lacks are averaged in float32.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
import torch
from flwr.app import Array, ArrayRecord

from collapipe_flwr.core.errors import ProtocolError, RunError

RAW_TORCH = "collapipe.torch"  # Array.stype of dtypes that numpy lacks
_RAW_DTYPES: Mapping[str, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
}
_RAW_NAMES = {dtype: name for name, dtype in _RAW_DTYPES.items()}


def encode_tensors(tensors: Mapping[str, torch.Tensor]) -> ArrayRecord:
    """A state dict as an ArrayRecord; every dtype and shape survives the way there and back."""
    return ArrayRecord({key: _encode_tensor(tensor) for key, tensor in tensors.items()})


def decode_tensors(record: ArrayRecord) -> dict[str, torch.Tensor]:
    """The state dict of an ArrayRecord (copies); raises ProtocolError on a malformed array."""
    return {key: _decode_tensor(key, array) for key, array in record.items()}


def take_tensors(record: ArrayRecord) -> dict[str, torch.Tensor]:
    """The same, emptying the record on the way: a model is never there twice.

    Raises ProtocolError on a malformed array.
    """
    return {key: _decode_tensor(key, record.pop(key)) for key in list(record)}


def take_record(tensors: dict[str, torch.Tensor]) -> ArrayRecord:
    """:func:`encode_tensors`, emptying the state dict on the way."""
    return ArrayRecord({key: _encode_tensor(tensors.pop(key)) for key in list(tensors)})


def is_floating(array: Array) -> bool:
    """True where averaging makes sense: not for integers and booleans."""
    return array.dtype in _RAW_DTYPES or not array.dtype.startswith(("int", "uint", "bool"))


def averaging_view(record: ArrayRecord, constant: Collection[str] = ()) -> ArrayRecord:
    """What the inner strategy sees: floats that are not ``constant``, in dtypes that numpy has.

    A record that needs no change comes back as it is, and so does one without any float: its
    arrays are no weights (boosted trees travel as bytes) and only the inner strategy knows them.
    """
    keys = averaged_keys(record, constant)
    if len(keys) == len(record) and all(a.stype != RAW_TORCH for a in record.values()):
        return record
    return ArrayRecord({key: _widen(key, record[key]) for key in keys})


def averaged_keys(record: ArrayRecord, constant: Collection[str] = ()) -> list[str]:
    """The keys that :func:`averaging_view` keeps."""
    floats = [k for k, array in record.items() if is_floating(array) and k not in constant]
    return floats or list(record)


def restore(
    view: ArrayRecord, template: ArrayRecord, others: ArrayRecord, *, strict: bool = False
) -> ArrayRecord:
    """Undo :func:`averaging_view`: keys as in ``template``.

    What was hidden comes from ``others`` if it is an integer (a counter that moved), else from the
    template. What was widened is narrowed again. Other floats stay as the inner strategy made them
    (FedAdam makes float64), unless ``strict``: then every array gets the template's dtype and must
    have its shape. Raises RunError if a shape changed where it must not.
    """
    if not any(map(is_floating, template.values())):
        return view
    whole = ArrayRecord()
    for key, array in template.items():
        if key in view:
            exact = strict or array.stype == RAW_TORCH
            whole[key] = _narrow(key, view[key], array) if exact else view[key]
        else:
            whole[key] = array if is_floating(array) else others.get(key, array)
    for key in view:
        if key not in whole:
            whole[key] = view[key]
    return whole


def _encode_tensor(tensor: torch.Tensor) -> Array:
    tensor = tensor.detach().cpu()
    if tensor.dtype not in _RAW_NAMES:
        return Array(tensor.numpy())
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    return Array(_RAW_NAMES[tensor.dtype], tuple(tensor.shape), RAW_TORCH, flat.numpy().tobytes())


def _decode_tensor(key: str, array: Array) -> torch.Tensor:
    try:
        if array.stype != RAW_TORCH:
            # numpy loads scalars and read-only buffers that torch warns about: copy once
            return torch.from_numpy(np.array(array.numpy()))
        raw = torch.frombuffer(bytearray(array.data), dtype=torch.uint8) if array.data else None
        flat = torch.empty(0, dtype=torch.uint8) if raw is None else raw
        return flat.view(_RAW_DTYPES[array.dtype]).reshape(tuple(array.shape))
    except (EOFError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise ProtocolError(
            f"array {key} ({array.dtype}, shape {tuple(array.shape)}, {array.stype}, "
            f"{len(array.data)} bytes) cannot be read: {error}"
        ) from error


def _widen(key: str, array: Array) -> Array:
    if array.stype != RAW_TORCH:
        return array
    return Array(_decode_tensor(key, array).to(torch.float32).numpy())


def _narrow(key: str, array: Array, template: Array) -> Array:
    """``array`` in the dtype of ``template``, which must have its shape."""
    if tuple(array.shape) != tuple(template.shape):
        raise RunError(
            f"array {key} has shape {tuple(array.shape)} after aggregation but "
            f"{tuple(template.shape)} before; use a strategy that keeps shapes"
        )
    if array.dtype == template.dtype:
        return array
    if template.stype == RAW_TORCH:
        return _encode_tensor(_decode_tensor(key, array).to(_RAW_DTYPES[template.dtype]))
    return Array(np.asarray(array.numpy().astype(template.dtype)))

"""State dicts as a stream of frames: large tensors in pieces, a count at the end."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping

from torch import Tensor

from collapipe_flwr.core.errors import ProtocolError
from collapipe_flwr.core.json_codec import from_json
from collapipe_flwr.pipeline.link import Frame, FrameKind
from collapipe_flwr.pipeline.offload import passing_tensor

PIECE_BYTES = 4 * 2**20
MOST_TENSORS = 65_536  # far beyond any model


def weight_frames(weights: Mapping[str, Tensor], piece_bytes: int = PIECE_BYTES) -> Iterator[Frame]:
    """Yield WEIGHTS frames of at most `piece_bytes`, then END with the number of tensors."""
    for key, tensor in weights.items():
        flat = tensor.detach().contiguous().reshape(-1)
        step = max(1, piece_bytes // flat.element_size())
        for offset in range(0, max(flat.numel(), 1), step):
            yield Frame(
                kind=FrameKind.WEIGHTS,
                tensors={key: flat[offset : offset + step]},
                scalars={"offset": float(offset)},
                text=json.dumps(list(tensor.shape)),
            )
    yield Frame(kind=FrameKind.END, scalars={"tensors": float(len(weights))})


def gather_weights(
    frames: Iterable[Frame], most_bytes: int, reserve: Callable[[int], None] = lambda _: None
) -> dict[str, Tensor]:
    """Collect the state dict behind the frames; see `gather_each`."""
    weights: dict[str, Tensor] = {}
    gather_each(frames, most_bytes, weights.__setitem__, reserve)
    return weights


def gather_each(
    frames: Iterable[Frame],
    most_bytes: int,
    take: Callable[[str, Tensor], object],
    reserve: Callable[[int], None] = lambda _: None,
) -> None:
    """Pass every tensor behind the frames to `take` when it is complete, and hold it no longer.

    `reserve` is called with the bytes of each tensor before. Raises ProtocolError when pieces are
    missing or out of order, or when there are more than `MOST_TENSORS` tensors or `most_bytes`.
    """
    begun: dict[str, Tensor] = {}
    filled: dict[str, int] = {}
    told_bytes = 0
    for frame in frames:
        if frame.kind is FrameKind.END:
            _check_complete(begun, filled, frame)
            return
        key, piece, shape = _piece(frame)
        if key not in filled:
            size_bytes = math.prod(shape) * piece.element_size()
            told_bytes += size_bytes
            if len(filled) >= MOST_TENSORS:
                raise ProtocolError(f"weights of more than {MOST_TENSORS} tensors are not accepted")
            if told_bytes > most_bytes:
                raise ProtocolError(f"weights of more than {most_bytes} bytes are not accepted")
            reserve(size_bytes)
            begun[key] = passing_tensor(shape, piece.dtype)
            filled[key] = 0
        if key not in begun:
            raise ProtocolError(f"a piece of {key[:80]!r} out of order")
        _fill(begun[key], key, piece, frame, filled)
        if filled[key] == begun[key].numel():
            take(key, begun.pop(key))
    raise ProtocolError("a stream of weights broke off before its END")


def _piece(frame: Frame) -> tuple[str, Tensor, tuple[int, ...]]:
    if frame.kind is not FrameKind.WEIGHTS or len(frame.tensors) != 1:
        raise ProtocolError(f"{frame.kind.name} in a stream of weights")
    shape = from_json(tuple[int, ...], frame.text, "the shape of weights")
    is_shape = len(shape) <= 8 and all(0 <= n < 2**40 for n in shape)
    if not is_shape or math.prod(filter(None, shape)) >= 2**59:
        raise ProtocolError("weights with a malformed shape")
    ((key, piece),) = frame.tensors.items()
    return key, piece, shape


def _fill(target: Tensor, key: str, piece: Tensor, frame: Frame, filled: dict[str, int]) -> None:
    offset, stop = filled[key], filled[key] + piece.numel()
    if frame.scalars.get("offset") != offset or stop > target.numel() or piece.dim() != 1:
        raise ProtocolError(f"a piece of {key[:80]!r} out of order")
    if piece.dtype != target.dtype:
        raise ProtocolError(f"a piece of {key[:80]!r} changes its dtype")
    target.view(-1)[offset:stop] = piece
    filled[key] = stop


def _check_complete(begun: Mapping[str, Tensor], filled: Mapping[str, int], end: Frame) -> None:
    if end.scalars.get("tensors") != len(filled):
        raise ProtocolError("a stream of weights lacks tensors")
    for key in begun:
        raise ProtocolError(f"a stream of weights lacks pieces of {key[:80]!r}")

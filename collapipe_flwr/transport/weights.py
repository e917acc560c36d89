"""State dicts as streams of frames: large tensors in pieces, small ones together, then a count."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from torch import Tensor

from collapipe_flwr.core.errors import ProtocolError
from collapipe_flwr.core.json_codec import from_json
from collapipe_flwr.pipeline.link import Frame, FrameKind
from collapipe_flwr.pipeline.offload import allocate_tensor
from collapipe_flwr.transport.methods import LIMITS

PIECE_BYTES = 4 * 2**20
MOST_TENSORS = 65_536  # far beyond any model


def cut_weights(weights: Mapping[str, Tensor], piece_bytes: int = PIECE_BYTES) -> Iterator[Frame]:
    """Yield WEIGHTS frames of at most `piece_bytes`, then END with the number of tensors.

    Small tensors share a frame, whose text lists where each piece begins and its tensor's shape.
    """
    pieces: dict[str, Tensor] = {}
    places: list[tuple[int, ...]] = []
    room = piece_bytes
    for key, tensor in weights.items():
        flat = tensor.detach().contiguous().reshape(-1)
        step = max(1, piece_bytes // flat.element_size())
        for offset in range(0, max(flat.numel(), 1), step):
            piece = flat[offset : offset + step]
            if pieces and (piece.nbytes > room or len(pieces) == LIMITS.tensors):
                yield _make_frame(pieces, places)
                pieces, places, room = {}, [], piece_bytes
            pieces[key] = piece
            places.append((offset, *tensor.shape))
            room -= piece.nbytes
    if pieces:
        yield _make_frame(pieces, places)
    yield Frame(kind=FrameKind.END, scalars={"tensors": float(len(weights))})


def _make_frame(pieces: Mapping[str, Tensor], places: Sequence[tuple[int, ...]]) -> Frame:
    return Frame(kind=FrameKind.WEIGHTS, tensors=pieces, text=json.dumps(places))


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
    """Pass every tensor behind the frames to `take` as soon as it is complete, and release it.

    `reserve` is called with the bytes of each tensor before it is allocated. Raises ProtocolError
    when pieces are missing or out of order, or when there are more than `MOST_TENSORS` tensors or
    `most_bytes`.
    """
    begun: dict[str, Tensor] = {}
    filled: dict[str, int] = {}
    told_bytes = 0
    for frame in frames:
        if frame.kind is FrameKind.END:
            _check_complete(begun, filled, frame)
            return
        for key, piece, offset, shape in _read_pieces(frame):
            if key not in filled:
                size_bytes = math.prod(shape) * piece.element_size()
                told_bytes += size_bytes
                if len(filled) >= MOST_TENSORS:
                    raise ProtocolError(
                        f"weights of more than {MOST_TENSORS} tensors are not accepted"
                    )
                if told_bytes > most_bytes:
                    raise ProtocolError(f"weights of more than {most_bytes} bytes are not accepted")
                reserve(size_bytes)
                begun[key] = allocate_tensor(shape, piece.dtype)
                filled[key] = 0
            if key not in begun:
                raise ProtocolError(f"a piece of {key[:80]!r} out of order")
            _fill(begun[key], key, piece, offset, filled)
            if filled[key] == begun[key].numel():
                take(key, begun.pop(key))
    raise ProtocolError("a stream of weights broke off before its END")


def _read_pieces(frame: Frame) -> Iterator[tuple[str, Tensor, int, tuple[int, ...]]]:
    """Yield the pieces of a frame, with where they begin and the shapes of their tensors."""
    if frame.kind is not FrameKind.WEIGHTS:
        raise ProtocolError(f"{frame.kind.name} in a stream of weights")
    places = from_json(tuple[tuple[int, ...], ...], frame.text, "the shapes of weights")
    if not places or len(places) != len(frame.tensors) or not all(places):
        raise ProtocolError("weights without a shape for every piece")
    for (key, piece), (offset, *shape) in zip(frame.tensors.items(), places, strict=True):
        is_shape = len(shape) <= LIMITS.dimensions and all(0 <= n < 2**40 for n in shape)
        if not is_shape or math.prod(filter(None, shape)) >= 2**59:
            raise ProtocolError("weights with a malformed shape")
        yield key, piece, offset, tuple(shape)


def _fill(target: Tensor, key: str, piece: Tensor, offset: int, filled: dict[str, int]) -> None:
    stop = filled[key] + piece.numel()
    if offset != filled[key] or stop > target.numel() or piece.dim() != 1:
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

"""The replicas of a stage add up their gradients, once per step and before anything reads them.

They stand in a line. Sums of pieces pass from the last replica up to the first, which has the
total then, and totals pass back down while later pieces are still on their way up. All replicas end
up with the same bits, so they take the same optimizer step and stay equal; their sum is that of the
unsplit model in another order. Of the gradients (never rounded by a codec) every link of the line
carries one copy each way, and no link holds more than a few pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from collapipe_flwr.core.errors import LinkError, ModelError, ProtocolError
from collapipe_flwr.core.turns import PIECE_BYTES, pieces_ahead
from collapipe_flwr.pipeline.link import Frame, FrameKind, Link

MOST_TENSORS = 64  # of a frame
_SUM = "sum/"  # no codec knows tensors of this name

Send = Callable[[Link, Frame], None]
Receive = Callable[[Link, FrameKind, int, int], Frame]
Put = Callable[[Tensor, Tensor], Tensor]


class _Slice(NamedTuple):
    name: str
    start: int
    stop: int  # of the flat gradient


Piece = tuple[_Slice, ...]


@dataclass(frozen=True, slots=True)
class Siblings:
    """The links to the neighbours in the line; `ahead` is nearer to the first replica.

    `place` is 0 at the front. No replica may wait for a total that needs a piece which one behind
    it sends only after it has the total: the further back, the later totals are waited for.
    """

    ahead: Link | None = None
    behind: Link | None = None
    place: int = 0
    _buffers: dict[str, Tensor] = field(default_factory=dict)

    @property
    def sent_bytes(self) -> int:
        """What went to both so far."""
        return sum(link.sent.bytes for link in (self.ahead, self.behind) if link)

    def add_up(
        self, parameters: Mapping[str, Tensor], step: int, send: Send, receive: Receive
    ) -> None:
        """Give every parameter the gradient summed over all replicas; None where none has one."""
        pieces = list(enumerate(pieces_of(parameters)))
        late = [None] * pieces_ahead(self.place)

        def take(source: Link | None, number: int, piece: Piece, put: Put) -> None:
            if source is not None:
                frame = receive(source, FrameKind.SUM, step, number)
                for part, found in _taken(frame, piece, source):
                    put(_flat(parameters[part.name], make=True)[part.start : part.stop], found)

        for up, down in zip([*pieces, *late], [*late, *pieces], strict=True):
            if up is not None:
                take(self.behind, *up, Tensor.add_)
                if self.ahead is not None:
                    send(self.ahead, _frame(parameters, step, *up))
            if down is not None:
                take(self.ahead, *down, Tensor.copy_)
                if self.behind is not None:
                    # A copy: links in memory hand the tensors over, and gradients are to change.
                    send(self.behind, _frame(parameters, step, *down, copy=True))

    def check(self, part: nn.Module) -> None:
        """Remember the part's buffers; raise ModelError where they are others than before.

        What layers learn besides gradients would be different on every replica.
        """
        for name, buffer in part.named_buffers():
            known = self._buffers.setdefault(name, buffer.detach().clone())
            if not torch.equal(known, buffer):
                raise ModelError(
                    f"the model changes its buffer {name} while it trains, as running statistics "
                    "are, so replicas of a stage would differ: set scheduler.replicas = false"
                )

    def close(self, error: str | LinkError = "") -> None:
        for link in (self.ahead, self.behind):
            if link is not None:
                link.close(error)


def pieces_of(parameters: Mapping[str, Tensor]) -> Iterator[Piece]:
    """The gradients cut into what a frame takes, in the same way on every replica."""
    piece: list[_Slice] = []
    size = 0
    for name, parameter in parameters.items():
        most = max(PIECE_BYTES // parameter.element_size(), 1)
        for start in range(0, parameter.numel(), most):
            stop = min(start + most, parameter.numel())
            bytes_here = (stop - start) * parameter.element_size()
            if piece and (size + bytes_here > PIECE_BYTES or len(piece) == MOST_TENSORS):
                yield tuple(piece)
                piece, size = [], 0
            piece.append(_Slice(name, start, stop))
            size += bytes_here
    if piece:
        yield tuple(piece)


def _frame(
    parameters: Mapping[str, Tensor], step: int, number: int, piece: Piece, *, copy: bool = False
) -> Frame:
    tensors = {
        _SUM + part.name: _flat(parameters[part.name])[part.start : part.stop]
        for part in piece
        if parameters[part.name].grad is not None
    }
    if copy:
        tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    return Frame(kind=FrameKind.SUM, step=step, micro_batch=number, tensors=tensors)


def _taken(frame: Frame, piece: Piece, source: Link) -> Iterator[tuple[_Slice, Tensor]]:
    """What a frame holds of a piece. Raises ProtocolError where it holds anything else."""
    parts = {_SUM + part.name: part for part in piece}
    for name, tensor in frame.tensors.items():
        part = parts.get(name)
        if part is None or tensor.shape != (part.stop - part.start,):
            raise ProtocolError(
                f"{source.peer} sent {tuple(tensor.shape)} of the gradient {name!r}, where the "
                f"parts {sorted(parts)} were due: replicas of a stage hold different blocks"
            )
        yield part, tensor


def _flat(parameter: Tensor, *, make: bool = False) -> Tensor:
    """A view of the gradient, which begins as zeros where there is none and one is to be made."""
    if parameter.grad is None and make:
        parameter.grad = torch.zeros_like(parameter)
    assert parameter.grad is not None
    parameter.grad = parameter.grad.contiguous()
    return parameter.grad.view(-1)

"""Gradients that are summed over several workers before the optimizer step.

*Replicas* of a stage all-reduce the gradients of their blocks along a line. Sums of pieces pass
from the last replica up to the first, which has the total then, and totals pass back down while
later pieces are still on their way up. All replicas end up with the same bits, so they take the
same optimizer step and stay equal; their sum is that of the unsplit model in another order. Every
link of the line carries the gradients (never rounded by a codec) once each way, and holds no more
than a few pieces.

*Shared* parameters (T5's relative bias, DeBERTa's relative embeddings) are held by every stage that
runs blocks. Their gradients are added up the chain and the sum comes back down, so all stages take
the same step. A *borrowed* table (output layers that reuse the embedding) is held by the last
stage; the first one gets the rows of a step and returns their gradients. Parts without such
parameters need none of the methods that are called here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch import Tensor, nn

from collapipe_flwr.core.errors import LinkError, ModelError, ProtocolError
from collapipe_flwr.core.schedule import PIECE_BYTES, count_pieces_ahead
from collapipe_flwr.pipeline.link import Frame, FrameKind, Link

if TYPE_CHECKING:
    from collapipe_flwr.models.part import Borrower, LossPart
    from collapipe_flwr.pipeline.optimizer import Optimizer

MOST_TENSORS = 64  # of a frame
ROWS = "rows/"  # and the key of a table: tensors of BEGIN and ROWS frames
SUM = "sum/"  # codecs leave tensors of this name alone
SHARED = "shared/"

Send = Callable[[Link, Frame], None]
Receive = Callable[[Link, FrameKind, int, int], Frame]


class _Slice(NamedTuple):
    name: str
    start: int
    stop: int  # of the flat gradient


Piece = tuple[_Slice, ...]


@dataclass(frozen=True, slots=True)
class Siblings:
    """The links of a replica to its neighbours in the line; `ahead` is nearer to the first one.

    `place` is 0 at the front. Replicas further back wait for totals later, so that none waits for
    a total that needs a piece which a replica behind it has not sent yet.
    """

    ahead: Link | None = None
    behind: Link | None = None
    place: int = 0
    _buffers: dict[str, Tensor] = field(default_factory=dict)

    @property
    def sent_bytes(self) -> int:
        """Bytes sent to both neighbours so far."""
        return sum(link.sent.bytes for link in (self.ahead, self.behind) if link)

    def all_reduce(
        self, parameters: Mapping[str, Tensor], step: int, send: Send, receive: Receive
    ) -> None:
        """Give every parameter the gradient summed over all replicas; None where none has one."""
        pieces = list(enumerate(cut_pieces(parameters)))
        late = [None] * count_pieces_ahead(self.place)

        def take(
            source: Link | None, number: int, piece: Piece, put: Callable[[Tensor, Tensor], Tensor]
        ) -> None:
            if source is not None:
                frame = receive(source, FrameKind.SUM, step, number)
                for part, found in _read_piece(frame, piece, source):
                    put(_flatten(parameters[part.name], make=True)[part.start : part.stop], found)

        for up, down in zip([*pieces, *late], [*late, *pieces], strict=True):
            if up is not None:
                take(self.behind, *up, Tensor.add_)
                if self.ahead is not None:
                    send(self.ahead, _make_frame(parameters, step, *up))
            if down is not None:
                take(self.ahead, *down, Tensor.copy_)
                if self.behind is not None:
                    # A copy: links in memory hand tensors over, and these gradients still change.
                    send(self.behind, _make_frame(parameters, step, *down, copy=True))

    def check(self, part: nn.Module) -> None:
        """Remember the part's buffers; raise ModelError if they differ from those remembered.

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


def cut_pieces(parameters: Mapping[str, Tensor]) -> Iterator[Piece]:
    """Cut gradients into pieces of one frame, in the same way on every replica."""
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


def _make_frame(
    parameters: Mapping[str, Tensor], step: int, number: int, piece: Piece, *, copy: bool = False
) -> Frame:
    tensors = {
        SUM + part.name: _flatten(parameters[part.name])[part.start : part.stop]
        for part in piece
        if parameters[part.name].grad is not None
    }
    if copy:
        tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    return Frame(kind=FrameKind.SUM, step=step, micro_batch=number, tensors=tensors)


def _read_piece(frame: Frame, piece: Piece, source: Link) -> Iterator[tuple[_Slice, Tensor]]:
    """Yield what a frame holds of a piece. Raises ProtocolError where it holds anything else."""
    parts = {SUM + part.name: part for part in piece}
    for name, tensor in frame.tensors.items():
        part = parts.get(name)
        if part is None or tensor.shape != (part.stop - part.start,):
            raise ProtocolError(
                f"{source.peer} sent {tuple(tensor.shape)} of the gradient {name!r}, where the "
                f"parts {sorted(parts)} were due: replicas of a stage hold different blocks"
            )
        yield part, tensor


def _flatten(parameter: Tensor, *, make: bool = False) -> Tensor:
    """Return a flat view of the gradient; with ``make``, zeros where there is none."""
    if parameter.grad is None and make:
        parameter.grad = torch.zeros_like(parameter)
    assert parameter.grad is not None
    parameter.grad = parameter.grad.contiguous()
    return parameter.grad.view(-1)


def find_shared_parameters(part: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trainable parameters of ``part`` that other stages hold too, by key."""
    find = getattr(part, "shared_parameters", dict)
    return cast("dict[str, nn.Parameter]", find())


def add_shared(
    part: nn.Module, behind: Mapping[str, Tensor], optimizer: Optimizer
) -> dict[str, Tensor]:
    """Sum shared parameters' gradients of this stage and those behind, by frame name.

    The sum begins with the proximal term, which counts once and not on every stage.
    """
    total = {name: tensor for name, tensor in behind.items() if name.startswith(SHARED)}
    for key, parameter in find_shared_parameters(part).items():
        name = SHARED + key
        if name not in total:
            optimizer.add_proximal((key,))
        own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        total[name] = total[name] + own if name in total else own.clone()
    return total


def take_shared(part: nn.Module, total: Mapping[str, Tensor]) -> None:
    """Give shared parameters the summed gradient. Raises ProtocolError where one is missing."""
    for key, parameter in find_shared_parameters(part).items():
        gradient = total.get(SHARED + key)
        if gradient is None or gradient.shape != parameter.shape:
            raise ProtocolError(f"the sum of gradients of the shared {key!r} is missing")
        parameter.grad = gradient.clone()


def borrows(part: nn.Module) -> bool:
    """Return whether ``part`` reads rows of a table on the last stage."""
    return bool(getattr(part, "borrowed_keys", ()))


def collect_rows(part: nn.Module, batch: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Collect the ids of all rows that a step reads, by table."""
    if not borrows(part):
        return {}
    needed = [cast("Borrower", part).rows_needed(inputs) for inputs in batch]
    return {key: torch.unique(torch.cat([ids[key] for ids in needed])) for key in needed[0]}


def load_rows(part: nn.Module, ids: Mapping[str, Tensor], rows: Mapping[str, Tensor]) -> None:
    """Give the first part the rows that the last one sent."""
    for key, which in ids.items():
        if ROWS + key not in rows:
            raise ProtocolError(f"the last stage sent no rows of the table {key!r}")
        cast("Borrower", part).load_rows(key, which, rows[ROWS + key])


def lend_rows(part: nn.Module, ids: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return rows of the last part's tables. Raises ProtocolError for rows that do not exist."""
    lender = cast("LossPart", part)
    try:
        return {ROWS + key: lender.rows(key, which) for key, which in ids.items()}
    except (KeyError, IndexError, AttributeError) as error:
        raise ProtocolError(f"the first stage asks for rows that do not exist: {error}") from error


def read_row_gradients(part: nn.Module, ids: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the gradients of the rows on the first part, by frame name."""
    return {ROWS + key: cast("Borrower", part).row_gradients(key) for key in ids}


def add_row_gradients(
    part: nn.Module, ids: Mapping[str, Tensor], gradients: Mapping[str, Tensor]
) -> None:
    """Add gradients to the last part's tables. Raises ProtocolError where they do not fit."""
    for key, which in ids.items():
        gradient = gradients.get(ROWS + key)
        if gradient is None or len(gradient) != len(which):
            raise ProtocolError(f"the first stage returned no gradients of the table {key!r}")
        cast("LossPart", part).add_row_gradients(key, which, gradient)

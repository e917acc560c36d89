"""The loss of a language model over pieces of a batch, so that its scores are never there at once.

Scores are a head's largest tensors: eight texts of 512 tokens have 2 GiB of them where a vocabulary
has 128,000, and a loss and its gradient hold three tensors of that size. A head works token by
token, so the mean over all labels is that of pieces, each weighted with its labels, up to the
rounding of a sum. Only tokens that are followed by a label take part: of a chat, those of answers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional

from collapipe_flwr.core.domain import IGNORED_LABEL

PIECE_BYTES = 64 * 2**20  # of the scores of a piece: enough tokens for products to be fast
_SCORE_BYTES = 4

LossOf = Callable[[Tensor, Tensor], Tensor]  # hidden states (B, T, D), labels (B, T) -> mean


@dataclass(frozen=True, slots=True)
class Piece:
    """A batch of tokens from a larger one, each ahead of the label that follows it there.

    The last token of a row predicts nothing, and stands for no token of that batch.
    """

    places_BT: Tensor  # among the tokens of the larger batch, flattened
    labels_BT: Tensor
    stands_BT: Tensor  # whether a token is one of the larger batch, not there to fill its row
    share: float  # of the larger batch's labels


def count_piece_tokens(vocabulary: int) -> int:
    """Return how many tokens a piece may have."""
    return max(PIECE_BYTES // (_SCORE_BYTES * vocabulary), 2)


def cut_tokens(labels_BT: Tensor, most: int, *, every: bool = False) -> list[Piece]:
    """Cut a batch into pieces of at most ``most`` labelled tokens, or with ``every`` of any.

    Empty if the whole batch is one piece. No row is longer than a text of the batch, so that no
    model meets more positions than it knows.
    """
    following = functional.pad(labels_BT, (0, 1), value=IGNORED_LABEL)[:, 1:].flatten()
    labelled = following != IGNORED_LABEL
    places = (torch.ones_like(labelled) if every else labelled).nonzero().squeeze(1)
    width = min(labels_BT.shape[1], most)
    if labels_BT.numel() <= most or width < 2 or not len(places):
        return []
    rows = -(-len(places) // (width - 1))
    pieces = -(-rows // (most // width))
    columns = (
        _fill_rows(places, rows, width, 0),
        _fill_rows(following[places], rows, width, IGNORED_LABEL).roll(1, 1),
        _fill_rows(torch.ones_like(places, dtype=torch.bool), rows, width, False),
    )
    total = max(int(labelled.sum()), 1)
    return [
        Piece(places_BT, labels_BT, stands_BT, int((labels_BT != IGNORED_LABEL).sum()) / total)
        for places_BT, labels_BT, stands_BT in zip(
            *(column.tensor_split(pieces) for column in columns), strict=True
        )
    ]


def _fill_rows(values: Tensor, rows: int, width: int, filler: int | bool) -> Tensor:
    """Lay values into rows of ``width``, of which the last place is left free."""
    lacking = rows * (width - 1) - len(values)
    filled = functional.pad(values, (0, lacking), value=filler).view(rows, width - 1)
    return functional.pad(filled, (0, 1), value=filler)


def average_pieces(loss_of: LossOf, hidden_BTD: Tensor, pieces: list[Piece]) -> Tensor:
    """Compute the mean loss over all labels; ``loss_of`` is that of a piece's own labels.

    It must be frozen: the gradient of hidden states is computed at once, and only it is kept for
    the backward pass.
    """
    if torch.is_grad_enabled() and hidden_BTD.requires_grad:
        mean: Tensor = _MeanOfPieces.apply(hidden_BTD, loss_of, pieces)  # type: ignore[no-untyped-call]
        return mean
    tokens, mean = hidden_BTD.flatten(0, 1), hidden_BTD.new_zeros((), dtype=torch.float32)
    for piece in filter(lambda piece: piece.share, pieces):
        mean = mean + loss_of(tokens[piece.places_BT], piece.labels_BT) * piece.share
    return mean


class _MeanOfPieces(torch.autograd.Function):
    """The mean, and its gradient by hidden states, piece by piece."""

    @staticmethod
    def forward(ctx: Any, hidden_BTD: Tensor, loss_of: LossOf, pieces: list[Piece]) -> Tensor:
        tokens, mean = hidden_BTD.flatten(0, 1), hidden_BTD.new_zeros((), dtype=torch.float32)
        gradient = torch.zeros_like(tokens)
        for piece in filter(lambda piece: piece.share, pieces):
            taken = tokens[piece.places_BT].requires_grad_()
            # What autograd keeps is dropped here, and the hooks hide it from those of a caller.
            with torch.enable_grad(), saved_tensors_hooks(_same, _same):
                loss = loss_of(taken, piece.labels_BT) * piece.share
            (found,) = torch.autograd.grad(loss, taken)
            gradient.index_add_(0, piece.places_BT.flatten(), found.flatten(0, 1))
            mean += loss.detach()
        ctx.save_for_backward(gradient.view_as(hidden_BTD))
        return mean

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient_BTD,) = ctx.saved_tensors
        return gradient_BTD * gradients[0], None, None


def _same(tensor: Tensor) -> Tensor:
    return tensor

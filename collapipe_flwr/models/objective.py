"""What a model minimises: a mean loss, and what it is a mean over.

The step of a batch that is cut into micro-batches is that of the mean over the whole batch: each
micro-batch counts with its share of the weight.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from collapipe_flwr.core.errors import ModelError
from collapipe_flwr.core.imports import load_function
from collapipe_flwr.models.layout import Holdings
from collapipe_flwr.models.part import Part
from collapipe_flwr.models.tasks import best_class
from collapipe_flwr.models.validation import UNFIT, first_lines

Batch = Mapping[str, Tensor]
Loss = Callable[[Any, Batch], Tensor]  # outputs of the model's forward, batch -> scalar mean

LABELS = "labels"
EXAMPLES = "examples"


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """A loss and its weight.

    ``weight`` is what the mean runs over: ``labels`` (those that ``targets`` counts), ``examples``,
    or the name of a tensor of the batch, whose sum it is. ``loss`` None is the model's own.
    """

    weight: str
    targets: Callable[[Tensor], int]
    loss: Loss | None = None

    def weight_of(self, batch: Batch) -> float:
        """What the mean loss of this batch runs over; raises ModelError if a tensor is missing."""
        if self.weight == EXAMPLES:
            return _examples(batch)
        if self.weight == LABELS:
            return self.targets(labels_of(batch))
        weights = _tensor(batch, self.weight).to("cpu")  # not every accelerator knows float64
        return float(weights.sum(dtype=torch.float64))

    def loss_of(self, outputs: Any, batch: Batch) -> Tensor:
        """The mean loss, a scalar; raises ModelError where there is none."""
        if self.loss is None:
            loss = outputs.get("loss") if isinstance(outputs, Mapping) else None
            if loss is None:
                raise ModelError(
                    "the model returned no loss: give the batch labels, or name a loss"
                )
        else:
            loss = _called(self.loss, outputs, batch)
        if not isinstance(loss, Tensor) or loss.dim():
            shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise ModelError(f"the loss must be one number, the mean over the batch, got {shape}")
        return loss


class LossPart(Part):
    """The last part of a model, whose ``outputs`` have a loss.

    It may own tables of which the embedding borrows rows (``borrowed``).
    """

    def __init__(
        self, model: nn.Module, holdings: Holdings, weights: Batch, objective: Objective
    ) -> None:
        super().__init__(model, holdings, weights)
        self._objective = objective

    @abstractmethod
    def outputs(self, hidden: Tensor, context: Batch) -> Any:
        """What the model's forward returns, from hidden states behind the last device."""

    def forward(self, hidden: Tensor, context: Batch) -> Tensor:
        """The loss: a scalar, the mean over this batch's own weight (``weight_of``).

        A batch that weighs nothing has loss 0, connected to ``hidden`` by zero gradients.
        """
        if self.weight_of(context) == 0:
            return hidden.sum() * 0.0
        return self._objective.loss_of(self.outputs(hidden, context), context)

    def judge(
        self, hidden: Tensor, context: Batch, *, scores: bool = False
    ) -> tuple[Tensor, Tensor]:
        """The loss, and the ids that the head holds for best, or all its scores.

        Ids are (B,) or (B, T), scores (B, C) or (B, T, C).
        """
        found = self.outputs(hidden, context)
        nothing = self.weight_of(context) == 0  # the library's mean is no number then
        loss = hidden.sum() * 0.0 if nothing else self._objective.loss_of(found, context)
        logits = scores_of(found)
        return loss, logits if scores else best_class(logits)

    def weight_of(self, context: Batch) -> float:
        """What the loss is a mean over: examples, target tokens, or the sum of their weights."""
        return self._objective.weight_of(context)

    def rows(self, key: str, ids: Tensor) -> Tensor:
        """A copy of these rows (U, D) of a table that the embedding borrows."""
        return self._table(key).detach()[ids].clone()

    def add_row_gradients(self, key: str, ids: Tensor, gradients: Tensor) -> None:
        """Add what the embedding's use of the rows contributes; call before the step."""
        table = self._table(key)
        if table.grad is None:
            table.grad = torch.zeros_like(table)
        table.grad.index_add_(0, ids, gradients.to(table.grad.dtype))

    def _table(self, key: str) -> nn.Parameter:
        return dict(self.named_parameters())[key]


def _called(loss: Loss, outputs: Any, batch: Batch) -> Any:
    try:
        return loss(outputs, batch)
    except UNFIT as cause:
        raise ModelError(
            f"the loss {loss.__module__}:{loss.__qualname__} fails: {type(cause).__name__}: "
            f"{first_lines(cause)}; the edge gets what forward does not read of a batch, here "
            f"{', '.join(sorted(repr(key) for key in batch if '/' not in key)) or 'nothing'}"
        ) from cause


def named_loss(path: str) -> Loss | None:
    """The loss that an import path leads to; None for an empty one. Raises ModelError."""
    found: Loss | None = load_function(path) if path else None
    return found


def scores_of(outputs: Any) -> Tensor:
    """The logits among what a model's forward returns; raises ModelError."""
    if isinstance(outputs, Mapping):
        outputs = outputs.get("logits")
    elif isinstance(outputs, (tuple, list)) and outputs:
        outputs = outputs[0]
    if not isinstance(outputs, Tensor):
        raise ModelError("the model's outputs hold no logits: let it return them as 'logits'")
    return outputs


def numbers_of(outputs: Any) -> list[Tensor]:
    """All floating tensors that a forward returns, in order."""
    leaves = tree_leaves(dict(outputs) if isinstance(outputs, Mapping) else outputs)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def labels_of(batch: Batch) -> Tensor:
    """The labels of a batch, as transformers or data sets call them; raises ModelError."""
    return _tensor(batch, "label" if LABELS not in batch and "label" in batch else LABELS)


def _examples(batch: Batch) -> int:
    """From the labels, or else from any tensor of a batch, or the shape of one that stays."""
    if LABELS in batch or "label" in batch:
        return len(labels_of(batch))
    own = sorted(key for key in batch if "/" not in key)
    shapes = sorted(key for key in batch if key.startswith("shape/"))
    if own:
        return len(batch[own[0]])
    if shapes:
        return int(batch[shapes[0]][0])
    raise _missing(LABELS)


def _tensor(batch: Batch, name: str) -> Tensor:
    if name not in batch:
        raise _missing(name)
    return batch[name]


def _missing(name: str) -> ModelError:
    return ModelError(
        f"the edge needs the tensor {name!r} to compute a loss: have the loader yield it, or give "
        "SplitModel another loss or weight"
    )

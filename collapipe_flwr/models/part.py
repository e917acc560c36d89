"""A part of a model: a skeleton in which only the part's own tensors exist.

Names stay absolute, so what goes in by ``load_weights`` comes out of ``state_dict`` under the
same keys, and the parts' dictionaries join to the whole model's.

Output layers often reuse the embedding table. With ``ties = "rows"`` the edge keeps the only
copy and its optimizer state. At the beginning of a step the control unit fetches the rows of the
tokens that occur (``rows_needed`` -> ``rows`` -> ``load_rows``), at its end it returns their
gradients (``row_gradients`` -> ``add_row_gradients``), before the edge's optimizer moves. The
sum is exact; per step 2 U D numbers travel for U distinct tokens instead of 2 V D. Rows may not
be kept for the next step: the output layer's gradient changes every row.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from collapipe_flwr.core.errors import ModelError
from collapipe_flwr.models.layout import Holdings, Owner
from collapipe_flwr.models.lora import can_quantize, quantize
from collapipe_flwr.models.skeleton import leave_holes, place_tensor, read_tensor
from collapipe_flwr.models.tasks import Batch, Objective, choose_best, scores_of

Weights = Mapping[str, Tensor]  # by absolute key


class Part(nn.Module):
    """Base of the parts; ``state_dict`` and ``named_parameters`` use absolute keys.

    ``named_parameters`` includes trainable replicas (they need gradients and updates here),
    ``state_dict`` does not (their owner reports them), nor what stays with its part.
    """

    def __init__(self, model: nn.Module, holdings: Holdings, weights: Weights) -> None:
        super().__init__()
        self.model: Any = model
        self._holdings = holdings
        self._layout = holdings.layout
        kept = {path for paths in holdings.all.values() for path in paths}
        leave_holes(model, [path for path in model.state_dict(keep_vars=True) if path not in kept])
        for key, paths in holdings.all.items():
            self._adopt(key, paths, weights)

    def load_weights(self, weights: Weights) -> None:
        """Overwrite values in place; optimizer state keeps pointing at the same tensors.

        Raises ModelError if a tensor is missing or has another shape.
        """
        with torch.no_grad():
            for key, paths in self._holdings.all.items():
                if key in self._layout.resident:
                    continue
                target = read_tensor(self.model, paths[0])
                target.copy_(require_tensor(weights, key, target.shape))

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:  # type: ignore[override]
        """Return owned tensors by absolute key, detached but not copied."""
        del args, kwargs
        owned = self._holdings.owned
        return {
            key: read_tensor(self.model, owned[key][0]).detach()
            for key in self._layout.select_travelling(owned)
        }

    def block_context(self) -> dict[str, Tensor]:
        """Return what blocks read beside hidden states, from an embedding's last forward."""
        return {}

    def held_bytes(self) -> int:
        """Return the bytes of all owned tensors, whether they travel or stay."""
        owned = self._holdings.owned.values()
        return sum(read_tensor(self.model, paths[0]).nbytes for paths in owned)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield owned parameters and replicas by absolute key."""
        del recurse, remove_duplicate
        for key, paths in self._holdings.all.items():
            tensor = read_tensor(self.model, paths[0])
            if isinstance(tensor, nn.Parameter):
                yield f"{prefix}.{key}" if prefix else key, tensor

    def shared_parameters(self) -> dict[str, nn.Parameter]:
        """Return trainable parameters that other parts hold too: their gradients must be summed."""
        return {
            key: parameter
            for key, parameter in self.named_parameters()
            if key in self._layout.shared_keys and parameter.requires_grad
        }

    def owner_of(self, key: str) -> Owner:
        """Return what a parameter belongs to, however the model is cut."""
        return self._layout.owners[key]

    def _adopt(self, key: str, paths: tuple[str, ...], weights: Weights) -> None:
        blueprint = read_tensor(self.model, paths[0])
        value = require_tensor(weights, key, blueprint.shape)
        if key in self._layout.resident and self._quantize(paths, value):
            return
        tensor = value.detach().to(blueprint.dtype, copy=True)
        if isinstance(blueprint, nn.Parameter):
            trains = blueprint.requires_grad and key not in self._layout.frozen
            tensor = nn.Parameter(tensor, requires_grad=trains)
        for path in paths:
            place_tensor(self.model, path, tensor)

    def _quantize(self, paths: tuple[str, ...], value: Tensor) -> bool:
        """Keep a resident matrix in the layout's ``frozen_dtype``; False if its layer cannot."""
        dtype = self._layout.frozen_dtype
        modules = [self.model.get_submodule(path.rpartition(".")[0]) for path in paths]
        fits = all(path.endswith(".weight") for path in paths) and all(map(can_quantize, modules))
        if dtype == "float32" or value.dim() != 2 or not fits:
            return False
        if dtype == "nf4" and any(map(self._is_table, modules)):
            dtype = "bfloat16"
        quantize(modules, value, dtype)
        return True

    def _is_table(self, module: nn.Module) -> bool:
        """Return whether rows are tokens; transformers does not round those to 4 bits either."""
        head = self.model.get_output_embeddings()
        return isinstance(module, nn.Embedding) or module is getattr(head, "base_layer", head)


class Borrower(Part):
    """A part that reads rows of tables at the edge; it holds none before ``load_rows``."""

    def __init__(
        self,
        model: nn.Module,
        holdings: Holdings,
        weights: Weights,
        ids_of: Mapping[str, tuple[str, ...]],
    ) -> None:
        """Build the part; ``ids_of`` names the inputs that may hold row numbers of each table."""
        super().__init__(model, holdings, weights)
        self._ids_of = ids_of
        self._borrowed = {
            key: [BorrowedTable(self.model.get_submodule(p.rpartition(".")[0])) for p in paths]
            for key, paths in self._layout.ties.items()
        }

    @property
    def borrowed_keys(self) -> tuple[str, ...]:
        """The tables of the edge that this part reads row by row."""
        return tuple(self._borrowed)

    def rows_needed(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the rows to fetch from the edge for a whole step's inputs: key to token ids."""
        return {
            key: torch.unique(torch.cat([inputs[n].flatten() for n in names if n in inputs]))
            for key, names in self._ids_of.items()
        }

    def load_rows(self, key: str, ids: Tensor, rows: Tensor) -> None:
        """Set the rows that the edge's ``rows`` returned for ``ids``."""
        for table in self._borrowed[key]:
            table.load(ids, rows)

    def row_gradients(self, key: str) -> Tensor:
        """Return the gradients (U, D) of the loaded rows, for the edge's ``add_row_gradients``."""
        return torch.stack([table.gradients() for table in self._borrowed[key]]).sum(0)


class BorrowedTable:
    """An embedding module that holds only the rows of one step."""

    def __init__(self, module: nn.Module) -> None:
        assert isinstance(module, nn.Embedding)
        self._module = module
        self._padding_id = module.padding_idx
        self._ids: Tensor | None = None
        module.register_forward_pre_hook(self._translate)

    def load(self, ids: Tensor, rows: Tensor) -> None:
        """Replace all rows by those (U, D) of the ascending token ids (U,)."""
        if rows.shape != (len(ids), self._module.embedding_dim):
            raise ModelError(
                f"{len(ids)} rows of width {self._module.embedding_dim} were asked for, "
                f"got shape {tuple(rows.shape)}"
            )
        self._ids = ids
        self._module.weight = nn.Parameter(rows.detach().clone())
        padding = self._padding_id  # its row gets no gradient
        if padding is not None and not self._holds_all(ids):
            place = (ids == padding).nonzero()
            padding = int(place[0]) if len(place) else None
        self._module.padding_idx = padding

    def gradients(self) -> Tensor:
        """Return the gradients (U, D) of the rows last loaded, zero where no loss reached them."""
        rows = self._module.weight
        if self._ids is None:
            raise ModelError("no rows were loaded, so there are no gradients to return")
        return torch.zeros_like(rows) if rows.grad is None else rows.grad

    def _holds_all(self, ids: Tensor) -> bool:
        return len(ids) == self._module.num_embeddings

    def _translate(self, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Translate token ids to row numbers, ahead of the module's own lookup."""
        del module
        if self._ids is None:
            raise ModelError("load the rows of this step before the embedding runs")
        if self._holds_all(self._ids):
            return inputs
        ids, *rest = inputs
        rows = torch.searchsorted(self._ids, ids.contiguous()).clamp(max=len(self._ids) - 1)
        if not torch.equal(self._ids[rows], ids):
            raise ModelError("a token occurs whose row was not loaded for this step")
        return (rows, *rest)


class LossPart(Part):
    """The last part of a model, whose ``outputs`` have a loss.

    It may own tables of which the embedding borrows rows. ``piece_tokens`` are the most tokens of
    which scores and their gradients are there at once; None without limit.
    """

    piece_tokens: int | None = None

    def __init__(
        self, model: nn.Module, holdings: Holdings, weights: Weights, objective: Objective
    ) -> None:
        super().__init__(model, holdings, weights)
        self._objective = objective

    @abstractmethod
    def outputs(self, hidden: Tensor, context: Batch) -> Any:
        """Compute the result of the model's forward from hidden states after the last device."""

    def forward(self, hidden: Tensor, context: Batch) -> Tensor:
        """Compute the loss: a scalar, the mean over this batch's own weight (``weight_of``).

        A batch that weighs nothing has loss 0, connected to ``hidden`` by zero gradients.
        """
        if self.weight_of(context) == 0:
            return hidden.sum() * 0.0
        return self._objective.loss_of(self.outputs(hidden, context), context)

    def judge(
        self, hidden: Tensor, context: Batch, *, scores: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Compute the loss, and the predicted ids, or with ``scores`` all logits.

        Ids are (B,) or (B, T), scores (B, C) or (B, T, C).
        """
        found = self.outputs(hidden, context)
        nothing = self.weight_of(context) == 0  # the library's mean would be NaN
        loss = hidden.sum() * 0.0 if nothing else self._objective.loss_of(found, context)
        logits = scores_of(found)
        return loss, logits if scores else choose_best(logits)

    def weight_of(self, context: Batch) -> float:
        """Return what the loss is a mean over: examples, target tokens, or a sum of weights."""
        return self._objective.weight_of(context)

    def rows(self, key: str, ids: Tensor) -> Tensor:
        """Return a copy of these rows (U, D) of a table that the embedding borrows."""
        return self._table(key).detach()[ids].clone()

    def add_row_gradients(self, key: str, ids: Tensor, gradients: Tensor) -> None:
        """Add what the embedding's use of the rows contributes; call before the step."""
        table = self._table(key)
        if table.grad is None:
            table.grad = torch.zeros_like(table)
        table.grad.index_add_(0, ids, gradients.to(table.grad.dtype))

    def _table(self, key: str) -> nn.Parameter:
        return dict(self.named_parameters())[key]


def normalises_batches(model: nn.Module) -> bool:
    """Return whether any layer computes with the mean of the whole batch."""
    return any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())


def require_tensor(weights: Weights, key: str, shape: torch.Size) -> Tensor:
    """Return the tensor of a key; raises ModelError if it is missing or has another shape."""
    try:
        value = weights[key]
    except KeyError as cause:
        raise ModelError(f"the weights lack {key!r}: pass all of this model") from cause
    if value.shape != shape:
        raise ModelError(
            f"the weights hold {key!r} with shape {tuple(value.shape)}, the model needs "
            f"{tuple(shape)}"
        )
    return value

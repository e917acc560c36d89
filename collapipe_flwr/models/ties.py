"""One table on two machines: the edge owns it, the control unit borrows the rows of a step.

Output layers often reuse the embedding table. With ``ties = "rows"`` the edge keeps the only
copy and its optimiser state. At the beginning of a step the control unit fetches the rows of the
tokens that occur (``rows_needed`` -> ``rows`` -> ``load_rows``), at its end it returns their
gradients (``row_gradients`` -> ``add_row_gradients``), before the edge's optimiser moves. The
sum is exact; per step 2 U D numbers travel for U distinct tokens instead of 2 V D. Rows may not
be kept for the next step: the output layer's gradient moves every row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from collapipe_flwr.core.errors import ModelError


class BorrowedTable:
    """An embedding module that holds only the rows of one step."""

    def __init__(self, module: nn.Module) -> None:
        assert isinstance(module, nn.Embedding)
        self._module = module
        self._padding_id = module.padding_idx
        self._ids: Tensor | None = None
        module.register_forward_pre_hook(self._translate)

    def load(self, ids: Tensor, rows: Tensor) -> None:
        """Take the rows (U, D) of the ascending token ids (U,); earlier rows are forgotten."""
        if rows.shape != (len(ids), self._module.embedding_dim):
            raise ModelError(
                f"{len(ids)} rows of width {self._module.embedding_dim} were asked for, "
                f"got shape {tuple(rows.shape)}"
            )
        self._ids = ids
        self._module.weight = nn.Parameter(rows.detach().clone())
        self._module.padding_idx = self._padding_row(ids)

    def gradients(self) -> Tensor:
        """The gradients (U, D) of the rows last loaded, zero where no loss reached them."""
        rows = self._module.weight
        if self._ids is None:
            raise ModelError("no rows were loaded, so there are no gradients to return")
        return torch.zeros_like(rows) if rows.grad is None else rows.grad

    def _padding_row(self, ids: Tensor) -> int | None:
        """Padding keeps having no gradient under its number within the rows."""
        if self._padding_id is None or self._holds_all(ids):
            return self._padding_id
        place = (ids == self._padding_id).nonzero()
        return int(place[0]) if len(place) else None

    def _holds_all(self, ids: Tensor) -> bool:
        return len(ids) == self._module.num_embeddings

    def _translate(self, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """From token ids to row numbers, ahead of the library's own lookup."""
        del module
        if self._ids is None:
            raise ModelError("load the rows of this step before the embedding runs")
        if self._holds_all(self._ids):
            return inputs
        ids, *rest = inputs
        rows = torch.searchsorted(self._ids, ids).clamp(max=len(self._ids) - 1)
        if not torch.equal(self._ids[rows], ids):
            raise ModelError("a token occurs whose row was not loaded for this step")
        return (rows, *rest)


def tokens_of(inputs: Mapping[str, Tensor]) -> Tensor:
    """The distinct token ids of a batch, ascending."""
    ids: Tensor = torch.unique(inputs["input_ids"])
    return ids


def add_rows(table: nn.Parameter, ids: Tensor, gradients: Tensor) -> None:
    """Add the gradients (U, D) of borrowed rows to the table's own."""
    if table.grad is None:
        table.grad = torch.zeros_like(table)
    table.grad.index_add_(0, ids, gradients.to(table.grad.dtype))

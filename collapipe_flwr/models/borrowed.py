"""Tables that the edge owns and the embedding reads row by row.

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
from collapipe_flwr.models.layout import Holdings
from collapipe_flwr.models.part import Part, Weights


class Borrower(Part):
    """A part that reads rows of tables at the edge, which hold none until ``load_rows``."""

    def __init__(
        self, model: nn.Module, holdings: Holdings, weights: Weights, ids_of: Mapping[str, str]
    ) -> None:
        """``ids_of`` names the input that holds the row numbers of each of these tables."""
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
        """The rows to fetch from the edge for a whole step's inputs: key to token ids."""
        return {key: torch.unique(inputs[name]) for key, name in self._ids_of.items()}

    def load_rows(self, key: str, ids: Tensor, rows: Tensor) -> None:
        """Take the rows that the edge's ``rows`` gave for ``ids``."""
        for table in self._borrowed[key]:
            table.load(ids, rows)

    def row_gradients(self, key: str) -> Tensor:
        """The gradients (U, D) of the loaded rows, for the edge's ``add_row_gradients``."""
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
        rows = torch.searchsorted(self._ids, ids.contiguous()).clamp(max=len(self._ids) - 1)
        if not torch.equal(self._ids[rows], ids):
            raise ModelError("a token occurs whose row was not loaded for this step")
        return (rows, *rest)

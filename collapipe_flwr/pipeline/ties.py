"""Parameters that several stages use: their gradients are summed before the optimizer step.

*Shared* parameters (T5's relative bias, DeBERTa's relative embeddings) have a replica on every
stage that runs blocks. Their gradients are added up the chain and the sum comes back down, so all
replicas take the same step. A *borrowed* table (output layers that reuse the embedding) lives on
the last stage; the first one gets the rows of a step and returns their gradients.

Parts without such parameters need none of the methods that are asked for here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from collapipe_flwr.core.errors import ProtocolError

if TYPE_CHECKING:
    from torch import nn

    from collapipe_flwr.models.part import Borrower, LossPart
    from collapipe_flwr.pipeline.optimizer import Optimizer

_SHARED = "shared/"
ROWS = "rows/"  # and the key of a table: tensors of BEGIN and ROWS frames


def shared_parameters(part: nn.Module) -> dict[str, nn.Parameter]:
    """The trainable parameters of ``part`` that other stages hold too, by key."""
    find = getattr(part, "shared_parameters", dict)
    return cast("dict[str, nn.Parameter]", find())


def add_shared(
    part: nn.Module, behind: Mapping[str, Tensor], optimizer: Optimizer
) -> dict[str, Tensor]:
    """Gradients of shared parameters, summed over this stage and those behind, by frame name.

    The sum begins with the proximal term, which counts once and not on every stage.
    """
    total = {name: tensor for name, tensor in behind.items() if name.startswith(_SHARED)}
    for key, parameter in shared_parameters(part).items():
        name = _SHARED + key
        if name not in total:
            optimizer.add_proximal((key,))
        own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        total[name] = total[name] + own if name in total else own.clone()
    return total


def take_shared(part: nn.Module, total: Mapping[str, Tensor]) -> None:
    """Give every replica the summed gradient. Raises ProtocolError where one is missing."""
    for key, parameter in shared_parameters(part).items():
        gradient = total.get(_SHARED + key)
        if gradient is None or gradient.shape != parameter.shape:
            raise ProtocolError(f"the sum of gradients of the shared {key!r} is missing")
        parameter.grad = gradient.clone()


def borrows(part: nn.Module) -> bool:
    """Whether ``part`` reads rows of a table on the last stage."""
    return bool(getattr(part, "borrowed_keys", ()))


def wanted_rows(part: nn.Module, batch: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The ids of all rows that a step reads, by table."""
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
    """The rows of the last part's tables. Raises ProtocolError for rows that do not exist."""
    lender = cast("LossPart", part)
    try:
        return {ROWS + key: lender.rows(key, which) for key, which in ids.items()}
    except (KeyError, IndexError, AttributeError) as error:
        raise ProtocolError(f"the first stage asks for rows that do not exist: {error}") from error


def row_gradients(part: nn.Module, ids: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The gradients of the rows on the first part, by frame name."""
    return {ROWS + key: cast("Borrower", part).row_gradients(key) for key in ids}


def add_row_gradients(
    part: nn.Module, ids: Mapping[str, Tensor], gradients: Mapping[str, Tensor]
) -> None:
    """Add them to the last part's tables. Raises ProtocolError where they do not fit."""
    for key, which in ids.items():
        gradient = gradients.get(ROWS + key)
        if gradient is None or len(gradient) != len(which):
            raise ProtocolError(f"the first stage returned no gradients of the table {key!r}")
        cast("LossPart", part).add_row_gradients(key, which, gradient)

"""A part of a model: a skeleton in which only the part's own tensors exist.

Names stay absolute, so what goes in by ``load_weights`` comes out of ``state_dict`` under the
same keys, and the parts' dictionaries join to the whole model's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from collapipe_flwr.core.errors import ModelError
from collapipe_flwr.models.skeleton import leave_hole, place_tensor, read_tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Holdings:
    """The tensors that a part holds: key to the paths that lead to it.

    ``replicas`` are read here but owned by another part; ``frozen`` keys never train.
    """

    owned: Mapping[str, tuple[str, ...]]
    replicas: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    frozen: frozenset[str] = frozenset()

    @property
    def all(self) -> dict[str, tuple[str, ...]]:
        """Owned and replicated tensors."""
        return {**self.owned, **self.replicas}


class Part(nn.Module):
    """Base of the parts; ``state_dict`` and ``named_parameters`` speak absolute keys.

    ``named_parameters`` includes trainable replicas (they need gradients and updates here),
    ``state_dict`` does not (their owner reports them).
    """

    def __init__(
        self, model: PreTrainedModel, holdings: Holdings, weights: Mapping[str, Tensor]
    ) -> None:
        super().__init__()
        self.model = model
        self._holdings = holdings
        _drop_all_but(model, holdings)
        for key, paths in holdings.all.items():
            self._adopt(key, paths, _pick(weights, key))

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Overwrite values in place; optimiser state keeps pointing at the same tensors.

        Raises ModelError if a tensor is missing or has another shape.
        """
        with torch.no_grad():
            for key, paths in self._holdings.all.items():
                target = read_tensor(self.model, paths[0])
                target.copy_(_fitting(key, _pick(weights, key), target))

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:  # type: ignore[override]
        """Owned tensors by absolute key, detached but not copied."""
        del args, kwargs
        owned = self._holdings.owned
        return {key: read_tensor(self.model, paths[0]).detach() for key, paths in owned.items()}

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Owned parameters and replicas by absolute key."""
        del recurse, remove_duplicate
        for key, paths in self._holdings.all.items():
            tensor = read_tensor(self.model, paths[0])
            if isinstance(tensor, nn.Parameter):
                yield f"{prefix}.{key}" if prefix else key, tensor

    def replicated_parameters(self) -> dict[str, nn.Parameter]:
        """Trainable parameters whose gradients other parts hold too: sum them before a step."""
        found = {key: read_tensor(self.model, p[0]) for key, p in self._holdings.replicas.items()}
        return {k: p for k, p in found.items() if isinstance(p, nn.Parameter) and p.requires_grad}

    def _adopt(self, key: str, paths: tuple[str, ...], value: Tensor) -> None:
        blueprint = read_tensor(self.model, paths[0])
        tensor = _fitting(key, value, blueprint).detach().clone()
        if isinstance(blueprint, nn.Parameter):
            trains = blueprint.requires_grad and key not in self._holdings.frozen
            tensor = nn.Parameter(tensor, requires_grad=trains)
        for path in paths:
            place_tensor(self.model, path, tensor)


def _drop_all_but(model: nn.Module, holdings: Holdings) -> None:
    kept = {path for paths in holdings.all.values() for path in paths}
    for path in model.state_dict():
        if path not in kept:
            leave_hole(model, path)


def _pick(weights: Mapping[str, Tensor], key: str) -> Tensor:
    if key not in weights:
        raise ModelError(f"the weights lack {key!r}; pass all keys of this part")
    return weights[key]


def _fitting(key: str, value: Tensor, blueprint: Tensor) -> Tensor:
    if value.shape != blueprint.shape:
        raise ModelError(
            f"the weights hold {key!r} with shape {tuple(value.shape)}, "
            f"the model needs {tuple(blueprint.shape)}"
        )
    return value

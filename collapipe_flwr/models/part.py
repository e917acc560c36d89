"""A part of a model: a skeleton in which only the part's own tensors exist.

Names stay absolute, so what goes in by ``load_weights`` comes out of ``state_dict`` under the
same keys, and the parts' dictionaries join to the whole model's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from collapipe_flwr.core.errors import ModelError
from collapipe_flwr.models.layout import Holdings
from collapipe_flwr.models.quantization import can_quantize, quantize, share_quantized
from collapipe_flwr.models.skeleton import leave_holes, place_tensor, read_tensor

Weights = Mapping[str, Tensor]  # by absolute key


class Part(nn.Module):
    """Base of the parts; ``state_dict`` and ``named_parameters`` speak absolute keys.

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
            self._adopt(key, paths, _pick(weights, key))

    def load_weights(self, weights: Weights) -> None:
        """Overwrite values in place; optimiser state keeps pointing at the same tensors.

        Raises ModelError if a tensor is missing or has another shape.
        """
        with torch.no_grad():
            for key, paths in self._holdings.all.items():
                if key in self._layout.resident:
                    continue
                target = read_tensor(self.model, paths[0])
                target.copy_(_fitting(key, _pick(weights, key), target))

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:  # type: ignore[override]
        """Owned tensors by absolute key, detached but not copied."""
        del args, kwargs
        owned = self._holdings.owned
        told = {key: owned[key][0] for key in self._layout.travelling(owned)}
        return {key: read_tensor(self.model, path).detach() for key, path in told.items()}

    def block_context(self) -> dict[str, Tensor]:
        """What blocks read beside hidden states, found by the last forward of an embedding."""
        return {}

    def held_bytes(self) -> int:
        """Bytes of all owned tensors, whether they travel or stay."""
        held = (read_tensor(self.model, paths[0]) for paths in self._holdings.owned.values())
        return sum(tensor.numel() * tensor.element_size() for tensor in held)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Owned parameters and replicas by absolute key."""
        del recurse, remove_duplicate
        for key, paths in self._holdings.all.items():
            tensor = read_tensor(self.model, paths[0])
            if isinstance(tensor, nn.Parameter):
                yield f"{prefix}.{key}" if prefix else key, tensor

    def shared_parameters(self) -> dict[str, nn.Parameter]:
        """Trainable parameters that other parts hold too: sum their gradients before a step."""
        paths = {k: p[0] for k, p in self._holdings.all.items() if k in self._layout.shared_keys}
        found = {key: read_tensor(self.model, path) for key, path in paths.items()}
        return {k: p for k, p in found.items() if isinstance(p, nn.Parameter) and p.requires_grad}

    def _adopt(self, key: str, paths: tuple[str, ...], value: Tensor) -> None:
        blueprint = read_tensor(self.model, paths[0])
        _fitting(key, value, blueprint)
        if key in self._layout.resident and self._narrowed(paths, value):
            return
        tensor = value.detach().to(blueprint.dtype, copy=True)
        if isinstance(blueprint, nn.Parameter):
            trains = blueprint.requires_grad and key not in self._layout.frozen
            tensor = nn.Parameter(tensor, requires_grad=trains)
        for path in paths:
            place_tensor(self.model, path, tensor)

    def _narrowed(self, paths: tuple[str, ...], value: Tensor) -> bool:
        """Keep a matrix that stays in the chosen dtype; False where its layer cannot."""
        dtype = self._layout.frozen_dtype
        modules = [self.model.get_submodule(path.rpartition(".")[0]) for path in paths]
        fits = all(path.endswith(".weight") for path in paths) and all(map(can_quantize, modules))
        if dtype == "float32" or value.dim() != 2 or not fits:
            return False
        first, *others = modules
        quantize(first, value, dtype)
        for module in others:
            share_quantized(module, first)
        return True


def normalises_batches(model: nn.Module) -> bool:
    """Whether any layer computes with the mean of the whole batch."""
    return any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())


def _pick(weights: Weights, key: str) -> Tensor:
    try:
        return weights[key]
    except KeyError as cause:
        raise ModelError(f"the weights lack {key!r}; pass all keys of this part") from cause


def _fitting(key: str, value: Tensor, blueprint: Tensor) -> Tensor:
    if value.shape != blueprint.shape:
        raise ModelError(
            f"the weights hold {key!r} with shape {tuple(value.shape)}, "
            f"the model needs {tuple(blueprint.shape)}"
        )
    return value

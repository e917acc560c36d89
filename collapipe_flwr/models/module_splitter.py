"""The cut of a torch module: embedding | segments of blocks | edge."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from collapipe_flwr.core.errors import ModelError
from collapipe_flwr.core.imports import is_within
from collapipe_flwr.models.any_splitter import AnySplitter, shapes_of
from collapipe_flwr.models.layout import EDGE, EMBEDDING, Holdings, Layout
from collapipe_flwr.models.module_call import SHAPE, as_in_training, call, shape_tensor
from collapipe_flwr.models.module_parts import ModuleEdge, ModuleEmbedding, ModuleSegment
from collapipe_flwr.models.module_spec import ModuleSpec, build_hollow, build_module
from collapipe_flwr.models.objective import (
    EXAMPLES,
    LABELS,
    Batch,
    Objective,
    labels_of,
    named_loss,
    scores_of,
)
from collapipe_flwr.models.part import Part, Weights
from collapipe_flwr.models.spec import BatchShape
from collapipe_flwr.models.tasks import count_labels

_COSTED = 2  # examples, where a batch may be cut: some layers need more than one


class ModuleSplitter(AnySplitter):
    """Cuts the module that ``spec`` describes; raises ModelError if it is not as described."""

    def __init__(self, spec: ModuleSpec) -> None:
        self.spec: ModuleSpec = spec
        self.objective = _objective(spec)
        skeleton = self._hollow()
        self.num_blocks = spec.num_blocks - spec.edge_blocks
        self._layout = module_layout(skeleton, spec)
        self.shapes = shapes_of(skeleton.state_dict(), self._layout)
        self.state_keys = tuple(skeleton.state_dict())
        self.decodes = self.generates = False  # torch modules write nothing here
        self.drops, self.whole_batches = spec.drops, spec.whole_batches

    def context(self, batch: Batch) -> dict[str, Tensor]:
        """All but inputs that nobody reads behind the blocks; of these the shapes."""
        hidden = [key for key in self.spec.inputs if key not in self.spec.tail and key in batch]
        found = {key: value for key, value in batch.items() if key not in hidden}
        return {**found, **{SHAPE + key: shape_tensor(batch[key]) for key in hidden}}

    def run_whole(self, model: nn.Module, batch: Batch) -> Any:
        with as_in_training(model):
            return call(model, self.spec.inputs, batch)

    def example(self, shape: BatchShape) -> tuple[dict[str, Tensor], int]:
        """Zeros of the shapes that the model was described with."""
        del shape
        size = self.spec.batch_size
        few = min(size, _COSTED)
        zeros = {
            name: torch.zeros((few, *sizes[1:]) if size else sizes, dtype=getattr(torch, dtype))
            for name, dtype, sizes in self.spec.example
        }
        return zeros, few or 1

    def first_weights(self, seed: int) -> tuple[dict[str, Tensor], tuple[str, ...]]:
        """Those that the module draws itself."""
        model = build_module(self.spec.build, self.spec.arguments_json, seed)
        return self.travelling({k: t.detach() for k, t in model.state_dict().items()}), ()

    def build_embedding(self, weights: Weights) -> ModuleEmbedding:
        holdings = self._layout.holdings(EMBEDDING)
        return ModuleEmbedding(self._hollow(), self.spec, holdings, weights)

    def build_segment(self, first_block: int, stop_block: int, weights: Weights) -> ModuleSegment:
        self._check_range(first_block, stop_block)
        holdings = self._layout.holdings(*range(first_block, stop_block))
        blocks = slice(first_block, stop_block)
        return ModuleSegment(self._hollow(), self.spec, holdings, weights, blocks)

    def build_edge(self, weights: Weights) -> ModuleEdge:
        holdings = self._layout.holdings(EDGE)
        return ModuleEdge(self._hollow(), self.spec, holdings, weights, self.objective)

    def build_whole(self, weights: Weights, *, trains: bool = False) -> nn.Module:
        del trains
        model = self._hollow()
        Part(model, Holdings(layout=self._layout, owned=self._layout.all_places()), weights)
        return model.train(False)

    def _hollow(self) -> nn.Module:
        return build_hollow(self.spec.build, self.spec.arguments_json)


def tensors_by_key(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Every distinct tensor of the ``state_dict`` by its first key, with all of its keys."""
    groups: dict[int, list[str]] = {}
    for path, tensor in model.state_dict(keep_vars=True).items():
        if not isinstance(tensor, Tensor):
            raise ModelError(f"its state_dict holds {path!r}, which is no tensor")
        groups.setdefault(id(tensor), []).append(path)
    return {paths[0]: tuple(paths) for paths in groups.values()}


def module_layout(model: nn.Module, spec: ModuleSpec) -> Layout:
    """Assign every tensor of a module to its owner; raises ModelError where it fits no spec."""
    places = tensors_by_key(model)
    names = block_names(model, spec.blocks)
    wrong = sorted({*spec.before, *spec.updated, *spec.frozen}.difference(places))
    if len(names) != spec.num_blocks or wrong:
        raise ModelError(
            f"{spec.build!r} builds another model here ({len(names)} blocks at {spec.blocks!r}, "
            f"{len(wrong)} tensors missing): have the same version of it everywhere"
        )
    first_at_edge = spec.num_blocks - spec.edge_blocks
    before, tied = frozenset(spec.before), dict(spec.tied)
    owners = {
        key: EMBEDDING if key in before else _owner(key, names, first_at_edge) for key in places
    }
    trainable = {key for key, tensor in model.named_parameters() if tensor.requires_grad}
    return Layout(
        owners=owners,
        places=places,
        ties={key: _tables(model, places[key]) for key in tied},
        constants=frozenset(places).difference(trainable, spec.updated),
        frozen=frozenset(spec.frozen),
    )


def block_names(model: nn.Module, blocks: str) -> list[str]:
    """The paths of the blocks in order; none where the model has no such list."""
    try:
        found = model.get_submodule(blocks)
    except AttributeError:
        return []
    return [f"{blocks}.{name}" if blocks else name for name in found._modules]


def block_index(path: str, names: Sequence[str]) -> int | None:
    """The number of the block that holds the tensor at ``path``; None for one outside."""
    return next((i for i, name in enumerate(names) if is_within(path, [name])), None)


def _tables(model: nn.Module, paths: Iterable[str]) -> tuple[str, ...]:
    owners = {path: model.get_submodule(path.rpartition(".")[0]) for path in paths}
    return tuple(path for path, owner in owners.items() if isinstance(owner, nn.Embedding))


def _owner(key: str, names: Sequence[str], first_at_edge: int) -> int:
    index = block_index(key, names)
    return EDGE if index is None or index >= first_at_edge else index


def _objective(spec: ModuleSpec) -> Objective:
    own = LABELS in spec.inputs  # the model computes its loss itself
    loss = named_loss(spec.loss) or (None if own else cross_entropy)
    return Objective(weight=spec.weight or EXAMPLES, targets=count_labels, loss=loss)


def cross_entropy(outputs: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """The loss of a module that names none: of its logits and the batch's labels."""
    return functional.cross_entropy(scores_of(outputs), labels_of(batch))

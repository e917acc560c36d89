"""The cut of a torch module: its own forward, with other forwards in place of its blocks.

The embedding leaves the model's forward where block 0 is called. Segments call their blocks in a
row. The edge runs the whole forward: ahead of the blocks on zeros of the right shapes, through
blocks that return the hidden states that came over the network, and after them on these.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.nn import functional

from collapipe_flwr.core.errors import ModelError
from collapipe_flwr.models.any_splitter import AnySplitter, shapes_of
from collapipe_flwr.models.foreign_errors import UNFIT, first_lines, translate_errors
from collapipe_flwr.models.layout import EDGE, EMBEDDING, Holdings, make_module_layout
from collapipe_flwr.models.module_call import (
    SHAPE,
    StopForward,
    avoid_fast_path,
    blocks_of,
    call,
    hidden_of,
    make_forward,
    make_shape_tensor,
    pack,
    replace_forwards,
    split_arguments,
    stop_forward,
    unpack,
)
from collapipe_flwr.models.part import Borrower, LossPart, Part, Weights
from collapipe_flwr.models.skeleton import (
    build_module,
    build_module_skeleton,
    place_tensor,
    read_tensor,
)
from collapipe_flwr.models.spec import BatchShape, ModuleSpec
from collapipe_flwr.models.stack import Around, run_block
from collapipe_flwr.models.tasks import (
    EXAMPLES,
    LABELS,
    Batch,
    Objective,
    count_labels,
    labels_of,
    load_loss,
    scores_of,
)

_COSTED = 2  # examples, where a batch may be cut: some layers need more than one


class ModuleSplitter(AnySplitter):
    """The cut of the module that ``spec`` describes; raises ModelError if it is not like that."""

    def __init__(self, spec: ModuleSpec) -> None:
        self.spec: ModuleSpec = spec
        its_own = LABELS in spec.inputs  # the model computes its loss itself
        loss = load_loss(spec.loss) or (None if its_own else cross_entropy)
        weight = spec.weight or (LABELS if loss is cross_entropy else EXAMPLES)
        self.objective = Objective(weight=weight, targets=count_labels, loss=loss)
        skeleton = self._skeleton()
        self.num_blocks = spec.num_blocks - spec.edge_blocks
        self._layout = make_module_layout(skeleton, spec)
        self.shapes = shapes_of(skeleton.state_dict(), self._layout)
        self.state_keys = tuple(skeleton.state_dict())
        self.decodes = self.generates = False  # of torch modules only training is known
        self.drops, self.whole_batches = spec.drops, spec.whole_batches

    def context(self, batch: Batch) -> dict[str, Tensor]:
        """Return all tensors; of inputs that nothing after the blocks reads, the shapes."""
        hidden = [key for key in self.spec.inputs if key not in self.spec.tail and key in batch]
        found = {key: value for key, value in batch.items() if key not in hidden}
        return {**found, **{SHAPE + key: make_shape_tensor(batch[key]) for key in hidden}}

    def targets_of(self, batch: Batch) -> tuple[str, ...]:
        ahead = set(self.spec.inputs).difference(self.spec.tail)
        return tuple(key for key in batch if key not in ahead)

    def run_whole(self, model: nn.Module, batch: Batch) -> Any:
        with avoid_fast_path(model):
            return call(model, self.spec.inputs, batch)

    def example(self, shape: BatchShape) -> tuple[dict[str, Tensor], int]:
        """Return zeros of the shapes that the model was described with."""
        del shape
        size = self.spec.batch_size
        few = min(size, _COSTED)
        zeros = {
            name: torch.zeros((few, *sizes[1:]) if size else sizes, dtype=getattr(torch, dtype))
            for name, dtype, sizes in self.spec.example
        }
        return zeros, few or 1

    def first_weights(self, seed: int) -> tuple[dict[str, Tensor], tuple[str, ...]]:
        """Return the values that the module draws itself."""
        model = build_module(self.spec.build, self.spec.arguments_json, seed)
        return self.select_travelling({k: t.detach() for k, t in model.state_dict().items()}), ()

    def build_embedding(self, weights: Weights) -> ModuleEmbedding:
        holdings = self._layout.holdings_of(EMBEDDING)
        return ModuleEmbedding(self._skeleton(), self.spec, holdings, weights)

    def build_segment(self, first_block: int, stop_block: int, weights: Weights) -> ModuleSegment:
        holdings = self._layout.holdings_of(*self._find_range(first_block, stop_block))
        blocks = slice(first_block, stop_block)
        return ModuleSegment(self._skeleton(), self.spec, holdings, weights, blocks)

    def build_edge(self, weights: Weights) -> ModuleEdge:
        holdings = self._layout.holdings_of(EDGE)
        return ModuleEdge(self._skeleton(), self.spec, holdings, weights, self.objective)

    def build_whole(self, weights: Weights, *, trains: bool = False) -> nn.Module:
        del trains
        model = self._skeleton()
        Part(model, self._layout.all_holdings(), weights)
        return model.train(False)

    def _skeleton(self) -> nn.Module:
        return build_module_skeleton(self.spec.build, self.spec.arguments_json)


def cross_entropy(outputs: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """Compute a module's default loss: cross entropy of its logits and the batch's labels."""
    return functional.cross_entropy(scores_of(outputs), labels_of(batch))


class ModuleEmbedding(Borrower):
    """The model's forward up to block 0."""

    def __init__(
        self, model: nn.Module, spec: ModuleSpec, holdings: Holdings, weights: Weights
    ) -> None:
        ids_of = {key: (name,) for key, name in spec.tied}
        super().__init__(model, holdings, weights, ids_of)
        self._spec, self._template = spec, json.loads(spec.call_json)
        self._found: dict[str, Tensor] = {}
        self._first = blocks_of(model, spec.blocks)[0]
        self._first.forward = stop_forward

    def forward(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Compute hidden states from a batch; raises ModelError if its tensors do not fit."""
        try:
            with avoid_fast_path(self.model):
                call(self.model, self._spec.inputs, inputs)
        except StopForward as reached:
            hidden, others = split_arguments(self._first, reached.args, reached.kwargs)
            self._found = pack(others, self._template)
            return hidden
        except UNFIT as cause:
            shapes = {key: tuple(inputs[key].shape) for key in self._spec.inputs if key in inputs}
            raise ModelError(
                f"the embedding cannot read inputs of shape {shapes}: {first_lines(cause)}"
            ) from cause
        raise ModelError("the model returned without calling its first block")

    def block_context(self) -> dict[str, Tensor]:
        return self._found


class ModuleSegment(Part):
    """Consecutive blocks on one device."""

    def __init__(
        self,
        model: nn.Module,
        spec: ModuleSpec,
        holdings: Holdings,
        weights: Weights,
        blocks: slice,
    ) -> None:
        super().__init__(model, holdings, weights)
        self._template = json.loads(spec.call_json)
        self._blocks = blocks_of(model, spec.blocks)[blocks]
        self._updated = [p[0] for key, p in holdings.owned.items() if key in spec.updated]
        self._around: Around | None = None

    def compute_again(self, around: Around | None) -> None:
        """See ``SegmentPart``; recomputation does not change buffers a second time."""
        self._around = around

    def forward(self, hidden: Tensor, context: Mapping[str, Tensor]) -> Tensor:
        """Compute the hidden states after this segment's last block."""
        arguments = unpack(context, self._template)
        again = self._around and partial(self._keep_buffers, self._around)
        with avoid_fast_path(self.model):
            for block in self._blocks:
                hidden = run_block(block, hidden, arguments, again)
        return hidden

    @contextmanager
    def _keep_buffers(self, around: Around) -> Iterator[None]:
        kept = {path: read_tensor(self.model, path).clone() for path in self._updated}
        with around():
            yield
        for path, value in kept.items():
            read_tensor(self.model, path).copy_(value)


class ModuleEdge(LossPart):
    """Upper blocks, head and loss."""

    def __init__(
        self,
        model: nn.Module,
        spec: ModuleSpec,
        holdings: Holdings,
        weights: Weights,
        objective: Objective,
    ) -> None:
        layout = holdings.layout
        ahead = [path for key in layout.keys_of(EMBEDDING) for path in layout.places[key]]
        absent = {path: _zeros_like(read_tensor(model, path)) for path in ahead}
        super().__init__(model, holdings, weights, objective)
        for path, zeros in absent.items():
            place_tensor(model, path, zeros)
        self._spec, self._template = spec, json.loads(spec.call_json)
        self._blocks = blocks_of(model, spec.blocks)
        self._dtypes = {name: getattr(torch, dtype) for name, dtype, _ in spec.example}

    def outputs(self, hidden: Tensor, context: Mapping[str, Tensor]) -> Any:
        """Run the model's forward, and return its result."""
        with avoid_fast_path(self.model):
            if self._spec.edge_blocks:
                arguments = unpack(context, self._template)
                for block in self._blocks[-self._spec.edge_blocks :]:
                    hidden = hidden_of(block(hidden, **arguments))
            forwards = dict.fromkeys(self._blocks, make_forward(hidden, self._spec.results))
            with replace_forwards(forwards), translate_errors("the edge cannot compute its output"):
                return call(self.model, self._spec.inputs, self._collect_inputs(context))

    def _collect_inputs(self, context: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the inputs that arrived, and zeros in place of the others."""
        found: dict[str, Tensor] = {}
        for name in self._spec.inputs:
            if name in context:
                found[name] = context[name]
            elif SHAPE + name in context:
                sizes = context[SHAPE + name]
                with unset_fake_temporarily():
                    shape = sizes.tolist()
                found[name] = torch.zeros(shape, dtype=self._dtypes[name], device=sizes.device)
        return found


def _zeros_like(tensor: Tensor) -> Tensor:
    """Make zeros, for a parameter ones that take no memory; a buffer may be written to."""
    if not isinstance(tensor, nn.Parameter):
        return torch.zeros(tensor.shape, dtype=tensor.dtype)
    zeros = torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)
    return nn.Parameter(zeros, requires_grad=False)

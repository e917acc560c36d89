"""The parts of a torch module: its own forward, with other forwards in place of its blocks.

The embedding leaves the model's forward where block 0 is called. Segments call their blocks in a
row. The edge runs the whole forward: ahead of the blocks on zeros of the right shapes, through
blocks that hand on what came over the network, and behind them on that.
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

from collapipe_flwr.core.errors import ModelError
from collapipe_flwr.models.borrowed import Borrower
from collapipe_flwr.models.layout import EMBEDDING, Holdings
from collapipe_flwr.models.module_call import (
    SHAPE,
    Left,
    as_in_training,
    blocks_of,
    call,
    handing_on,
    hidden_of,
    leave,
    pack,
    split_arguments,
    unpack,
)
from collapipe_flwr.models.module_spec import ModuleSpec
from collapipe_flwr.models.objective import LossPart, Objective
from collapipe_flwr.models.part import Part, Weights
from collapipe_flwr.models.skeleton import place_tensor, read_tensor
from collapipe_flwr.models.stack import Around, run_block
from collapipe_flwr.models.validation import UNFIT, first_lines, refusing


class ModuleEmbedding(Borrower):
    """What runs ahead of the blocks."""

    def __init__(
        self, model: nn.Module, spec: ModuleSpec, holdings: Holdings, weights: Weights
    ) -> None:
        super().__init__(model, holdings, weights, dict(spec.tied))
        self._spec, self._template = spec, json.loads(spec.call_json)
        self._found: dict[str, Tensor] = {}
        self._first = blocks_of(model, spec.blocks)[0]
        self._first.forward = leave

    def forward(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Hidden states from the tensors of a batch; raises ModelError if they do not fit."""
        try:
            with as_in_training(self.model):
                call(self.model, self._spec.inputs, inputs)
        except Left as reached:
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

    def compute_again(self, around: Around | None) -> bool:
        """See ``SegmentPart``; a second computation leaves buffers as the first one did."""
        self._around = around
        return True

    def forward(self, hidden: Tensor, context: Mapping[str, Tensor]) -> Tensor:
        """Hidden states behind this segment's last block."""
        arguments = unpack(context, self._template)
        again = self._around and partial(self._keeping, self._around)
        with as_in_training(self.model):
            for block in self._blocks:
                hidden = run_block(block, hidden, arguments, again)
        return hidden

    @contextmanager
    def _keeping(self, around: Around) -> Iterator[None]:
        kept = {path: read_tensor(self.model, path).clone() for path in self._updated}
        with around():
            yield
        for path, value in kept.items():
            read_tensor(self.model, path).copy_(value)


class ModuleEdge(LossPart):
    """What stands behind the devices: upper blocks, head and loss."""

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
        """What the model's forward returns."""
        with as_in_training(self.model):
            if self._spec.edge_blocks:
                arguments = unpack(context, self._template)
                for block in self._blocks[-self._spec.edge_blocks :]:
                    hidden = hidden_of(block(hidden, **arguments))
            stand_in = handing_on(hidden, self._spec.results)
            try:
                for block in self._blocks:
                    block.forward = stand_in
                with refusing("the edge cannot compute its output"):
                    return call(self.model, self._spec.inputs, self._inputs(context))
            finally:
                for block in self._blocks:
                    del block.forward

    def _inputs(self, context: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Those that came, and zeros in place of the others."""
        found: dict[str, Tensor] = {}
        for name in self._spec.inputs:
            if name in context:
                found[name] = context[name]
            elif SHAPE + name in context:
                told = context[SHAPE + name]
                with unset_fake_temporarily():
                    shape = told.tolist()
                found[name] = torch.zeros(shape, dtype=self._dtypes[name], device=told.device)
        return found


def _zeros_like(tensor: Tensor) -> Tensor:
    """A parameter takes no memory; a buffer may be written to."""
    if not isinstance(tensor, nn.Parameter):
        return torch.zeros(tensor.shape, dtype=tensor.dtype)
    zeros = torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)
    return nn.Parameter(zeros, requires_grad=False)

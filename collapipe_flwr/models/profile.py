"""The costs of each part of a model per example, without weights and without computing.

The parts run once on fake tensors, which have shapes and no memory: the counted operations and
the tensors kept for the backward pass are those of a real run on a CPU in training mode.
A multiply-add counts as two operations; the backward pass costs twice the forward one, and with
frozen weights below adapters what autograd really computes: no gradients of frozen weights, nor
of hidden states that no trained parameter needs.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from collapipe_flwr.core.domain import BlockCost, ModelProfile
from collapipe_flwr.core.errors import ModelError
from collapipe_flwr.models.any_splitter import AnySplitter
from collapipe_flwr.models.discovery import (
    NEEDS_VALUES,
    VALUE_ERRORS,
    make_refusal,
    use_fake_tensors,
)
from collapipe_flwr.models.foreign_errors import UNFIT, first_lines
from collapipe_flwr.models.front import FrontPart
from collapipe_flwr.models.part import Part
from collapipe_flwr.models.spec import BatchShape, ModuleSpec
from collapipe_flwr.models.splitter import Splitter
from collapipe_flwr.models.tasks import numbers_of, scores_of

Sizes = Mapping[str, tuple[torch.Size, torch.dtype]]  # of parameters, by key
StateBytes = Callable[[Sizes], int]  # of an optimizer, for the parameters that it trains

ACTIVATION_BYTES = 4  # activations cross the network in single precision


def adamw_bytes(parameters: Sizes) -> int:
    """Return the bytes of two moments for each parameter."""
    return 2 * _count_bytes(parameters)


def _count_bytes(tensors: Sizes) -> int:
    return sum(size.numel() * dtype.itemsize for size, dtype in tensors.values())


def profile_model(
    splitter: AnySplitter, shape: BatchShape, optimizer_bytes: StateBytes = adamw_bytes
) -> ModelProfile:
    """Measure the costs of embedding, every block and the edge for examples of ``shape``.

    A torch module that does not run on shapes alone runs on zeros. Raises ModelError if it cannot.
    """
    if isinstance(splitter.spec, ModuleSpec):
        try:
            return profile_shapes(splitter, shape, optimizer_bytes)
        except (ModelError, *VALUE_ERRORS, *UNFIT):
            return _profile(splitter, shape, optimizer_bytes)
    try:
        return profile_shapes(splitter, shape, optimizer_bytes)
    except VALUE_ERRORS as cause:
        raise make_refusal(splitter.spec, NEEDS_VALUES) from cause
    except UNFIT as cause:
        raise make_refusal(splitter.spec, f"its parts do not run: {first_lines(cause)}") from cause


def profile_shapes(
    splitter: AnySplitter, shape: BatchShape, optimizer_bytes: StateBytes = adamw_bytes
) -> ModelProfile:
    """Profile as ``profile_model`` on shapes alone, with errors as the library raises them."""
    with use_fake_tensors():
        return _profile(splitter, shape, optimizer_bytes)


def _profile(splitter: AnySplitter, shape: BatchShape, optimizer_bytes: StateBytes) -> ModelProfile:
    weights = {
        key: torch.zeros(size, dtype=dtype) for key, (size, dtype) in splitter.shapes.items()
    }
    batch, examples = splitter.example(shape)
    embedding = splitter.build_front(weights)
    hidden_BTD, context = splitter.embed(embedding, weights, batch)
    edge = splitter.build_edge(weights)
    measure = partial(
        _measure_cost,
        optimizer_bytes=optimizer_bytes,
        constant=splitter.constant_keys,
        examples=examples,
    )
    known: dict[object, BlockCost] = {}
    blocks = []
    for index in range(splitter.num_blocks):
        held = {key: splitter.shapes[key] for key in splitter.held_keys(index)}
        trained = {
            key: size
            for key, size in held.items()
            if key not in splitter.constant_keys and size[1].is_floating_point  # no counter
        }
        with unset_fake_temporarily():
            state_bytes = optimizer_bytes(trained)
        sizes = tuple((size, key in trained) for key, size in held.items())
        kind = (hidden_BTD.requires_grad, sizes, state_bytes)
        if kind not in known:  # else it costs the same
            block = splitter.build_segment(index, index + 1, weights)
            known[kind] = measure(block, partial(block, _make_leaf(hidden_BTD), context))
            learns = hidden_BTD.requires_grad or any(p.requires_grad for p in block.parameters())
            hidden_BTD = hidden_BTD.detach().requires_grad_(learns)
        blocks.append(known[kind])
    decoder = measure(
        edge,
        lambda: _choose_numbers(edge.outputs(_make_leaf(hidden_BTD), context)),
        sends=False,
    )
    if edge.piece_tokens is not None:
        # What is live in a pass grows with tokens; the gradient of the input is kept instead.
        live_bytes = examples * (decoder.stash_bytes + decoder.passing_bytes)
        decoder = replace(
            decoder,
            piece_stash_bytes=hidden_BTD.nbytes / examples,
            piece_bytes=live_bytes * edge.piece_tokens / hidden_BTD[..., 0].numel(),
        )
    return ModelProfile(
        embedding=measure(embedding, lambda: embedding(batch)),
        blocks=tuple(blocks),
        decoder=decoder,
    )


def _choose_numbers(outputs: Any) -> Tensor:
    """Choose the loss or the logits of a head, or join all that it returns; raises ModelError."""
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else None
    if isinstance(loss, Tensor):
        return loss
    if isinstance(outputs, Mapping) and "logits" in outputs:
        return scores_of(outputs)
    found = numbers_of(outputs)
    if not found:
        raise ModelError("the model's outputs hold no numbers")
    return found[0] if len(found) == 1 else torch.stack([tensor.sum() for tensor in found])


def _measure_cost(
    part: Part | FrontPart,
    run: Callable[[], Tensor],
    *,
    optimizer_bytes: StateBytes,
    constant: Collection[str],
    examples: int,
    sends: bool = True,
) -> BlockCost:
    """Measure the costs of the part by ``run``; its output is sent on if it ``sends``.

    Of its parameters training never changes those that are ``constant``.
    """
    parameters, weights = list(part.parameters()), part.state_dict()
    trained = {k: (p.shape, p.dtype) for k, p in part.named_parameters() if p.requires_grad}
    with unset_fake_temporarily():
        kept = optimizer_bytes(trained)
    passes = _run_counted(run, parameters)
    backward = 2 * passes.forward_flop
    if not all(parameter.requires_grad for parameter in parameters):
        backward = passes.backward_flop
    return BlockCost(
        forward_flop=passes.forward_flop / examples,
        backward_flop=backward / examples,
        parameter_bytes=sum(tensor.nbytes for tensor in weights.values()),
        frozen_bytes=sum(tensor.nbytes for key, tensor in weights.items() if key in constant),
        state_bytes=part.held_bytes()
        + _count_bytes(trained)
        + kept,  # gradients are as trained ones
        stash_bytes=passes.stash_bytes / examples,
        output_bytes=passes.output_size * ACTIVATION_BYTES / examples if sends else 0.0,
        passing_bytes=max(passes.peak_bytes - passes.stash_bytes, 0) / examples,
        returns=passes.learns,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Passes:
    """Both passes of a part: operations, bytes that autograd keeps, and the most at any moment."""

    forward_flop: float
    backward_flop: float
    stash_bytes: int
    peak_bytes: int
    output_size: int
    learns: bool  # whether any parameter, here or ahead, needs the output's gradient


def _run_counted(run: Callable[[], Tensor], parameters: Iterable[nn.Parameter]) -> _Passes:
    """Run forward and, where anything learns, backward."""
    weights = {parameter.untyped_storage()._cdata for parameter in parameters}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            kept[storage._cdata] = storage.nbytes()
        return tensor

    live = _LiveBytes(parameters)
    forward, backward = (
        FlopCounterMode(display=False, custom_mapping=_CPU_ATTENTION) for _ in range(2)
    )
    with forward, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), live:
        output = run()
    if output.requires_grad:
        with backward, live:
            output.backward(torch.ones_like(output))  # type: ignore[no-untyped-call]
    return _Passes(
        forward_flop=float(forward.get_total_flops()),
        backward_flop=float(backward.get_total_flops()),
        stash_bytes=sum(kept.values()),
        peak_bytes=live.peak_bytes,
        output_size=output.numel(),
        learns=output.requires_grad,
    )


class _LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of all tensors that live at once, but for weights and their gradients."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak_bytes = 0
        self._bytes = 0
        self._known = set[int]()  # storages, by address of what torch never moves
        self._own = {parameter.untyped_storage()._cdata for parameter in parameters}
        shapes = [p.shape for p in parameters if p.requires_grad]
        self._shapes = {*shapes, *(shape[::-1] for shape in shapes)}  # some are computed transposed

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        found = func(*args, **(kwargs or {}))
        for tensor in tree_leaves((args, kwargs, found)):
            if isinstance(tensor, Tensor):
                self._note(tensor)
        self.peak_bytes = max(self.peak_bytes, self._bytes)
        return found

    def _note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        place, size = storage._cdata, storage.nbytes()
        if place in self._known or place in self._own or tensor.shape in self._shapes:
            return
        self._known.add(place)
        self._bytes += size
        weakref.finalize(storage, self._forget, place, size)

    def _forget(self, place: int, size: int) -> None:
        self._known.discard(place)
        self._bytes -= size


def _attention_flop(
    query: torch.Size, key: torch.Size, value: torch.Size, *args: object, **kwargs: object
) -> int:
    """Count scores and weighted sum; shapes are (batch, heads, tokens, width)."""
    del args, kwargs
    batch, heads, queries, width = query
    return 2 * batch * heads * queries * key[-2] * (width + value[-1])


def _attention_backward_flop(_: torch.Size, *args: torch.Size, **kwargs: object) -> int:
    """Count two products for each of the forward pass, without the kernel's recomputation."""
    return 2 * _attention_flop(args[0], args[1], args[2], **kwargs)


# torch counts the fused attention of GPUs but not that of its CPU backend.
_CPU_ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flop,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_flop,
}


def _make_leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


_SPREAD = 0.02  # of the drawn weights, arbitrary but small enough not to overflow
_LEAST_REPEATS, _MOST_REPEATS = 3, 200


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedBlock:
    """Seconds of one block for ``examples`` at once; ``flop`` is both passes' work."""

    examples: int
    forward_s: float
    backward_s: float
    flop: float

    @property
    def speed_flop_per_s(self) -> float:
        """Effective speed in training."""
        return self.flop / (self.forward_s + self.backward_s)


def time_block(
    splitter: Splitter,
    cost: BlockCost,
    *,
    examples: int,
    seconds: float,
    clock: Callable[[], float] = time.perf_counter,
) -> TimedBlock:
    """Time the first block: medians over repeats, after one warm-up.

    ``cost`` is that block's of ``profile_model``. Its weights are drawn here, so that no
    checkpoint is read.
    """
    block = splitter.build_segment(0, 1, _draw_weights(splitter))
    width = int(splitter.config.get_text_config().hidden_size)
    tokens = round(cost.output_bytes / ACTIVATION_BYTES / width)
    hidden_BTD = torch.randn(examples, tokens, width, requires_grad=True)
    context = {"attention_mask": torch.ones(examples, tokens, dtype=torch.long)}
    passes = [_time_once(block, hidden_BTD, context, clock)]
    until_s = clock() + seconds
    while len(passes) <= _LEAST_REPEATS or (clock() < until_s and len(passes) < _MOST_REPEATS):
        passes.append(_time_once(block, hidden_BTD, context, clock))
    forward, backward = zip(*passes[1:], strict=True)
    return TimedBlock(
        examples=examples,
        forward_s=median(forward),
        backward_s=median(backward),
        flop=examples * (cost.forward_flop + cost.backward_flop),
    )


def _draw_weights(splitter: Splitter) -> dict[str, Tensor]:
    keys = (*splitter.held_keys(0), *splitter.shared_keys)
    random = torch.Generator().manual_seed(0)
    return {
        key: torch.randn(shape, generator=random).mul_(_SPREAD).to(dtype)
        for key, (shape, dtype) in splitter.shapes.items()
        if key in keys
    }


def _time_once(
    block: Part, hidden_BTD: Tensor, context: dict[str, Tensor], clock: Callable[[], float]
) -> tuple[float, float]:
    start_s = clock()
    output = block(hidden_BTD, context)
    middle_s = clock()
    output.sum().backward()
    stop_s = clock()
    block.zero_grad(set_to_none=True)
    hidden_BTD.grad = None
    return middle_s - start_s, stop_s - middle_s

"""Where a model may be cut: one forward pass, every operation watched.

A cut is sound if a block reads nothing of the model but its own tensors, the hidden states of the
block before it, and arguments; and if the head after the blocks reads the last hidden states, its
own tensors, and otherwise only inputs of the batch. The trace proves that, or finds the reason why
not. It needs no values, so the model's tensors may be fake.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from collapipe_flwr.core.errors import ModelError
from collapipe_flwr.models.foreign_errors import translate_errors
from collapipe_flwr.models.layout import find_block_index, group_tensors, list_block_paths
from collapipe_flwr.models.module_call import (
    blocks_of,
    call,
    describe,
    hidden_of,
    split_arguments,
)
from collapipe_flwr.models.random_functions import RandomDetector

_AHEAD, _BETWEEN, _BEHIND = -1, -2, -3  # where the pass is, or the number of a block
_ASKS_VALUES = ("_local_scalar_dense", "is_nonzero", "equal")
_READS_SHAPE = ("_like", "new_")  # in names of operations that read no values
Label = tuple[str, str]  # "input" | "owned" | "drawn" | "block", and its name


def trace_module(
    model: nn.Module, blocks: str, inputs: Sequence[str], batch: Mapping[str, Tensor]
) -> ModelTrace:
    """Watch one forward pass of a torch module in training mode.

    ``model`` is of no further use: its buffers change, and its blocks keep their hooks. Raises
    ModelError if no cut is exact.
    """
    batch = {name: tensor.clone() for name, tensor in batch.items()}  # apart, not views of one
    trace = ModelTrace(model, blocks, {name: batch[name] for name in inputs if name in batch})
    model.train()
    before = {key: buffer.clone() for key, buffer in model.named_buffers()}
    with (
        translate_errors("it cannot read the example"),
        torch.random.fork_rng(devices=()),
        trace.watch(),
    ):
        call(model, inputs, batch)
    saved = group_tensors(model)
    trace.updated = tuple(
        key
        for key, buffer in model.named_buffers()
        if key in saved and not torch.equal(buffer, before[key])
    )
    return trace


class ModelTrace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A record of which parameters, inputs and blocks each tensor of a forward pass comes from.

    ``ahead`` and ``behind`` are the keys read there, ``ids_of`` the inputs that tables ahead are
    looked up with (None: something else), ``tail`` the inputs that are read after the blocks.
    ``template`` and ``results`` say how blocks are called and how long the tuple is that they
    return, ``updated`` which buffers changed, ``drops`` whether random numbers were drawn.

    Arguments of blocks travel with the hidden states, so they must be alike for all blocks. With
    ``rebuilt_arguments`` every device makes its own: they may differ from block to block, but may
    not be drawn at random.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: str,
        inputs: Mapping[str, Tensor],
        *,
        rebuilt_arguments: bool = False,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ahead = set[str]()
        self.behind = set[str]()
        self.ids_of: dict[str, set[str | None]] = {}
        self.tail = set[str]()
        self.template: dict[str, Any] = {}
        self.results = 0
        self.updated: tuple[str, ...] = ()
        self.drops = False
        self._detector = RandomDetector()
        self._rebuilt = rebuilt_arguments
        self.blocks = blocks_of(model, blocks)
        self._names = list_block_paths(model, blocks)
        self._place = _AHEAD
        self.calls: list[tuple[Tensor, dict[str, Any]]] = []
        self._hidden: Any = None  # that the last block returned
        self._alive: list[Tensor] = [*inputs.values()]  # or their memory would be used again
        self._make_inputs = {_storage(tensor): name for name, tensor in inputs.items()}
        self._labels: dict[int, frozenset[Label]] = {
            at: frozenset({("input", name)}) for at, name in self._make_inputs.items()
        }
        state = model.state_dict(keep_vars=True)
        self._owned = {
            _storage(state[key]): key for key in group_tensors(model) if state[key].numel()
        }
        self._learned = {key for key, _ in model.named_parameters()}
        for at, key in self._owned.items():
            self._labels[at] = frozenset({("owned", key)})
        self._early: set[int] = set()  # storages from before the last block's end
        self._open: set[int] = set()  # storages that the running block may read
        self._closed: dict[int, str] = {}  # those that it may not read, and why
        for index, block in enumerate(self.blocks):
            begin, end = partial(self._begin, index), partial(self._end, index)
            block.register_forward_pre_hook(begin, with_kwargs=True)
            block.register_forward_hook(end)

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Watch the forward pass in the body; raises ModelError if no cut is exact."""
        with torch.no_grad(), self, self._detector:
            yield
        if len(self.calls) != len(self.blocks):
            raise ModelError(
                f"its {len(self.blocks)} blocks ran {len(self.calls)} times instead of once each"
            )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        read = _tensors_in((args, kwargs))
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        labels = frozenset[Label]()
        if not any(word in name for word in _READS_SHAPE):
            labels = labels.union(*(self._labels.get(_storage(tensor), ()) for tensor in read))
            self._judge(name, read, labels)
        if _draws(func, args, kwargs or {}):
            self._note_drawn(name)
            labels |= {("drawn", name)} if self._rebuilt else set()
        for leaf in _tensors_in(result):
            self._alive.append(leaf)
            at = _storage(leaf)
            self._labels[at] = self._labels.get(at, frozenset()) | labels
            if self._place >= 0:
                self._open.add(at)
        return result

    def _note_drawn(self, name: str) -> None:
        self.drops = True
        # BigBird draws weights that are not used, when it changes its attention for short texts.
        if not (self._detector.runs_one or self._rebuilt):
            raise ModelError(
                f"its forward draws random numbers ({name}) that cannot be seeded, so another cut "
                "would draw others: call torch.rand, torch.randn or a dropout layer"
            )

    def _judge(self, name: str, read: Sequence[Tensor], labels: frozenset[Label]) -> None:
        chooses = name in _ASKS_VALUES and any(kind != "owned" for kind, _ in labels)
        if chooses and not (self._place == _AHEAD and _makes_mask()):
            raise ModelError(
                "its forward branches on values of the batch (an `if`, `.item()` or `bool()` of a "
                "tensor): compute both branches and choose with torch.where"
            )
        if name == "embedding" and self._place == _AHEAD and _storage(read[0]) in self._owned:
            table = self._owned[_storage(read[0])]
            self.ids_of.setdefault(table, set()).add(self._make_inputs.get(_storage(read[1])))
        for tensor in read:
            self._note_read(_storage(tensor))

    def _note_read(self, at: int) -> None:
        if self._place >= 0 and at in self._open:
            return
        if self._place >= 0 and at in self._closed:
            raise ModelError(
                f"block {self._place} reads {self._closed[at]}: other machines would have another"
            )
        key = self._owned.get(at)
        if key is not None:
            self._note_owned(key)
        elif self._place >= 0 and self._labels.get(at):
            raise ModelError(
                f"block {self._place} reads {_source(self._labels[at])} besides what it is called "
                "with: pass it to all blocks as an argument"
            )
        elif self._place == _BEHIND and at in self._early:
            self._note_tail(self._labels.get(at, frozenset()))

    def _note_owned(self, key: str) -> None:
        holder = find_block_index(key, self._names)
        if holder is not None and holder != self._place:
            where = "outside it" if self._place < 0 else f"in block {self._place}"
            raise ModelError(f"{key!r} of block {holder} is read {where}, on another machine")
        if holder is None and self._place >= 0:
            raise ModelError(
                f"block {self._place} reads {key!r}, which is not its own: blocks may share "
                "no parameters"
            )
        if holder is None:
            (self.behind if self._place == _BEHIND else self.ahead).add(key)

    def _note_tail(self, labels: frozenset[Label]) -> None:
        foreign = [label for label in labels if label[0] != "input"]
        if foreign:
            raise ModelError(
                f"what runs after its blocks reads {_source(foreign)}, which is on another "
                "machine: let it read the last block's result and inputs of the batch only"
            )
        self.tail.update(name for _, name in labels)

    def _begin(
        self, index: int, block: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        hidden, others = split_arguments(block, args, kwargs)
        if index != len(self.calls):
            raise ModelError(f"its block {index} runs out of turn, or more than once")
        if index and hidden is not self._hidden:
            raise ModelError(f"something happens between its blocks {index - 1} and {index}")
        if not self._rebuilt:
            self._compare_arguments(index, others)
        self._open = {_storage(tensor) for tensor in _tensors_in((hidden, others))}
        self._closed = {
            _storage(tensor): f"{name!r} besides hidden states, which is {why}"
            for name, value in others.items()
            for tensor in _tensors_in(value)
            if (why := self._explain_closed(tensor))
        }
        # Block 0 may get its own hidden states a second time, under another name.
        self._open -= self._closed.keys() - {_storage(hidden)}
        self.calls.append((hidden, others))
        self._place = index

    def _compare_arguments(self, index: int, others: Mapping[str, Any]) -> None:
        if index == 0:
            self.template = describe(others)
        ours, theirs = tree_leaves(others), tree_leaves(self.calls[0][1] if index else others)
        if describe(others) != self.template or not all(map(_same, ours, theirs)):
            raise ModelError(f"block {index} is called with other arguments than block 0")

    def _explain_closed(self, tensor: Tensor) -> str:
        """Say why an argument cannot be passed on; empty for one that can, as a causal mask."""
        at = _storage(tensor)
        if at in self._owned and self._owned[at] not in self._learned:
            self._note_owned(self._owned[at])
        for kind, name in sorted(self._labels.get(at, ())):
            if kind == "owned" and name in self._learned:
                return f"learned ({name!r})"
            if kind == "drawn":
                return f"drawn at random ({name})"
        return ""

    def _end(self, index: int, _: nn.Module, __: Any, result: Any) -> None:
        hidden: Any = hidden_of(result)
        given = self.calls[-1][0]
        if not isinstance(hidden, Tensor) or hidden.shape != given.shape:
            shape = tuple(hidden.shape) if isinstance(hidden, Tensor) else type(hidden).__name__
            raise ModelError(
                f"block {index} changes the shape of hidden states from {tuple(given.shape)} to "
                f"{shape}"
            )
        self.results = 0 if isinstance(result, Tensor) else len(result)
        self._hidden = hidden
        self._alive.append(hidden)
        is_last = index == len(self.blocks) - 1
        self._place = _BEHIND if is_last else _BETWEEN
        if is_last:
            self._early = set(self._labels) - {_storage(hidden)}
        self._labels[_storage(hidden)] = frozenset({("block", str(index))})


def _draws(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether an operation draws random numbers; attention without dropout does not.

    A generator of the model's own is its own affair.
    """
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    names = [argument.name for argument in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    if given.get("generator") is not None:
        return False
    return "dropout_p" not in names or bool(given.get("dropout_p"))


def _makes_mask() -> bool:
    """Return whether transformers is deciding if blocks need a padding mask, or get None."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_globals.get("__name__") == "transformers.masking_utils":
            return True
    return False


def _tensors_in(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _storage(tensor: Tensor) -> int:
    at: int = tensor.untyped_storage()._cdata
    return at


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        with _disable_current_modes():
            return left is right or torch.equal(left, right)
    return bool(left == right)


def _source(labels: Iterable[Label]) -> str:
    """Say where a tensor comes from: the last block, else a parameter, else an input."""
    order = ("block", "owned", "drawn", "input")
    kind, name = min(labels, key=lambda label: (order.index(label[0]), label[1]))
    return {
        "block": f"the result of block {name}",
        "owned": f"a tensor made from {name!r}",
        "drawn": f"random numbers ({name})",
        "input": f"the input {name!r}",
    }[kind]

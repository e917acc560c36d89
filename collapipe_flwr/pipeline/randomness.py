"""Dropout and noise that depend on what is computed, not on where or when.

torch draws dropout masks from one generator per process, so threads would disturb each other and
a cut would change the masks. Here every random operation of a forward pass is seeded from (seed,
step, micro-batch, call of the module, how many random operations that call did before). A call is
identified by the module's name in the whole model, and by its number if the module is called
several times. Calls are counted within the call of the enclosing module, and those of a layer
without children apart for each layer that ran before it there, because a part does not know what
other parts call: T5 uses one dropout layer behind its embedding, on the control unit, and behind
its last norm, at the edge. Hence any cut, any order of micro-batches, and a second computation of
the same micro-batch or of one of its blocks draw the same masks. Draws from a generator of the
model's own are left alone.

The mode is local to its thread; the process-wide generator is borrowed for one operation at a
time and put back as it was.

Each kind of device has another generator, with other masks for the same seed. So the masks for an
accelerator are drawn on the CPU too, and moved; the products are computed on the accelerator.
"""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from collapipe_flwr.models.random_functions import COUNTING, RANDOM, Function
from collapipe_flwr.pipeline.compute import CPU

_DROPOUTS = (functional.dropout, functional.dropout1d, functional.dropout2d, functional.dropout3d)
_RECURRENT = (torch.gru, torch.lstm, torch.rnn_relu, torch.rnn_tanh)
_borrowed = threading.Lock()


class SeededRandomness:
    """Seeds the random operations of the modules under `root`, named as in the whole model."""

    def __init__(self, root: nn.Module, seed: int) -> None:
        self._root = root
        self._seed = seed
        self._watches = False
        self._mode: _Mode | None = None  # of the micro-batch that runs

    @contextmanager
    def hook_modules(self) -> Iterator[None]:
        """Register hooks for the whole body, which is cheaper than for each micro-batch in it."""
        if self._watches:
            yield
            return
        hooks = [
            hook
            for name, module in self._root.named_modules()
            for hook in (
                module.register_forward_pre_hook(partial(self._begin, name)),
                # Also when it raises: parts leave the library's forward by exceptions.
                module.register_forward_hook(self._end, always_call=True),
            )
        ]
        self._watches = True
        try:
            yield
        finally:
            self._watches = False
            for hook in hooks:
                hook.remove()

    @contextmanager
    def seed_at(self, step: int, micro_batch: int) -> Iterator[None]:
        """Seed the random operations of the body by this step and micro-batch."""
        with self.hook_modules():
            self._mode = mode = _Mode(f"{self._seed}/{step}/{micro_batch}")
            try:
                with mode:
                    yield
            finally:
                self._mode = None

    def _begin(self, name: str, module: nn.Module, args: tuple[Any, ...]) -> None:
        del args
        if self._mode is not None and COUNTING.get():
            self._mode.begin(name, is_leaf=next(module.children(), None) is None)

    def _end(self, module: nn.Module, args: tuple[Any, ...], result: object) -> None:
        del module, args, result
        if self._mode is not None and COUNTING.get():
            self._mode.end()


@dataclass(slots=True)
class _Call:
    """A call of a module that has begun, and what happened in it so far."""

    name: str  # of the module
    path: str  # which call of the module it is; the name alone for the first
    random: int = 0  # operations
    calls: Counter[str] = field(default_factory=Counter)  # of other modules
    last: str = ""  # the module that was called last

    def begin(self, name: str, *, is_leaf: bool) -> _Call:
        place = f"{name} after {self.last}" if is_leaf else name
        self.calls[place] += 1
        self.last = name
        owns = not self.name or name.startswith(f"{self.name}.")
        is_first_of_owner = owns and self.path == self.name
        path = place if is_first_of_owner else f"{self.path} > {place}"
        if self.calls[place] > 1:
            path += f" #{self.calls[place]}"
        return _Call(name=name, path=path)


class _Mode(TorchFunctionMode):
    """Tracks the innermost running call of a module, and seeds each random operation in it."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self._place = place
        self._running = [_Call(name="", path="")]

    def begin(self, name: str, *, is_leaf: bool) -> None:
        """Note that the module of this name is called."""
        self._running.append(self._running[-1].begin(name, is_leaf=is_leaf))

    def end(self) -> None:
        """Note that the call that began last is over."""
        self._running.pop()

    def __torch_function__(
        self,
        func: Function,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        del types
        given = kwargs or {}
        if not _may_draw(func, args, given):
            return func(*args, **given)
        running = self._running[-1]
        running.random += 1
        with _seed_generator(f"{self._place}/{running.path}/{running.random}"):
            return _draw_on_cpu(func, args, given)


def _may_draw(func: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call may draw from the generator of the process."""
    if func not in RANDOM or kwargs.get("generator") is not None:
        return False
    # the one float in a call of recurrent layers is their dropout, and whether they train is next
    return func not in _RECURRENT or any(
        isinstance(share, float) and share > 0 and trains for share, trains in pairwise(args)
    )


@contextmanager
def _seed_generator(text: str) -> Iterator[None]:
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    generator = torch.default_generator
    with _borrowed:
        state = generator.get_state()
        generator.manual_seed(int.from_bytes(digest, "little") >> 1)
        try:
            yield
        finally:
            generator.set_state(state)


def _draw_on_cpu(func: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call `func`, with random numbers of the CPU where any tensor is on an accelerator."""
    place = _find_place(args, kwargs)
    if place == CPU:
        return func(*args, **kwargs)
    if func in _DROPOUTS:
        return _drop_out(func, *args, **kwargs)
    if func is functional.scaled_dot_product_attention:
        return _attend(*args, **kwargs)
    if func is functional.multi_head_attention_forward:
        return _multi_head(*args, **kwargs)
    return _compute_on_cpu(func, args, kwargs, place)


def _drop_out(
    func: Function, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    """Multiply the input by the dropout of ones.

    These lie in memory as the input does, which is the order in which the numbers are drawn.
    """
    if not training or p == 0:
        same: Tensor = func(input, p, training, inplace)
        return same
    kept: Tensor = func(torch.ones_like(input, device=CPU), p, training).to(input.device)
    return input.mul_(kept) if inplace else input * kept


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute attention with dropout in the order in which torch does on a CPU."""
    if not dropout_p:
        return functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask,
            dropout_p,
            is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
        )
    if enable_gqa:
        key, value = (t.repeat_interleave(query.size(-3) // t.size(-3), -3) for t in (key, value))
    root = (query.shape[-1] ** -0.5 if scale is None else scale) ** 0.5
    scores = (query * root) @ (key.transpose(-2, -1) * root)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(
            ~attn_mask, -torch.inf
        )
    if attn_mask is not None:
        scores = scores + attn_mask
    shares = torch._safe_softmax(scores, -1)  # 0 where everything is masked
    return _drop_out(functional.dropout, shares, dropout_p) @ value


def _compute_on_cpu(
    func: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any], place: torch.device
) -> Any:
    """Compute all of it on the CPU, for what is rare; results in place are written back."""
    here_args, here = tree_map(_to_cpu, (args, dict(kwargs)))
    if "device" in here:  # it may be text
        here["device"] = CPU
    found = func(*here_args, **here)
    in_place = func.__name__.endswith("_") or here.get("inplace")
    written = args[0] if in_place else kwargs.get("out")
    if written is not None:
        return written.copy_(found)
    return tree_map(lambda leaf: leaf.to(place) if isinstance(leaf, Tensor) else leaf, found)


def _to_cpu(leaf: Any) -> Any:
    if isinstance(leaf, torch.device):
        return CPU
    return leaf.to(CPU) if isinstance(leaf, Tensor) else leaf


def _find_place(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.device:
    """Return the first device that is not the CPU, of the requested one and the tensors'."""
    asked = torch.device(kwargs["device"]) if kwargs.get("device") is not None else CPU
    leaves = tree_leaves((args, dict(kwargs)))
    places = (leaf.device for leaf in leaves if isinstance(leaf, Tensor))
    return next((place for place in (asked, *places) if place != CPU), CPU)


def _replace_dropout(function: Any) -> Function:
    """Copy a function with the dropout above: modes do not see what torch's functions call."""
    own = {
        **function.__globals__,
        "dropout": lambda *args, **kwargs: _drop_out(functional.dropout, *args, **kwargs),
        "scaled_dot_product_attention": _attend,
        "has_torch_function": lambda _: False,
    }
    copied = FunctionType(function.__code__, own, function.__name__, function.__defaults__)
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied


_multi_head = _replace_dropout(functional.multi_head_attention_forward)

"""Dropout that depends on what is computed, not on where or when.

torch draws dropout masks from one generator per process, so threads would disturb each other and
a cut would change the masks. Here every random operation of a forward pass is seeded from (seed,
step, micro-batch, call of the module, how many random operations that call did before). A call is
known by the module's name in the whole model, and where a module is called several times, by which
of its calls it is. Calls are counted within the call of the module around them, and for a layer
without children by the layer that ran before it there, as a part does not know what other parts
call: T5 uses one dropout layer behind its embedding, on the control unit, and behind its last norm,
at the edge. Hence any cut, any order of micro-batches, and a second computation of the same
micro-batch or of one of its blocks draw the same masks.

The mode is local to its thread; the process-wide generator is borrowed for one operation at a
time and put back as it was. What is drawn for an accelerator is drawn here and moved (`draws`), so
the masks are also those of a CPU.
"""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from collapipe_flwr.pipeline.draws import drawn_on_cpu

_RANDOM: frozenset[Callable[..., Any]] = frozenset(
    {
        functional.dropout,
        functional.dropout1d,
        functional.dropout2d,
        functional.dropout3d,
        functional.alpha_dropout,
        functional.feature_alpha_dropout,
        functional.scaled_dot_product_attention,
        functional.multi_head_attention_forward,
        torch.bernoulli,
        torch.rand,
        torch.rand_like,
        torch.Tensor.bernoulli_,
        torch.Tensor.uniform_,
    }
)
_borrowed = threading.Lock()


class SeededRandomness:
    """Seeds the random operations of the modules under `root`, named as in the whole model."""

    def __init__(self, root: nn.Module, seed: int) -> None:
        self._root = root
        self._seed = seed

    @contextmanager
    def at(self, step: int, micro_batch: int) -> Iterator[None]:
        """Random operations of the body belong to this step and micro-batch."""
        mode = _Mode(f"{self._seed}/{step}/{micro_batch}")
        hooks = [
            hook
            for name, module in self._root.named_modules()
            for hook in (
                module.register_forward_pre_hook(mode.enter(name)),
                # Also when it raises: parts leave the library's forward by exceptions.
                module.register_forward_hook(mode.leave, always_call=True),
            )
        ]
        try:
            with mode:
                yield
        finally:
            for hook in hooks:
                hook.remove()


@dataclass(slots=True)
class _Call:
    """A call of a module that has begun, and what happened in it so far."""

    name: str  # of the module
    path: str  # which call of the module it is; the name alone for the first
    random: int = 0  # operations
    calls: Counter[str] = field(default_factory=Counter)  # of other modules
    last: str = ""  # the module that was called last

    def begin(self, name: str, *, is_leaf: bool) -> _Call:
        """A module is called within this call."""
        place = f"{name} after {self.last}" if is_leaf else name
        self.calls[place] += 1
        self.last = name
        path = place if self._is_plain_for(name) else f"{self.path} > {place}"
        if self.calls[place] > 1:
            path += f" #{self.calls[place]}"
        return _Call(name=name, path=path)

    def _is_plain_for(self, name: str) -> bool:
        """Whether this is the first call of a module that owns the module ``name``."""
        return self.path == self.name and (not self.name or name.startswith(f"{self.name}."))


class _Mode(TorchFunctionMode):
    """Knows the innermost call of a module that runs, and seeds each random operation in it."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self._place = place
        self._running = [_Call(name="", path="")]

    def enter(self, name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        """A hook that notes that the module `name` begins."""

        def begin(module: nn.Module, args: tuple[Any, ...]) -> None:
            del args
            is_leaf = next(module.children(), None) is None
            self._running.append(self._running[-1].begin(name, is_leaf=is_leaf))

        return begin

    def leave(self, module: nn.Module, args: tuple[Any, ...], result: object) -> None:
        """A hook: the innermost module has ended, the one around it goes on."""
        del module, args, result
        self._running.pop()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        del types
        if func not in _RANDOM:
            return func(*args, **(kwargs or {}))
        running = self._running[-1]
        running.random += 1
        with _seeded(f"{self._place}/{running.path}/{running.random}"):
            return drawn_on_cpu(func, args, kwargs or {})


@contextmanager
def _seeded(text: str) -> Iterator[None]:
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    generator = torch.default_generator
    with _borrowed:
        state = generator.get_state()
        generator.manual_seed(int.from_bytes(digest, "little") >> 1)
        try:
            yield
        finally:
            generator.set_state(state)

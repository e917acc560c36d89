"""Dropout that depends on what is computed, not on where or when.

torch draws dropout masks from one generator per process, so threads would disturb each other and
a cut would change the masks. Here every random operation of a forward pass is seeded from (seed,
step, micro-batch, name of the module, how many random operations it did before). Module names are
those of the whole model, hence any cut, any order of micro-batches, and a second computation of
the same micro-batch draw the same masks.

The mode is local to its thread; the process-wide generator is borrowed for one operation at a
time and put back as it was.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

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


class Randomness(Protocol):
    """Where the random operations of a forward pass take their numbers from."""

    def at(self, step: int, micro_batch: int) -> AbstractContextManager[None]:
        """Random operations of the body belong to this step and micro-batch."""
        ...


class FreeRandomness:
    """torch's own generator of the process: fast, and not repeatable across threads."""

    def at(self, step: int, micro_batch: int) -> AbstractContextManager[None]:
        """See `Randomness.at`."""
        del step, micro_batch
        return nullcontext()


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
                module.register_forward_hook(mode.leave),
            )
        ]
        try:
            with mode:
                yield
        finally:
            for hook in hooks:
                hook.remove()


@dataclass(slots=True)
class _Running:
    """A module whose forward pass has begun, and its random operations so far."""

    name: str
    count: int = 0


class _Mode(TorchFunctionMode):
    """Knows the innermost module that runs, and seeds each random operation in it."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self._place = place
        self._running = [_Running(name="")]

    def enter(self, name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        """A hook that notes that the module `name` begins."""

        def begin(module: nn.Module, args: tuple[Any, ...]) -> None:
            del module, args
            self._running.append(_Running(name=name))

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
        running.count += 1
        with _seeded(f"{self._place}/{running.name}/{running.count}"):
            return func(*args, **(kwargs or {}))


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

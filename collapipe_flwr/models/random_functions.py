"""The functions of torch that draw random numbers, which `pipeline.randomness` seeds.

A function counts by the name that a model calls, as torch does not tell a mode what that calls in
turn. What is drawn otherwise is not the same for every cut, nor when a block is computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

Function = Callable[..., Any]
_NAMES = (
    *("rand", "rand_like", "randint", "randint_like", "randn", "randn_like", "randperm"),
    *("bernoulli", "binomial", "multinomial", "normal", "poisson"),
    *("_sample_dirichlet", "_standard_gamma"),  # of torch.distributions
    *("bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_"),
    *("random_", "uniform_"),
    *("dropout", "dropout_", "dropout1d", "dropout2d", "dropout3d", "native_dropout"),
    *("alpha_dropout", "alpha_dropout_", "feature_alpha_dropout", "feature_alpha_dropout_"),
    *("feature_dropout", "feature_dropout_", "gumbel_softmax", "rrelu", "rrelu_"),
    *("fractional_max_pool2d", "fractional_max_pool2d_with_indices"),
    *("fractional_max_pool3d", "fractional_max_pool3d_with_indices"),
    *("multi_head_attention_forward", "scaled_dot_product_attention"),
    *("gru", "lstm", "rnn_relu", "rnn_tanh"),  # with dropout between their layers
    *("lobpcg", "pca_lowrank", "svd_lowrank"),
)
RANDOM: frozenset[Function] = frozenset(
    getattr(holder, name)
    for holder in (torch, torch.Tensor, functional)
    for name in _NAMES
    if hasattr(holder, name)
)

COUNTING: ContextVar[bool] = ContextVar("COUNTING", default=True)  # of this thread's module calls


@contextmanager
def leave_uncounted() -> Iterator[None]:
    """Leave calls of modules in the body uncounted: they do not belong to a forward pass."""
    token = COUNTING.set(False)
    try:
        yield
    finally:
        COUNTING.reset(token)


class RandomDetector(TorchFunctionMode):
    """A mode that knows whether one of `RANDOM` runs."""

    def __init__(self) -> None:
        super().__init__()
        self.runs_one = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        self.runs_one = func in RANDOM
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.runs_one = False


@contextmanager
def draw_alike() -> Iterator[None]:
    """Turn dropout off in the body, and draw the same numbers for each example of a batch.

    So what is computed does not depend on how many examples are drawn for at once.
    """
    with torch.random.fork_rng(devices=()), _Alike():
        yield


_RECURRENT: tuple[Function, ...] = (torch.gru, torch.lstm, torch.rnn_relu, torch.rnn_tanh)
_DROPOUT_AT: dict[Function, tuple[str, int]] = {  # the name and the position of how much drops out
    **{function: ("p", 1) for function in RANDOM if "dropout" in function.__name__},
    functional.scaled_dot_product_attention: ("dropout_p", 4),
    functional.multi_head_attention_forward: ("dropout_p", 10),
}
_LIKE: tuple[Function, ...] = (torch.rand_like, torch.randn_like, torch.randint_like)
_REFILLED: dict[Function, Function] = {
    **dict.fromkeys((torch.rand, torch.rand_like), torch.Tensor.uniform_),
    **dict.fromkeys((torch.randn, torch.randn_like), torch.Tensor.normal_),
}


class _Alike(TorchFunctionMode):
    """A mode that seeds each of `RANDOM` by how many ran before it, anew for every example."""

    def __init__(self) -> None:
        super().__init__()
        self._ran = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        given = dict(kwargs or {})
        if func not in RANDOM:
            return func(*args, **given)
        given.pop("generator", None)
        self._ran += 1
        if func in _DROPOUT_AT:
            name, at = _DROPOUT_AT[func]
            if len(args) <= at:
                return func(*args, **{**given, name: 0.0})
            return func(*args[:at], 0.0, *args[at + 1 :], **given)
        if func in _RECURRENT:
            return func(*(0.0 if isinstance(value, float) else value for value in args), **given)
        if func is torch.randperm:
            return func(*args, **given).sort(descending=True).values
        if args and isinstance(args[0], Tensor) and args[0].dim() and func not in _LIKE:
            parts = torch.split(args[0], 1)
            rows = [self._draw_seeded(func, row, *args[1:], **given) for row in parts]
            return args[0] if func.__name__.endswith("_") else torch.cat(rows)
        return self._repeat_first(func, self._draw_seeded(func, *args, **given))

    def _repeat_first(self, func: Function, drawn: Any) -> Any:
        """Make the numbers equal along the first dimension, for any length of it."""
        if not isinstance(drawn, Tensor) or not drawn.dim():
            return drawn
        if func not in _REFILLED:
            return drawn[:1].expand_as(drawn).clone()
        with torch.no_grad():
            for row in drawn:
                self._draw_seeded(_REFILLED[func], row)
        return drawn

    def _draw_seeded(self, func: Function, *args: Any, **kwargs: Any) -> Any:
        torch.default_generator.manual_seed(self._ran)
        return func(*args, **kwargs)

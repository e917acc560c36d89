"""The functions of torch that draw random numbers, which `pipeline.randomness` seeds.

A function counts by the name that a model calls, as torch does not tell a mode what that calls in
turn. What is drawn otherwise is not the same for every cut, nor when a block is computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
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
def uncounted() -> Iterator[None]:
    """Calls of modules in the body are no part of a forward pass, and number no later call."""
    token = COUNTING.set(False)
    try:
        yield
    finally:
        COUNTING.reset(token)


class Noticing(TorchFunctionMode):
    """Tells whether one of `RANDOM` runs."""

    def __init__(self) -> None:
        super().__init__()
        self.runs_one = False

    def __torch_function__(
        self,
        func: Function,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        del types
        self.runs_one = func in RANDOM
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.runs_one = False

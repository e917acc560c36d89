"""Running a model on fake tensors: they have shapes, and neither values nor memory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode


@contextmanager
def shapes_only() -> Iterator[None]:
    """Tensors made in the body are fakes, and so is whatever is computed from them."""
    # torch logs a traceback of what is then refused in one sentence
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
    # transformers makes a few scalars that escape the mode (Gemma's embedding scale)
    with FakeTensorMode(allow_non_fake_inputs=True), _OneExpert():
        yield


class _OneExpert(TorchFunctionMode):
    """A mixture's product of every token with its expert, as if all went to the first.

    Shapes, operations and what autograd keeps are the same; the true product has no rule for
    fake tensors in single precision.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        del types
        if func is torch._grouped_mm:
            tokens, experts, *_ = args
            return tokens @ experts[0]
        return func(*args, **(kwargs or {}))

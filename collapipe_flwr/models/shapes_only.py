"""Running a model on fake tensors, which have shapes and neither values nor memory, and the made-up
examples that it runs on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from collapipe_flwr.core.errors import ModelError


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


def example_inputs(config: Any, input_name: str, length: int) -> dict[str, Tensor]:
    """What the embedding reads for one example of ``length`` tokens.

    Images and sound have the size that ``config`` says, whatever ``length`` is.
    """
    if input_name == "pixel_values":
        _require(config, "image_size", "num_channels")
        size = config.image_size
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        return {input_name: torch.zeros(1, config.num_channels, height, width)}
    if input_name == "input_features":
        _require(config, "max_source_positions", "num_mel_bins")
        frames = 2 * config.max_source_positions  # the second convolution halves them
        return {input_name: torch.zeros(1, config.num_mel_bins, frames)}
    ones = torch.ones(1, length, dtype=torch.long)
    return {"input_ids": ones, "attention_mask": ones}


def _require(config: Any, *keys: str) -> None:
    for key in keys:
        if getattr(config, key, None) is None:
            raise ModelError(
                f"model type {config.model_type!r} cannot be split: its configuration has no "
                f"{key}, so the shapes in it are unknown"
            )

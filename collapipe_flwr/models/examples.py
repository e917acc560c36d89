"""One made-up example of a task: shapes are right, values mean nothing."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from collapipe_flwr.core.errors import ModelError


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

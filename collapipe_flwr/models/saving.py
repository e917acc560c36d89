"""The finished model as a folder that transformers loads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from collapipe_flwr.core.errors import ModelError
from collapipe_flwr.models.spec import ModelSpec
from collapipe_flwr.models.splitter import Splitter


def save_whole(spec: ModelSpec, weights: Mapping[str, Tensor], directory: Path | str) -> None:
    """Write a folder that ``AutoModelFor...from_pretrained`` loads with bit-equal weights."""
    model = Splitter(spec).build_whole(weights)
    try:
        model.save_pretrained(str(directory))
    except OSError as cause:
        raise ModelError(f"cannot write the model to {str(directory)!r}: {cause}") from cause

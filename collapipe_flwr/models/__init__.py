"""Splitting transformers models: embedding (control unit) | blocks (devices) | edge.

Names are imported on first use: a run-config is read without loading transformers, and a device
loads what its part needs.
"""

from __future__ import annotations

import atexit
import gc
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collapipe_flwr.models.describing import make_spec
    from collapipe_flwr.models.parts import EdgePart, EmbeddingPart, SegmentPart
    from collapipe_flwr.models.profile import profile_model
    from collapipe_flwr.models.saving import save_adapter, save_whole
    from collapipe_flwr.models.spec import BatchShape, LoraConfig, ModelConfig, ModelSpec
    from collapipe_flwr.models.split_model import SplitModel
    from collapipe_flwr.models.splitter import Splitter, splitter_of

__all__ = [
    "BatchShape",
    "EdgePart",
    "EmbeddingPart",
    "LoraConfig",
    "ModelConfig",
    "ModelSpec",
    "SegmentPart",
    "SplitModel",
    "Splitter",
    "make_spec",
    "profile_model",
    "save_adapter",
    "save_whole",
    "splitter_of",
]
_MODULES = {
    "describing": ("make_spec",),
    "parts": ("EdgePart", "EmbeddingPart", "SegmentPart"),
    "profile": ("profile_model",),
    "saving": ("save_adapter", "save_whole"),
    "split_model": ("SplitModel",),
    "spec": ("BatchShape", "LoraConfig", "ModelConfig", "ModelSpec"),
    "splitter": ("Splitter", "splitter_of"),
}

# The interpreter's last collections would walk through all of torch and transformers: a second.
atexit.register(gc.freeze)


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""Splitting transformers models: embedding (control unit) | blocks (devices) | edge."""

from collapipe_flwr.models.config import LoraConfig, ModelConfig
from collapipe_flwr.models.make_spec import make_spec
from collapipe_flwr.models.parts import EdgePart, EmbeddingPart, SegmentPart
from collapipe_flwr.models.profile import profile_model
from collapipe_flwr.models.saving import save_adapter, save_whole
from collapipe_flwr.models.spec import BatchShape, ModelSpec
from collapipe_flwr.models.splitter import Splitter

__all__ = [
    "BatchShape",
    "EdgePart",
    "EmbeddingPart",
    "LoraConfig",
    "ModelConfig",
    "ModelSpec",
    "SegmentPart",
    "Splitter",
    "make_spec",
    "profile_model",
    "save_adapter",
    "save_whole",
]

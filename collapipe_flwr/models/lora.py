"""Low-rank adapters by peft, put into skeletons, so that every part gets those of its own blocks.

peft wraps the layers that it adapts; ``key_of`` undoes that in names. Weights thus keep the
library's own keys, and adapters bear the names under which peft saves them.
"""

from __future__ import annotations

import hashlib
import math
import re
import warnings
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from collapipe_flwr.core.errors import ModelError, blaming, extra
from collapipe_flwr.models.spec import LoraConfig

ALL_LINEAR = "all-linear"
_TASK_TYPES = {
    "sequence-classification": "SEQ_CLS",
    "token-classification": "TOKEN_CLS",
    "causal-lm": "CAUSAL_LM",
    "seq2seq": "SEQ_2_SEQ_LM",
}
_WRAPPED = re.compile(
    r"\.base_layer(?=\.)|\.modules_to_save\.default(?=\.)|(?<=\.lora_[AB])\.default"
    r"|(?<=\.lora_embedding_[AB])\.default"
)
_ADAPTER = re.compile(r"\.lora_(embedding_)?[AB](\.|$)")
_KEPT_ORIGINAL = ".original_module."


def key_of(path: str) -> str:
    """The key of the tensor at ``path`` of an adapted model: its name without peft's wrappers."""
    return _WRAPPED.sub("", path)


def is_superseded(path: str) -> bool:
    """Whether peft keeps the tensor at ``path`` only to be able to go back."""
    return _KEPT_ORIGINAL in path


def is_adapter(key: str) -> bool:
    """Whether a key names an adapter's tensor."""
    return _ADAPTER.search(key) is not None


def add_adapters(
    model: PreTrainedModel, settings: LoraConfig, task: str, *, on_meta: bool = True
) -> Any:
    """Wrap the targeted layers of a model in place; returns peft's own configuration.

    In a skeleton the adapters are ``on_meta`` too, elsewhere peft draws them. Everything but
    adapters and ``modules_to_save`` is frozen by that. Raises ModelError where nothing fits
    ``target_modules``, ConfigError where peft is not installed.
    """
    peft = _peft()
    named = settings.target_modules
    config = peft.LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        lora_dropout=settings.dropout,
        target_modules=ALL_LINEAR if named == (ALL_LINEAR,) else list(named),
        modules_to_save=list(settings.modules_to_save) or None,
        task_type=_TASK_TYPES.get(task),
        inference_mode=False,
    )
    with warnings.catch_warnings():
        # gpt2's Conv1D keeps (in, out); peft notices that itself and says so each time
        warnings.filterwarnings("ignore", message="fan_in_fan_out")
        try:
            peft.inject_adapter_in_model(config, model, low_cpu_mem_usage=on_meta)
        except ValueError as cause:
            raise ModelError(_refusal(model, settings)) from cause
    return config


def default_targets(model_type: str) -> tuple[str, ...]:
    """What peft adapts in this architecture, every linear layer where it knows none."""
    _peft()
    from peft.utils import constants

    known = constants.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
    targets = known.get(model_type, (ALL_LINEAR,))
    return (targets,) if isinstance(targets, str) else tuple(targets)


def head_modules(model: PreTrainedModel) -> tuple[str, ...]:
    """The modules with parameters that stand around the base model: a task's own head."""
    base = model.base_model_prefix
    return tuple(
        name
        for name, child in model.named_children()
        if name != base and next(child.parameters(), None) is not None
    )


def first_adapter(key: str, shape: torch.Size, seed: int) -> Tensor:
    """An adapter's first values, a function of key and seed: the product of both is zero.

    The distributions are peft's: Kaiming-uniform A and zero B, for tables zero A and normal B.
    """
    on_table = ".lora_embedding_" in key
    if ".lora_embedding_A" in key or (not on_table and ".lora_B" in key):
        return torch.zeros(shape)
    digest = hashlib.blake2b(f"{seed}/{key}".encode(), digest_size=7).digest()
    random = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
    if on_table:
        return torch.randn(shape, generator=random)
    bound = 1 / math.sqrt(shape[1])
    return torch.empty(shape).uniform_(-bound, bound, generator=random)


def _refusal(model: PreTrainedModel, settings: LoraConfig) -> str:
    kinds = ("Linear", "Conv1D")
    linear = {n.rpartition(".")[2] for n, m in model.named_modules() if type(m).__name__ in kinds}
    return (
        f"lora.target-modules {' '.join(settings.target_modules)!r} name no layer of a "
        f"{model.config.model_type!r} model that can be adapted; its linear layers are "
        f"{', '.join(sorted(linear))}"
    )


def _peft() -> Any:
    with blaming("lora.rank"), extra("lora"):
        import peft
    return peft

"""A user's live ``PeftModel``: LoRA adapters above a base that every machine reads itself.

The base stays where it came from, a folder or the hub; adapters travel under the names by which
peft saves them, those of ``get_peft_model_state_dict``.
"""

from __future__ import annotations

import json
import warnings
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from collapipe_flwr.core.errors import ModelError
from collapipe_flwr.models.checkpoint import digest_of
from collapipe_flwr.models.lora import PEFT_PREFIX, is_superseded, key_of
from collapipe_flwr.models.spec import ModelSpec
from collapipe_flwr.models.splitter import Splitter

_SENT = (  # what adapters compute with, and which layers have them
    *("r", "lora_alpha", "lora_dropout", "target_modules", "exclude_modules", "modules_to_save"),
    *("layers_to_transform", "layers_pattern", "rank_pattern", "alpha_pattern", "bias"),
    *("fan_in_fan_out", "use_rslora", "use_dora", "lora_bias"),
)
_OF_THE_START = frozenset(  # they choose first values only, or tell where the adapter comes from
    {
        *("task_type", "peft_type", "auto_mapping", "peft_version", "revision", "inference_mode"),
        *("base_model_name_or_path", "init_lora_weights", "loftq_config", "eva_config"),
        *("corda_config", "lora_ga_config"),
    }
)


def is_peft(module: nn.Module) -> bool:
    """Return whether a module is one of peft's, or derives from one."""
    return any(kind.__module__.startswith("peft.") for kind in type(module).__mro__)


def model_inside(model: nn.Module) -> nn.Module:
    """Return the model inside a ``PeftModel``, with its adapters; any other one as it is.

    Raises ModelError for adapters of another kind than LoRA, and for several.
    """
    if not is_peft(model):
        return model
    _require_lora(model)
    inner: nn.Module = model.base_model.model  # type: ignore[assignment, union-attr]
    if not isinstance(inner, PreTrainedModel):
        raise ModelError(
            f"SplitModel trains adapters on models of transformers only, but this "
            f"{type(model).__name__} holds a {type(inner).__name__}: pass the model that "
            "merge_and_unload() returns, with requires_grad_(True), which trains all weights"
        )
    return inner


def _require_lora(model: Any) -> None:
    name, configs = type(model).__name__, getattr(model, "peft_config", {})
    if len(configs) != 1:
        raise ModelError(
            f"SplitModel trains one adapter, but this {name} has {', '.join(configs) or 'none'}: "
            "call delete_adapter() for those that it should not train"
        )
    ((adapter, config),) = configs.items()
    kind = getattr(config.peft_type, "value", config.peft_type)
    if kind != "LORA" or not hasattr(model.base_model, "model"):
        raise ModelError(
            f"SplitModel trains LoRA adapters (with DoRA and rsLoRA), but {adapter!r} of this "
            f"{name} is of type {kind}: pass get_peft_model(model, LoraConfig(...))"
        )
    odd = [
        field.name
        for field in fields(config)
        if field.name not in (*_SENT, *_OF_THE_START)
        and getattr(config, field.name) != getattr(type(config)(), field.name)
    ]
    if odd:
        raise ModelError(
            f"SplitModel cannot train adapters with {odd[0]} of LoraConfig, which reads more than "
            f"the layer that it adapts: make the adapter {adapter!r} without it"
        )
    if model.active_adapters != [adapter] or not any(p.requires_grad for p in model.parameters()):
        raise ModelError(
            f"the adapter {adapter!r} of this {name} does not train: load it by "
            f"PeftModel.from_pretrained(..., is_trainable=True), or call set_adapter({adapter!r})"
        )
    if any(getattr(module, "merged", False) for module in model.modules()):
        raise ModelError(
            f"the adapter {adapter!r} of this {name} is merged: call unmerge_adapter()"
        )


def adapters_of(model: Any) -> dict[str, str]:
    """Return the fields of a spec that describe a ``PeftModel``'s adapters; raises ModelError."""
    if not is_peft(model):
        return {}
    ((adapter, config),) = model.peft_config.items()
    values = {name: getattr(config, name) for name in _SENT if hasattr(config, name)}
    values = {k: sorted(v) if isinstance(v, set) else v for k, v in values.items()}
    source = str(getattr(model.base_model.model, "name_or_path", "") or "")
    if not source:
        raise ModelError(
            f"the base of this {type(model).__name__} was loaded from nowhere, but every machine "
            "reads its part of it: call base.save_pretrained(FOLDER) ahead of get_peft_model, and "
            "load it by from_pretrained(FOLDER)"
        )
    if Path(source).is_dir():
        source = str(Path(source).resolve())
    described = json.dumps({"adapter_name": adapter, **values}, sort_keys=True)
    return {"adapter_json": described, "pretrained": source}


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a live model, without peft's wrappers in their names."""
    inner, state = model_inside(model), {}
    for path, tensor in inner.state_dict().items():
        if inner is model or not is_superseded(path):
            state[path if inner is model else key_of(path)] = tensor.detach()
    return state


def prove_base(spec: ModelSpec, model: Any) -> ModelSpec:
    """Note what machines must find in the checkpoint; raises ModelError unless it is the base.

    Also raises unless what travels is what peft saves.
    """
    splitter, state, digests = Splitter(spec), state_of(model), []
    for key in splitter.resident_keys:
        stored, live = splitter.read_resident([key])[key], state[key]
        if stored.shape != live.shape or not torch.equal(stored.to(live.dtype), live):
            raise ModelError(
                f"{key!r} of this {type(model).__name__} is not that of {spec.pretrained!r}, from "
                "which every machine reads its part: call base.save_pretrained(FOLDER) ahead of "
                "get_peft_model, and load it by from_pretrained(FOLDER)"
            )
        digests.append(digest_of(live))
    _compare_names(splitter, model)
    return replace(spec, base_digests=tuple(digests))


def _compare_names(splitter: Splitter, model: Any) -> None:
    from peft import get_peft_model_state_dict

    (adapter,) = model.peft_config
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of shapes that are right with lora_bias
        saved = get_peft_model_state_dict(model, adapter_name=adapter, save_embedding_layers=False)
    sent = {PEFT_PREFIX + key for key in splitter.all_keys()}
    if other := sorted(sent.symmetric_difference(saved)):
        raise ModelError(
            f"{type(model).__name__} cannot be split: {other[0]!r} is not both trained and saved "
            "by peft: make the adapter without it"
        )

"""Users' live models: a ``PeftModel`` and what is inside it, and those that cannot be trained.

The base of a ``PeftModel`` stays where it came from, a folder or the hub, and every machine reads
its part of it; adapters travel under the names by which peft saves them, those of
``get_peft_model_state_dict``. What cannot be trained in parts is refused with the way out.
"""

from __future__ import annotations

import json
import warnings
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
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


def unwrap_model(model: nn.Module) -> nn.Module:
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


def describe_adapters(model: Any) -> dict[str, str]:
    """Return the fields of a spec that describe a ``PeftModel``'s adapters; raises ModelError."""
    if not is_peft(model):
        return {}
    ((adapter, config),) = model.peft_config.items()
    values = {name: getattr(config, name) for name in _SENT if hasattr(config, name)}
    values = {k: sorted(v) if isinstance(v, set) else v for k, v in values.items()}
    source = str(getattr(model.base_model.model, "name_or_path", "") or "")
    if not source:
        raise ModelError(
            f"the base of this {type(model).__name__} was not loaded from a folder or the hub, "
            "where every machine reads its part of it: call base.save_pretrained(FOLDER) ahead of "
            "get_peft_model, and load it by from_pretrained(FOLDER)"
        )
    if Path(source).is_dir():
        source = str(Path(source).resolve())
    described = json.dumps({"adapter_name": adapter, **values}, sort_keys=True)
    return {"adapter_json": described, "pretrained": source}


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a live model, without peft's wrappers in their names."""
    inner, state = unwrap_model(model), {}
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


_WRAPPERS = {  # of torch, with the attribute that holds the wrapped module
    "OptimizedModule": "_orig_mod",
    "DataParallel": "module",
    "DistributedDataParallel": "module",
}


def refuse_unfit(model: nn.Module, *, adapted: bool = False) -> None:
    """Raise ModelError for wrappers, odd weights, and gradients that a cut cannot add up.

    Adapters are those of a `PeftModel`, or of a model that is ``adapted``.
    """
    name = type(model).__name__
    if name in _WRAPPERS:
        inside = _WRAPPERS[name]
        raise ModelError(
            f"SplitModel needs the model inside this {name}: pass model.{inside}, and start with "
            f"model.{inside}.state_dict()"
        )
    inner = unwrap_model(model)
    if inner is not model:
        refuse_unfit(inner, adapted=True)
        return
    if not adapted:
        _refuse_adapters(model, name)
    if getattr(model, "quantization_method", None) is not None:
        raise ModelError(
            f"{name} is quantized, which its parts on other machines are not: load it without "
            "quantization_config, with dtype=torch.float32"
        )
    parameters = dict(model.named_parameters())
    lazy = next((key for key, tensor in parameters.items() if is_lazy(tensor)), None)
    if lazy is not None:
        raise ModelError(f"{lazy!r} of {name} has no shape yet: give its lazy layer all sizes")
    absent = next((key for key, tensor in parameters.items() if tensor.is_meta), None)
    if absent is not None:
        raise ModelError(
            f"SplitModel needs a model with weights, but {absent!r} of {name} is on the meta "
            "device: build it on the CPU"
        )
    _refuse_sparse(model, name)
    if isinstance(model, PreTrainedModel):
        if any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
            raise ModelError(
                f"{name} has gradient checkpointing enabled, which other machines do not learn of: "
                "call model.gradient_checkpointing_disable(); plans recompute blocks by themselves"
            )
        _refuse_other_precision(model, name)


def _refuse_adapters(model: nn.Module, name: str) -> None:
    for path, module in model.named_modules():
        if type(module).__module__.startswith("peft."):
            raise ModelError(
                f"SplitModel trains adapters of a PeftModel, but {path!r} of {name} is a "
                f"{type(module).__name__}: pass what get_peft_model(model, LoraConfig(...)) returns"
            )


def _refuse_sparse(model: nn.Module, name: str) -> None:
    for path, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            raise ModelError(
                f"{path!r} of {name} has sparse=True, but gradients are added up and clipped as "
                "dense tensors: build it with sparse=False"
            )


def _refuse_other_precision(model: PreTrainedModel, name: str) -> None:
    """Raise ModelError unless transformers' weights are float32, as parts are built."""
    for key, tensor in model.state_dict().items():
        if tensor.dtype != torch.float32 and (tensor.is_floating_point() or tensor.is_complex()):
            kind = str(tensor.dtype).removeprefix("torch.")
            raise ModelError(
                f"SplitModel trains models of transformers in float32, but {key!r} of {name} is "
                f"{kind}: pass model.float(), or load it with dtype=torch.float32"
            )

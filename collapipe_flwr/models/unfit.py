"""Live models that cannot be trained in parts as they are, each with the way out."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from transformers import PreTrainedModel

from collapipe_flwr.core.errors import ModelError
from collapipe_flwr.models.peft_models import model_inside

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
    inner = model_inside(model)
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

"""Models without weights: modules in place, parameters on the meta device.

A skeleton costs no memory for weights, keeps the library's absolute names, and says which
tensors a model has. Parts fill in the tensors that they own and drop the others.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel

from collapipe_flwr.core.errors import ModelError
from collapipe_flwr.models.causes import UNFIT, first_lines, why_unfit
from collapipe_flwr.models.lora import add_adapters
from collapipe_flwr.models.spec import ModelSpec
from collapipe_flwr.models.tasks import find_task

# Building a transformers model patches library globals for a moment; devices may be threads.
_BUILDING = threading.Lock()
_MOST = {"layer": 4096, "depth": 4096, "num_blocks": 4096, "label": 2**17}  # by words in keys


def read_config(spec: ModelSpec) -> PreTrainedConfig:
    """The configuration inside ``spec``; raises ModelError if transformers does not know it."""
    # transformers writes infinities and NaN as {"__float__": "Infinity"}
    values = PreTrainedConfig._decode_special_floats(json.loads(spec.config_json))
    model_type = values.get("model_type")
    if model_type not in CONFIG_MAPPING:
        raise ModelError(f"config_json names the unknown model_type {model_type!r}")
    _refuse_endless(values)
    try:
        config: PreTrainedConfig = CONFIG_MAPPING[model_type].from_dict(values)
    except UNFIT as cause:
        raise ModelError(f"model type {model_type!r}: {first_lines(cause)}") from cause
    config.architectures = config.architectures or []  # None breaks the choice of a head
    return config


def _refuse_endless(values: Mapping[str, Any]) -> None:
    """A peer's configuration may not have the library build modules or labels without end."""
    for key, value in values.items():
        counts = "per_layer" not in key  # else it is the size of something in a layer
        most = next((most for word, most in _MOST.items() if counts and word in key), None)
        if isinstance(value, Mapping):
            _refuse_endless(value)
        for count in value if isinstance(value, list) else (value,):
            if most is not None and type(count) is int and count > most:
                raise ModelError(f"config_json asks for {key} of {count}; {most} are allowed")


def has_head(task: str, config: PreTrainedConfig) -> bool:
    """Whether transformers has a head for the task on this architecture."""
    return bool(_auto_classes(task, config))


def auto_class(task: str, config: PreTrainedConfig) -> Any:
    """The Auto class that puts the task's head on this architecture; raises ModelError."""
    for candidate in _auto_classes(task, config):
        return candidate
    raise ModelError(f"transformers has no {task!r} head for model type {config.model_type!r}")


def _auto_classes(task: str, config: PreTrainedConfig) -> list[Any]:
    candidates: tuple[Any, ...] = find_task(task).auto_classes
    return [candidate for candidate in candidates if type(config) in candidate._model_mapping]


def build_skeleton(spec: ModelSpec) -> PreTrainedModel:
    """The whole model with meta parameters and real constant buffers.

    The attention implementation is settled here: masks are dropped silently without one.
    """
    config = read_config(spec)
    builder = auto_class(spec.task, config)
    with unset_fake_temporarily():  # some read values of tensors while they are built
        with _BUILDING, torch.device("meta"):
            model = _from_config(builder, config)
        for key in spec.untied:
            model.all_tied_weights_keys.pop(key, None)
        _fill_constants(model)
        if spec.lora is not None:
            with _BUILDING:
                add_adapters(model, spec.lora, spec.task)
    return model


def build_random(spec: ModelSpec, seed: int) -> PreTrainedModel:
    """The whole model with the library's own random first weights, drawn from ``seed``."""
    config = read_config(spec)
    builder = auto_class(spec.task, config)
    with _BUILDING, torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        return _from_config(builder, config)


def place_tensor(model: nn.Module, path: str, tensor: Tensor) -> None:
    """Set the parameter or buffer at ``path``."""
    owner, name = _holder(model, path)
    if name in owner._parameters:
        owner._parameters[name] = tensor  # type: ignore[assignment]
    else:
        owner._buffers[name] = tensor


def leave_hole(model: nn.Module, path: str) -> None:
    """Drop the tensor at ``path``.

    The hole is an empty tensor: unlike None, which norms and biases take for "do without", any
    use of it fails.
    """
    dtype = read_tensor(model, path).dtype
    place_tensor(model, path, nn.Parameter(torch.empty(0, dtype=dtype), requires_grad=False))


def read_tensor(model: nn.Module, path: str) -> Tensor:
    """The parameter or buffer at ``path``."""
    owner, name = _holder(model, path)
    tensor: Tensor | None = owner._parameters.get(name)
    if tensor is None:
        tensor = owner._buffers.get(name)
    assert tensor is not None, f"{path} is not part of this skeleton"
    return tensor


def _holder(model: nn.Module, path: str) -> tuple[nn.Module, str]:
    owner_path, _, name = path.rpartition(".")
    return model.get_submodule(owner_path), name


def _from_config(builder: Any, config: PreTrainedConfig) -> PreTrainedModel:
    try:
        model: PreTrainedModel = builder.from_config(config)
    except UNFIT as cause:
        reason = why_unfit(cause, config)
        raise ModelError(
            f"transformers cannot build the {config.model_type!r} model: {reason}"
        ) from cause
    return model


def _fill_constants(model: PreTrainedModel) -> None:
    """Compute the buffers that no checkpoint holds (rotary frequencies, sinusoids, ...)."""
    paths = [
        f"{name}.{key}" if name else key
        for name, module in model.named_modules()
        for key, buffer in module._buffers.items()
        if buffer is not None and key in module._non_persistent_buffers_set
    ]
    empty = {path: torch.empty_like(read_tensor(model, path), device="cpu") for path in paths}
    for path, tensor in empty.items():
        place_tensor(model, path, tensor)
    for path, tensor in empty.items():
        if not _is_computed(model, path, tensor) and not _compute(model, path, tensor):
            raise ModelError(
                f"model type {model.config.model_type!r} cannot be split: it does not say how its "
                f"constant {path!r} is computed"
            )


def derive_constant(model: PreTrainedModel, path: str) -> Tensor | None:
    """A fresh value of what the library never trains (sinusoids, ...); None for what trains."""
    blueprint = read_tensor(model, path)
    if blueprint.requires_grad:
        return None
    empty = torch.empty_like(blueprint, device="cpu")
    if isinstance(blueprint, nn.Parameter):
        empty = nn.Parameter(empty, requires_grad=False)
    place_tensor(model, path, empty)
    computed = _compute(model, path, empty)
    constant = read_tensor(model, path).detach()
    place_tensor(model, path, blueprint)
    return constant if computed else None


def _compute(model: PreTrainedModel, path: str, empty: Tensor) -> bool:
    """Have the library fill the tensor at ``path``; False if no module around it does.

    Most modules compute their own; some models compute them for all their blocks.
    """
    owner = path
    with torch.no_grad():
        while owner and not _is_computed(model, path, empty):
            owner = owner.rpartition(".")[0]
            module = model.get_submodule(owner)
            _closest_model(model, owner)._init_weights(module)  # type: ignore[no-untyped-call]
    return _is_computed(model, path, empty)


def _is_computed(model: nn.Module, path: str, empty: Tensor) -> bool:
    """Whether the tensor at ``path`` was replaced or written to since it was ``empty``."""
    return read_tensor(model, path) is not empty or empty._version > 0


def _closest_model(model: PreTrainedModel, path: str) -> PreTrainedModel:
    """The innermost library model around ``path``: it knows how to initialise its modules."""
    closest = model
    module: nn.Module = model
    for part in path.split(".") if path else []:
        module = module.get_submodule(part)
        if isinstance(module, PreTrainedModel):
            closest = module
    return closest

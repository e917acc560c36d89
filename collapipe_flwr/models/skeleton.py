"""Skeletons: models with their parameters on the meta device.

A skeleton needs no memory for weights, keeps the library's absolute names, and lists the tensors
of a model. Parts fill in the tensors that they own and drop the others.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel

from collapipe_flwr.core.errors import ModelError
from collapipe_flwr.core.imports import load_builder
from collapipe_flwr.models.foreign_errors import UNFIT, explain_unfit, translate_errors
from collapipe_flwr.models.lora import add_adapters
from collapipe_flwr.models.spec import ModelSpec
from collapipe_flwr.models.tasks import find_auto_class, model_class

# Building patches globals of torch or transformers for a moment; devices may be threads. The lock
# is reentrant, and users' modules are imported ahead of it, since they may build models themselves.
_BUILDING = threading.RLock()
_TABLES = (dict, OrderedDict, set)
_MOST = {"layer": 4096, "depth": 4096, "num_blocks": 4096, "label": 2**17}  # by words in keys


def read_config(spec: ModelSpec) -> PreTrainedConfig:
    """Read the configuration in ``spec``; raises ModelError if transformers does not know it."""
    # transformers writes infinities and NaN as {"__float__": "Infinity"}
    values = PreTrainedConfig._decode_special_floats(json.loads(spec.config_json))
    model_type, own = values.get("model_type"), model_class(spec)
    if (own is None or own.config_class is None) and model_type not in CONFIG_MAPPING:
        raise ModelError(f"config_json names the unknown model_type {model_type!r}")
    config_class: Any = (own and own.config_class) or CONFIG_MAPPING[model_type]
    _refuse_endless(values)
    with translate_errors(f"model type {model_type!r}"):
        config: PreTrainedConfig = config_class.from_dict(values)
    config.architectures = config.architectures or []  # None breaks the choice of a head
    return config


def _refuse_endless(values: Mapping[str, Any]) -> None:
    """Raise ModelError for a peer's configuration that asks for huge numbers of modules."""
    for key, value in values.items():
        counts = "per_layer" not in key  # else it is the size of something in a layer
        most = next((most for word, most in _MOST.items() if counts and word in key), None)
        if isinstance(value, Mapping):
            _refuse_endless(value)
        for count in value if isinstance(value, list) else (value,):
            if most is not None and type(count) is int and count > most:
                raise ModelError(f"{key} in config_json must be at most {most}, got {count}")


def build_skeleton(spec: ModelSpec) -> PreTrainedModel:
    """Build the whole model with meta parameters and real constant buffers.

    The attention implementation is settled here: masks are dropped silently without one.
    """
    config = read_config(spec)
    builder = builder_of(spec, config)
    # some models read values of tensors while they are built
    with unset_fake_temporarily(), _BUILDING:
        with torch.device("meta"):
            model = _build_from_config(builder, config)
        for key in spec.untied:
            model.all_tied_weights_keys.pop(key, None)
        _fill_constants(model)
        if spec.adapted:
            add_adapters(model, spec)
    return model


def copy_skeleton(skeleton: PreTrainedModel) -> PreTrainedModel:
    """Copy a skeleton, all but its meta parameters, much faster than the library builds one.

    Most of what a module has are empty tables of hooks, for which `deepcopy` takes long.
    """
    modules = tuple(skeleton.modules())
    copies: dict[int, Any] = {id(m): type(m).__new__(type(m)) for m in modules}
    copies |= {id(parameter): parameter for parameter in skeleton.parameters()}
    with unset_fake_temporarily():
        for module in modules:
            vars(copies[id(module)]).update(
                (name, type(value)() if _is_empty_table(value) else deepcopy(value, copies))
                for name, value in vars(module).items()
            )
    copied: PreTrainedModel = copies[id(skeleton)]
    return copied


def _is_empty_table(value: object) -> bool:
    return type(value) in _TABLES and not value


def build_random(spec: ModelSpec, seed: int) -> PreTrainedModel:
    """Build the whole model with the library's own random first weights, from ``seed``."""
    config = read_config(spec)
    builder = builder_of(spec, config)
    with _BUILDING, torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        return _build_from_config(builder, config)


def build_module(path: str, arguments_json: str, seed: int | None = None) -> nn.Module:
    """Build a module by the class or function at an import path, with initial weights.

    With a ``seed`` they are drawn from it, and the global generator is left as it was. Raises
    ModelError.
    """
    builder, arguments = load_builder(path, nn.Module), json.loads(arguments_json)
    with unset_fake_temporarily(), torch.random.fork_rng(devices=(), enabled=seed is not None):
        if seed is not None:
            torch.manual_seed(seed)
        with translate_errors(
            f"{path!r} cannot be built", (Exception,)
        ):  # whatever the user's code does
            model = builder(**arguments)
    if not isinstance(model, nn.Module):
        raise ModelError(f"{path!r} must return an nn.Module, got {type(model).__name__}")
    return model


def build_module_skeleton(path: str, arguments_json: str) -> nn.Module:
    """Build the module with its parameters on the meta device, and with real buffers."""
    load_builder(path, nn.Module)
    try:
        with _build_on_meta():
            return build_module(path, arguments_json, seed=0)
    except ModelError:
        return build_module(path, arguments_json, seed=0)  # it reads what it draws


@contextmanager
def _build_on_meta() -> Iterator[None]:
    """Register parameters of modules that this thread builds in the body without memory."""
    kind: Any = nn.Module
    with _BUILDING:
        register, here = kind.register_parameter, threading.get_ident()

        def register_on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
            if param is not None and threading.get_ident() == here and not param.is_meta:
                param = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
            register(module, name, param)

        kind.register_parameter = register_on_meta
        try:
            yield
        finally:
            kind.register_parameter = register


def builder_of(spec: ModelSpec, config: PreTrainedConfig) -> Any:
    """Return the class that ``spec`` names, or the Auto class of its task; raises ModelError."""
    found: Any = model_class(spec) or find_auto_class(spec.task, config)
    if found is None:
        raise ModelError(
            f"transformers has no {spec.task!r} head for model type {config.model_type!r}"
        )
    return found


def place_tensor(model: nn.Module, path: str, tensor: Tensor) -> None:
    """Set the parameter or buffer at a dotted path, without copying it."""
    owner, name = _find_holder(model, path)
    if name in owner._parameters:
        owner._parameters[name] = tensor  # type: ignore[assignment]
    else:
        owner._buffers[name] = tensor


def leave_holes(model: nn.Module, paths: Iterable[str]) -> None:
    """Replace the tensors at ``paths`` by empty ones; those of a dtype are the same object.

    Any use of an empty tensor fails, whereas norms and biases accept None.
    """
    holes: dict[torch.dtype, nn.Parameter] = {}
    for path in paths:
        dtype = read_tensor(model, path).dtype
        if dtype not in holes:
            holes[dtype] = nn.Parameter(torch.empty(0, dtype=dtype), requires_grad=False)
        place_tensor(model, path, holes[dtype])


def read_tensor(model: nn.Module, path: str) -> Tensor:
    """Return the parameter or buffer at a dotted path."""
    owner, name = _find_holder(model, path)
    tensor: Tensor | None = owner._parameters.get(name)
    if tensor is None:
        tensor = owner._buffers.get(name)
    assert tensor is not None, f"{path} is not part of this skeleton"
    return tensor


def _find_holder(model: nn.Module, path: str) -> tuple[nn.Module, str]:
    """Find a tensor's module, as `get_submodule` does, which checks every step."""
    *names, last = path.split(".")
    for name in names:
        found = model._modules[name]
        assert found is not None
        model = found
    return model, last


def _build_from_config(builder: Any, config: PreTrainedConfig) -> PreTrainedModel:
    try:
        own = isinstance(builder, type) and issubclass(builder, PreTrainedModel)
        build = builder._from_config if own else builder.from_config
        model: PreTrainedModel = build(config)
    except UNFIT as cause:
        reason = explain_unfit(cause, config)
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
    """Compute a tensor that the library computes and never trains; None for others."""
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
    """Fill the tensor at ``path`` by the library's own ``_init_weights``; False if that fails.

    Most modules compute their own constants; some models compute those of all their blocks.
    """
    owner = path
    with torch.no_grad():
        while owner and not _is_computed(model, path, empty):
            owner = owner.rpartition(".")[0]
            module = model.get_submodule(owner)
            _find_closest_model(model, owner)._init_weights(module)  # type: ignore[no-untyped-call]
    return _is_computed(model, path, empty)


def _is_computed(model: nn.Module, path: str, empty: Tensor) -> bool:
    """Return whether the tensor at ``path`` was replaced or written to since it was ``empty``."""
    return read_tensor(model, path) is not empty or empty._version > 0


def _find_closest_model(model: PreTrainedModel, path: str) -> PreTrainedModel:
    """Find the innermost library model around ``path``, which can initialise its modules."""
    module = model.get_submodule(path)
    while not isinstance(module, PreTrainedModel):
        path = path.rpartition(".")[0]
        module = model.get_submodule(path)
    return module


def make_example_inputs(
    config: Any, input_name: str, length: int, examples: int = 1
) -> dict[str, Tensor]:
    """Make the embedding's inputs for ``examples`` of ``length`` tokens.

    Images and sound have the size that ``config`` gives; ``length`` is ignored.
    """
    if input_name == "pixel_values":
        _require(config, "image_size", "num_channels")
        return {input_name: torch.zeros(examples, *_picture_shape(config))}
    if input_name == "input_features":
        _require(config, "max_source_positions", "num_mel_bins")
        frames = 2 * config.max_source_positions  # the second convolution halves them
        return {input_name: torch.zeros(examples, config.num_mel_bins, frames)}
    ones = torch.ones(examples, length, dtype=torch.long)
    return {"input_ids": ones, "attention_mask": ones.clone()}


def make_blank_pixels(config: Any, hidden_BTD: Tensor) -> Tensor:
    """Make blank pictures (B, C, H, W) of the size that ``config`` gives, without memory."""
    blank = torch.zeros((), device=hidden_BTD.device, dtype=hidden_BTD.dtype)
    return blank.expand(len(hidden_BTD), *_picture_shape(config))


def _picture_shape(config: Any) -> tuple[int, int, int]:
    size = config.image_size
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    return config.num_channels, height, width


def _require(config: Any, *keys: str) -> None:
    for key in keys:
        if getattr(config, key, None) is None:
            raise ModelError(
                f"model type {config.model_type!r} cannot be split: its configuration has no "
                f"{key}, so the shapes in it are unknown"
            )

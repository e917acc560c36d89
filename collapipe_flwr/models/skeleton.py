"""Models without weights: skeletons on the meta device, and runs on fake tensors.

A skeleton costs no memory for weights, keeps the library's absolute names, and says which
tensors a model has. Parts fill in the tensors that they own and drop the others. Fake tensors
have shapes and neither values nor memory: a model that runs on them shows its operations.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.overrides import TorchFunctionMode
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel

from collapipe_flwr.core.errors import ModelError
from collapipe_flwr.models.lora import add_adapters
from collapipe_flwr.models.spec import ModelSpec
from collapipe_flwr.models.tasks import auto_class, model_class
from collapipe_flwr.models.validation import UNFIT, refusing, why_unfit

# Building a transformers model patches library globals for a moment; devices may be threads.
_BUILDING = threading.Lock()
_MOST = {"layer": 4096, "depth": 4096, "num_blocks": 4096, "label": 2**17}  # by words in keys


def read_config(spec: ModelSpec) -> PreTrainedConfig:
    """The configuration inside ``spec``; raises ModelError if transformers does not know it."""
    # transformers writes infinities and NaN as {"__float__": "Infinity"}
    values = PreTrainedConfig._decode_special_floats(json.loads(spec.config_json))
    model_type, own = values.get("model_type"), model_class(spec)
    if (own is None or own.config_class is None) and model_type not in CONFIG_MAPPING:
        raise ModelError(f"config_json names the unknown model_type {model_type!r}")
    config_class: Any = (own and own.config_class) or CONFIG_MAPPING[model_type]
    _refuse_endless(values)
    with refusing(f"model type {model_type!r}"):
        config: PreTrainedConfig = config_class.from_dict(values)
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


def build_skeleton(spec: ModelSpec) -> PreTrainedModel:
    """The whole model with meta parameters and real constant buffers.

    The attention implementation is settled here: masks are dropped silently without one.
    """
    config = read_config(spec)
    builder = builder_of(spec, config)
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
    builder = builder_of(spec, config)
    with _BUILDING, torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        return _from_config(builder, config)


def builder_of(spec: ModelSpec, config: PreTrainedConfig) -> Any:
    """The class that ``spec`` names, or the Auto class of its task; raises ModelError."""
    return model_class(spec) or auto_class(spec.task, config)


def place_tensor(model: nn.Module, path: str, tensor: Tensor) -> None:
    """Set the parameter or buffer at ``path``."""
    owner, name = _holder(model, path)
    if name in owner._parameters:
        owner._parameters[name] = tensor  # type: ignore[assignment]
    else:
        owner._buffers[name] = tensor


def leave_holes(model: nn.Module, paths: Iterable[str]) -> None:
    """Drop the tensors at ``paths``.

    A hole is an empty tensor: unlike None, which norms and biases take for "do without", any use
    of it fails. All holes of a dtype are the same.
    """
    holes: dict[torch.dtype, nn.Parameter] = {}
    for path in paths:
        dtype = read_tensor(model, path).dtype
        if dtype not in holes:
            holes[dtype] = nn.Parameter(torch.empty(0, dtype=dtype), requires_grad=False)
        place_tensor(model, path, holes[dtype])


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
        own = isinstance(builder, type) and issubclass(builder, PreTrainedModel)
        build = builder._from_config if own else builder.from_config
        model: PreTrainedModel = build(config)
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


@contextmanager
def shapes_only() -> Iterator[None]:
    """Tensors made in the body are fakes, and so is whatever is computed from them."""
    # torch logs a traceback of what is then refused in one sentence
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
    # transformers makes a few scalars that escape the mode (Gemma's embedding scale)
    with FakeTensorMode(allow_non_fake_inputs=True), _WithoutValues():
        yield


class _WithoutValues(TorchFunctionMode):
    """Stands in for two functions that fake tensors cannot compute.

    A mixture's product of every token with its expert is computed as if all went to the first.
    Shapes, operations and what autograd keeps are the same; the true product has no rule for
    fake tensors in single precision.

    The random number that decides whether a block is skipped is 0: blocks are skipped where there
    is any layerdrop, which has no exact cut, and some versions of transformers compare it with 0.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        del types
        if func is torch._grouped_mm:
            tokens, experts, *_ = args
            return tokens @ experts[0]
        if func is torch.rand and args == ([],):
            return torch.tensor(0.0)
        return func(*args, **(kwargs or {}))


def example_inputs(
    config: Any, input_name: str, length: int, examples: int = 1
) -> dict[str, Tensor]:
    """What the embedding reads for examples of ``length`` tokens.

    Images and sound have the size that ``config`` says, whatever ``length`` is.
    """
    if input_name == "pixel_values":
        _require(config, "image_size", "num_channels")
        size = config.image_size
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        return {input_name: torch.zeros(examples, config.num_channels, height, width)}
    if input_name == "input_features":
        _require(config, "max_source_positions", "num_mel_bins")
        frames = 2 * config.max_source_positions  # the second convolution halves them
        return {input_name: torch.zeros(examples, config.num_mel_bins, frames)}
    ones = torch.ones(examples, length, dtype=torch.long)
    return {"input_ids": ones, "attention_mask": ones.clone()}


def blank_pixels(config: Any, hidden_BTD: Tensor) -> Tensor:
    """Pictures (B, C, H, W) of the size that ``config`` says, which take no memory."""
    size = config.image_size
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    blank = torch.zeros((), device=hidden_BTD.device, dtype=hidden_BTD.dtype)
    return blank.expand(len(hidden_BTD), config.num_channels, height, width)


def _require(config: Any, *keys: str) -> None:
    for key in keys:
        if getattr(config, key, None) is None:
            raise ModelError(
                f"model type {config.model_type!r} cannot be split: its configuration has no "
                f"{key}, so the shapes in it are unknown"
            )

"""How a torch module and its blocks are called.

Blocks are called with hidden states and other arguments. Of these, tensors travel in the context
of a micro-batch, all else is as it was in the example: the *template*, which is JSON.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.overrides import BaseTorchFunctionMode
from transformers.utils.generic import ModelOutput

from collapipe_flwr.core.errors import ModelError

Template = Mapping[str, Any]  # by argument: {"tensor": kind}, {"items": [...]} or {"value": plain}
PREFIX = "block/"
SHAPE = "shape/"
_PLAIN = (type(None), bool, int, float, str)
_FAST = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)


class Left(Exception):
    """Ends a model's forward from within, with the arguments of the call where it ended."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args)
        self.kwargs = kwargs


def leave(*args: Any, **kwargs: Any) -> NoReturn:
    """Stands in for the forward of a module that is not to be reached."""
    raise Left(*args, **kwargs)


def names_in(function: Callable[..., Any], *, needed: bool = False) -> tuple[str, ...]:
    """The arguments that a function names, or only the ``needed`` ones: without a default."""
    parameters = inspect.signature(function).parameters.values()
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    named = (p for p in parameters if p.kind not in variadic)
    return tuple(p.name for p in named if not needed or p.default is p.empty)


def arguments_of(module: nn.Module, *, needed: bool = False) -> tuple[str, ...]:
    """The arguments that a module's forward names; see `names_in`."""
    return names_in(type(module).forward, needed=needed)[1:]


def call(model: nn.Module, inputs: Sequence[str], batch: Mapping[str, Tensor]) -> Any:
    """The outputs of a model for these tensors of a batch.

    Those that its forward names are given by name, the others by position.
    """
    named = arguments_of(model)
    missing = [key for key in inputs if key not in batch and key not in named]
    if missing:
        raise ModelError(
            f"the batch has no tensor {missing[0]!r}, which the model reads; it has "
            f"{', '.join(sorted(map(repr, batch))) or 'none'}"
        )
    placed = [batch[key] for key in inputs if key not in named]
    return model(*placed, **{key: batch[key] for key in inputs if key in named and key in batch})


def split_arguments(
    block: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Tensor, dict[str, Any]]:
    """The hidden states of a call, and its other arguments by name; raises ModelError."""
    names = arguments_of(block)
    if not args or not isinstance(args[0], Tensor) or not args[0].is_floating_point():
        raise ModelError("its blocks do not take hidden states, one tensor of numbers, first")
    if len(args) > len(names):
        raise ModelError("the forward of its blocks does not name all of its arguments")
    others = dict(zip(names[1:], args[1:], strict=False))
    return args[0], {**others, **kwargs}


def describe(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The template of these arguments; raises ModelError for what cannot travel."""
    return {name: _describe(name, value) for name, value in arguments.items()}


def pack(arguments: Mapping[str, Any], template: Template) -> dict[str, Tensor]:
    """The tensors among the arguments, for the context.

    Raises ModelError if they do not fit the template.
    """
    found = describe(arguments)
    for name in found.keys() | template.keys():
        if not _fits(found.get(name), template.get(name)):
            raise ModelError(
                f"blocks are called with {name}={_told(found.get(name))}, in the example of "
                f"SplitModel with {name}={_told(template.get(name))}: give an example like the "
                "batches"
            )
    packed: dict[str, Tensor] = {}
    for name, value in arguments.items():
        _walk(PREFIX + name, value, packed.__setitem__)
    return packed


def unpack(context: Mapping[str, Tensor], template: Template) -> dict[str, Any]:
    """The arguments of blocks from a context."""
    return {name: _build(PREFIX + name, told, context) for name, told in template.items()}


def shape_tensor(tensor: Tensor) -> Tensor:
    """The shape of an input that does not travel."""
    with unset_fake_temporarily():
        return torch.tensor(tensor.shape, dtype=torch.int64)


def blocks_of(model: nn.Module, path: str) -> list[nn.Module]:
    """The blocks in order."""
    return [block for block in model.get_submodule(path)._modules.values() if block is not None]


def hidden_of(result: Any) -> Tensor:
    """The hidden states among what a block or a stack returns."""
    several = isinstance(result, (tuple, list, ModelOutput)) and result
    hidden: Tensor = result[0] if several else result
    return hidden


def handing_on(hidden: Tensor, results: int) -> Callable[..., Any]:
    """The forward of a block that hands on ``hidden`` in the form in which blocks do."""
    return lambda *_, **__: (hidden, *(None,) * (results - 1)) if results else hidden


@contextmanager
def as_in_training(model: nn.Module) -> Iterator[None]:
    """Layers of torch's transformer compute in evaluation as they do in training.

    Otherwise they would fuse a whole layer, and drop padding from a tensor that all layers share.
    """
    if torch.is_grad_enabled() or not any(isinstance(m, _FAST) for m in model.modules()):
        yield
        return
    with BaseTorchFunctionMode():  # which changes nothing, but torch fuses nothing under a mode
        yield


def _describe(name: str, value: Any) -> dict[str, Any]:
    if isinstance(value, Tensor):
        return {"tensor": "complex" if value.is_complex() else "real"}
    if isinstance(value, _PLAIN):
        return {"value": value}
    if isinstance(value, (tuple, list)):
        return {"items": [_describe(name, item) for item in value]}
    raise ModelError(
        f"its blocks are called with {name}, a {type(value).__name__}, which cannot travel to "
        "other machines: pass tensors, numbers or texts"
    )


def _walk(name: str, value: Any, note: Callable[[str, Tensor], None]) -> None:
    if isinstance(value, Tensor):
        note(name, torch.view_as_real(value) if value.is_complex() else value)
    elif isinstance(value, (tuple, list)):
        for index, item in enumerate(value):
            _walk(f"{name}/{index}", item, note)


def _build(name: str, told: Mapping[str, Any], context: Mapping[str, Tensor]) -> Any:
    if "items" in told:
        return tuple(
            _build(f"{name}/{index}", item, context) for index, item in enumerate(told["items"])
        )
    if name not in context:
        return told.get("value")
    tensor = context[name]
    return torch.view_as_complex(tensor) if told.get("tensor") == "complex" else tensor


def _fits(found: Mapping[str, Any] | None, told: Mapping[str, Any] | None) -> bool:
    """Whether they are the same, or one of them is a tensor and the other None: no mask, say."""
    optional = ({"tensor": "real"}, {"value": None})
    return found == told or (found in optional and told in optional)


def _told(told: Mapping[str, Any] | None) -> str:
    if told is None:
        return "nothing"
    return repr(told["value"]) if "value" in told else "a tensor"

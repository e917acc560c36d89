"""How a torch module and its blocks are called.

Blocks are called with hidden states and other arguments. Of these, tensors travel in the context
of a micro-batch; all else is as in the example: the *template*, which is JSON.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.overrides import BaseTorchFunctionMode, TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary
from transformers import Cache
from transformers.utils.generic import ModelOutput

from collapipe_flwr.core.errors import ModelError

Template = Mapping[str, Any]  # by argument: {"tensor": kind}, {"items": [...]} or {"value": plain}
PREFIX = "block/"
SHAPE = "shape/"
_PLAIN = (type(None), bool, int, float, str)
_FAST = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)


class StopForward(Exception):
    """The end of a model's forward from within, with the arguments of the call where it ended."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args)
        self.kwargs = kwargs


def stop_forward(*args: Any, **kwargs: Any) -> NoReturn:
    """Stop the model's forward, in place of a module's own forward."""
    raise StopForward(*args, **kwargs)


@contextmanager
def replace_forwards(forwards: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Run the body with other forwards in place of these modules' own."""
    try:
        for module, forward in forwards.items():
            module.forward = forward
        yield
    finally:
        for module in forwards:
            del module.forward


class InputTracker(TorchFunctionMode):
    """A mode that tracks what is computed from an input's values, not from its shape alone."""

    def __init__(self, source: Tensor) -> None:
        super().__init__()
        self._computed: Any = WeakIdKeyDictionary({source: None})

    def reaches(self, values: Any) -> bool:
        """Return whether any tensor among ``values`` was computed from the input."""
        return any(isinstance(v, Tensor) and v in self._computed for v in tree_leaves(values))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        given = dict(kwargs or {})
        found = func(*args, **given)
        name = getattr(func, "__name__", "")
        if (
            not name.endswith("_like")
            and not name.startswith("new_")
            and self.reaches((args, given))
        ):
            for tensor in tree_leaves(found):
                if isinstance(tensor, Tensor):
                    self._computed[tensor] = None
        return found


def list_names(function: Callable[..., Any], *, needed: bool = False) -> tuple[str, ...]:
    """Return the names of a function's arguments, or of the ``needed`` ones: without a default."""
    parameters = inspect.signature(function).parameters.values()
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    named = (p for p in parameters if p.kind not in variadic)
    return tuple(p.name for p in named if not needed or p.default is p.empty)


def list_arguments(module: nn.Module, *, needed: bool = False) -> tuple[str, ...]:
    """Return the names of the arguments of a module's forward; see `list_names`."""
    return list_names(type(module).forward, needed=needed)[1:]


def call(model: nn.Module, inputs: Sequence[str], batch: Mapping[str, Tensor]) -> Any:
    """Call a model with these tensors of a batch.

    They are passed by name if its forward has an argument of that name or takes any, otherwise by
    position.
    """
    named = list_arguments(model)
    missing = [key for key in inputs if key not in batch and key not in named]
    if missing:
        raise ModelError(
            f"the batch has no tensor {missing[0]!r}, which the model reads; it has "
            f"{', '.join(sorted(map(repr, batch))) or 'none'}"
        )
    if _takes_any_name(model):
        named = (*named, *inputs)
    placed = [batch[key] for key in inputs if key not in named]
    return model(*placed, **{key: batch[key] for key in inputs if key in named and key in batch})


def _takes_any_name(module: nn.Module) -> bool:
    """Return whether a forward has keyword arguments without names, but no positional ones."""
    kinds = {p.kind for p in inspect.signature(type(module).forward).parameters.values()}
    return inspect.Parameter.VAR_KEYWORD in kinds and inspect.Parameter.VAR_POSITIONAL not in kinds


def split_arguments(
    block: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Tensor, dict[str, Any]]:
    """Split a call into hidden states and other arguments by name; raises ModelError."""
    names = list_arguments(block)
    if not args or not isinstance(args[0], Tensor) or not args[0].is_floating_point():
        raise ModelError("its blocks do not take hidden states, one tensor of numbers, first")
    if len(args) > len(names):
        raise ModelError("the forward of its blocks does not name all of its arguments")
    others = dict(zip(names[1:], args[1:], strict=False))
    return args[0], {**others, **kwargs}


def describe(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the template of these arguments; raises ModelError for types that cannot travel."""
    return {name: _describe(name, value) for name, value in arguments.items()}


def pack(arguments: Mapping[str, Any], template: Template) -> dict[str, Tensor]:
    """Pack the tensors among the arguments into a context.

    Raises ModelError if they do not fit the template.
    """
    found = describe(arguments)
    for name in found.keys() | template.keys():
        if not _fits(found.get(name), template.get(name)):
            raise ModelError(
                f"blocks are called with {name}={_show(found.get(name))}, in the example of "
                f"SplitModel with {name}={_show(template.get(name))}: give an example like the "
                "batches"
            )
    return {
        f"{PREFIX}{name}/{index}": torch.view_as_real(leaf) if leaf.is_complex() else leaf
        for name, value in arguments.items()
        for index, leaf in enumerate(tree_leaves(value))
        if isinstance(leaf, Tensor)
    }


def unpack(context: Mapping[str, Tensor], template: Template) -> dict[str, Any]:
    """Unpack the arguments of blocks from a context."""
    return {
        name: _build(entry, (context.get(f"{PREFIX}{name}/{index}") for index in count()))
        for name, entry in template.items()
    }


def make_shape_tensor(tensor: Tensor) -> Tensor:
    """Return the shape of an input that does not travel."""
    with unset_fake_temporarily():
        return torch.tensor(tensor.shape, dtype=torch.int64)


def blocks_of(model: nn.Module, path: str) -> list[nn.Module]:
    return [block for block in model.get_submodule(path)._modules.values() if block is not None]


def hidden_of(result: Any) -> Tensor:
    """Return the hidden states among what a block or a stack returns."""
    several = isinstance(result, (tuple, list, ModelOutput)) and result
    hidden: Tensor = result[0] if several else result
    return hidden


def make_forward(hidden: Tensor, results: int) -> Callable[..., Any]:
    """Make a block's forward that returns ``hidden``, in a tuple of ``results`` if not 0."""
    return lambda *_, **__: (hidden, *(None,) * (results - 1)) if results else hidden


@contextmanager
def avoid_fast_path(model: nn.Module) -> Iterator[None]:
    """Keep torch's transformer layers from their fast path in evaluation.

    It would fuse a whole layer, and drop padding from a tensor that all layers share.
    """
    if torch.is_grad_enabled() or not any(isinstance(m, _FAST) for m in model.modules()):
        yield
        return
    with BaseTorchFunctionMode():  # it changes nothing, but no fast path is taken under a mode
        yield


def _describe(name: str, value: Any) -> dict[str, Any]:
    if isinstance(value, Tensor):
        return {"tensor": "complex" if value.is_complex() else "real"}
    if isinstance(value, _PLAIN):
        return {"value": value}
    if isinstance(value, (tuple, list)):
        return {"items": [_describe(name, item) for item in value]}
    cached = isinstance(value, Cache)
    way_out = "call the model with use_cache=False" if cached else "pass tensors, numbers or texts"
    raise ModelError(
        f"its blocks are called with {name}, a {type(value).__name__}, which cannot travel to "
        f"other machines: {way_out}"
    )


def _build(entry: Mapping[str, Any], leaves: Iterator[Tensor | None]) -> Any:
    if "items" in entry:
        return tuple(_build(item, leaves) for item in entry["items"])
    tensor = next(leaves)
    if tensor is None:
        return entry.get("value")
    return torch.view_as_complex(tensor) if entry.get("tensor") == "complex" else tensor


def _fits(found: Mapping[str, Any] | None, entry: Mapping[str, Any] | None) -> bool:
    """Return whether they are equal, or a tensor and None, as for an optional mask."""
    optional = ({"tensor": "real"}, {"value": None})
    return found == entry or (found in optional and entry in optional)


def _show(entry: Mapping[str, Any] | None) -> str:
    if entry is None:
        return "nothing"
    return repr(entry["value"]) if "value" in entry else "a tensor"

"""Model types without a record: their blocks are found by one forward pass on fake tensors.

Fake tensors have shapes and neither values nor memory. A cut is sound if a block reads nothing of
the model but the hidden states of the block before it. The trace proves that, or finds the reason
why not.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from transformers import PreTrainedModel, pytorch_utils
from transformers.modeling_layers import GradientCheckpointingLayer

from collapipe_flwr.core.errors import ModelError
from collapipe_flwr.core.imports import is_within
from collapipe_flwr.models.families import FAMILIES, Family, find_base_path, find_stack_path
from collapipe_flwr.models.foreign_errors import UNFIT, explain_unfit
from collapipe_flwr.models.module_call import list_arguments
from collapipe_flwr.models.skeleton import (
    build_skeleton,
    make_example_inputs,
    place_tensor,
    read_config,
)
from collapipe_flwr.models.spec import ModelSpec
from collapipe_flwr.models.stack import disable_cache
from collapipe_flwr.models.tasks import TASKS, find_auto_class, is_transformers_class
from collapipe_flwr.models.trace import ModelTrace

NEEDS_VALUES = "what it computes depends on values, not only on shapes"
VALUE_ERRORS = (DataDependentOutputException, DynamicOutputShapeException)
_EXAMPLES, _LENGTH = 2, 8
_ASKED = "is_torchdynamo_compiling"  # by transformers' caches of functions, and by them alone
_is_compiling: Callable[[], bool] = getattr(pytorch_utils, _ASKED)


def _passes_caches() -> bool:
    """Return whether transformers passes by its caches, which would keep fake tensors."""
    modes = _get_current_dispatch_mode_stack()
    return _is_compiling() or any(isinstance(mode, FakeTensorMode) for mode in modes)


setattr(pytorch_utils, _ASKED, _passes_caches)


@contextmanager
def use_fake_tensors() -> Iterator[None]:
    """Make tensors in the body fake, and so everything that is computed from them."""
    # torch logs a traceback of errors that callers report in one sentence
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
    # transformers makes a few scalars that escape the mode (Gemma's embedding scale)
    with FakeTensorMode(allow_non_fake_inputs=True), _ValueFreeMode():
        yield


class _ValueFreeMode(TorchFunctionMode):
    """A mode without two functions that fake tensors do not support.

    A mixture's product of every token with its expert is computed as if all went to the first.
    Shapes, operations and what autograd keeps are the same; the true product has no rule for
    fake tensors in single precision.

    The random number that decides whether a block is skipped is 0: blocks are skipped where there
    is any layerdrop, which has no exact cut, and some versions of transformers compare it with 0.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        if func is torch._grouped_mm:
            tokens, experts, *_ = args
            return tokens @ experts[0]
        if func is torch.rand and args == ([],):
            return torch.tensor(0.0)
        return func(*args, **(kwargs or {}))


@lru_cache(maxsize=64)
def discover_family(spec: ModelSpec) -> Family:
    """Trace a record for ``spec``'s model type; raises ModelError with the reason why not."""
    with use_fake_tensors():
        model = _build_fake_model(spec)
        decodes = bool(model.config.is_encoder_decoder)
        blocks_path = _find_block_list(model, spec, decodes=decodes)
        path, stack = _find_stack(model, blocks_path)
        blocks = blocks_path[len(path) :].lstrip(".")
        trace = _trace(stack, blocks, spec)
    config = read_config(spec)  # a model may have that of its text part instead
    others = [task for task in TASKS if task != "seq2seq" and find_auto_class(task, config)]
    return Family(
        model_types=(spec.model_type,),
        blocks=blocks,
        before=tuple(_find_outermost(stack, blocks, trace.ahead)),
        inputs=None,
        tasks=("seq2seq",) if decodes else tuple(sorted(others)),
        stack=path[len(find_base_path(model)) :].lstrip("."),
        input_name=stack.main_input_name,
        entry="pixel_values" if stack.main_input_name == "pixel_values" else "inputs_embeds",
        decodes=decodes,
        block_results=trace.results,
    )


def _build_fake_model(spec: ModelSpec) -> PreTrainedModel:
    model = build_skeleton(spec)
    held = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    for path, tensor in held:
        fake = torch.empty(tensor.shape, dtype=tensor.dtype)
        whole = nn.Parameter(fake) if isinstance(tensor, nn.Parameter) else fake
        place_tensor(model, path, whole)
    return model


def _find_block_list(model: PreTrainedModel, spec: ModelSpec, *, decodes: bool) -> str:
    """Find the first list of the library's own layers, or else of equal modules."""
    within: Any = model.get_encoder() if decodes else model.base_model
    inside = {id(module) for module in within.modules()}
    lists = {
        str(path): [type(block) for block in module]
        for path, module in model.named_modules()
        if id(module) in inside and isinstance(module, nn.ModuleList) and len(module)
    }
    own = [p for p, kinds in lists.items() if all(map(_is_layer, kinds))]
    equal = [p for p, kinds in lists.items() if len(set(kinds)) == 1]
    if not own and not equal:
        raise make_refusal(spec, "it has no list of blocks")
    return (own or equal)[0]


def _is_layer(kind: type) -> bool:
    return issubclass(kind, GradientCheckpointingLayer)


def _find_stack(model: PreTrainedModel, blocks_path: str) -> tuple[str, PreTrainedModel]:
    """Find the innermost library model around the blocks that reads raw inputs."""
    names = blocks_path.split(".")
    for depth in range(len(names) - 1, 0, -1):
        path = ".".join(names[:depth])
        module = model.get_submodule(path)
        if isinstance(module, PreTrainedModel) and module.main_input_name in list_arguments(module):
            return path, module
    raise ModelError(
        f"model type {model.config.model_type!r} cannot be split: nothing around its blocks "
        "reads input_ids, pixel_values or input_features"
    )


def _trace(stack: PreTrainedModel, blocks_path: str, spec: ModelSpec) -> ModelTrace:
    """Watch one pass of the stack; raises ModelError if no cut is exact."""
    inputs = make_example_inputs(stack.config, stack.main_input_name, _LENGTH, _EXAMPLES)
    for name in list_arguments(stack, needed=True):
        if name not in inputs:
            raise make_refusal(
                spec,
                f"it needs {name!r}, and models are traced with {', '.join(sorted(inputs))} only: "
                "give SplitModel a module of your own around it, with an example",
            )
    try:
        trace = ModelTrace(stack, blocks_path, inputs, rebuilt_arguments=True)
        with trace.watch():
            stack(**inputs, **disable_cache(stack))
    except VALUE_ERRORS as cause:
        raise make_refusal(spec, NEEDS_VALUES) from cause
    except ModelError as cause:
        raise make_refusal(spec, str(cause)) from cause
    except UNFIT as cause:
        reason = explain_unfit(cause, stack.config)
        raise make_refusal(spec, f"transformers cannot run it on shapes alone, {reason}") from cause
    if trace.calls[0][0].shape[0] != _EXAMPLES:
        raise make_refusal(
            spec, "the hidden states that its blocks read do not begin with examples"
        )
    if both := sorted(trace.ahead & trace.behind):
        raise make_refusal(spec, f"{both[0]!r} is read both before and after its blocks")
    return trace


def _find_outermost(stack: nn.Module, blocks_path: str, keys: Iterable[str]) -> Iterator[str]:
    """Yield the outermost modules beside the block list that hold any of these keys."""
    for name, _ in stack.named_modules():
        if not name or is_within(blocks_path, [name]) or is_within(name, [blocks_path]):
            continue
        parent = name.rpartition(".")[0]
        outermost = not parent or is_within(blocks_path, [parent])
        if outermost and any(is_within(key, [name]) for key in keys):
            yield name


def make_refusal(spec: ModelSpec, reason: str) -> ModelError:
    """Make the error for a model type of which no cut is exact."""
    what = spec.model_class or f"model type {spec.model_type!r}"
    return ModelError(f"{what} cannot be split: {reason}")


def _is_recorded(family: Family, spec: ModelSpec) -> bool:
    """Return whether a record is of the model's own body, not only of a class it derives from.

    Records of decoders are of causal attention: Gemma 3 may attend to later tokens as well.
    """
    if getattr(read_config(spec), "use_bidirectional_attention", False):
        return False
    if not spec.model_class:
        return True
    model = build_skeleton(spec.unadapted)
    try:
        return is_transformers_class(type(model.get_submodule(find_stack_path(model, family))))
    except AttributeError:
        return False


def find_family(spec: ModelSpec) -> Family:
    """Return the record of the model type, or the one that a trace finds; raises ModelError."""
    family = FAMILIES.get(spec.model_type)
    if family is None or not _is_recorded(family, spec):
        family = discover_family(spec.unadapted)
    if not spec.model_class and spec.task not in family.tasks:
        able = f"it can do {', '.join(family.tasks)}" if family.tasks else "choose another type"
        raise ModelError(
            f"model type {spec.model_type!r} cannot do the task {spec.task!r} when split; {able}"
        )
    return family

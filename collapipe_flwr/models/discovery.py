"""Model types without a record: their blocks are found by one forward pass on fake tensors.

Fake tensors have shapes and neither values nor memory. A cut is sound if a block reads nothing of
the model but the hidden states of the block before it. The trace proves that, or finds the reason
why not.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel, pytorch_utils
from transformers.modeling_layers import GradientCheckpointingLayer

from collapipe_flwr.core.errors import ModelError
from collapipe_flwr.core.imports import is_within
from collapipe_flwr.models.families import FAMILIES, Family, base_path, stack_path
from collapipe_flwr.models.foreign_errors import UNFIT, explain_unfit
from collapipe_flwr.models.module_call import arguments_of, hidden_of
from collapipe_flwr.models.random_functions import RANDOM
from collapipe_flwr.models.skeleton import (
    build_skeleton,
    make_example_inputs,
    place_tensor,
    read_config,
)
from collapipe_flwr.models.spec import ModelSpec
from collapipe_flwr.models.stack import disable_cache
from collapipe_flwr.models.tasks import TASKS, auto_class, is_transformers_class

ON_VALUES = "what it computes depends on values, not only on shapes"
VALUES_ASKED = (DataDependentOutputException, DynamicOutputShapeException)
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


class _DrawnMarker(TorchFunctionMode):
    """A mode in which tensors that are drawn at random want gradients, as learned ones do.

    What blocks read besides hidden states may be neither: every machine would draw its own.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        del types
        given = kwargs or {}
        found = func(*args, **given)
        share = given.get("p", args[1] if len(args) > 1 else 1) if "dropout" in func.__name__ else 1
        drawn = func in RANDOM and share != 0 and isinstance(found, Tensor)
        if not (drawn and found.is_floating_point() and found.dim()):  # numbers decide on skipping
            return found
        return found if found.requires_grad else found.detach().requires_grad_().clone()


@dataclass(slots=True)
class _Trace:
    """Records of the pass: modules ahead of block 0, block arguments and results.

    ``output`` is the stack's, computed from a detached result of the last block.
    """

    before: list[str] = field(default_factory=list)
    arguments: list[tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)
    results: list[Any] = field(default_factory=list)
    output: Any = None

    def note_before(self, name: str, *_: object) -> None:
        if not self.arguments and name not in self.before:
            self.before.append(name)


@lru_cache(maxsize=64)
def discover_family(spec: ModelSpec) -> Family:
    """Trace a record for ``spec``'s model type; raises ModelError with the reason why not."""
    with use_fake_tensors():
        model = _build_fake_model(spec)
        decodes = bool(model.config.is_encoder_decoder)
        blocks_path = _find_block_list(model, spec, decodes=decodes)
        stack_path, stack = _find_stack(model, blocks_path)
        blocks = blocks_path[len(stack_path) :].lstrip(".")
        trace = _run(stack, blocks, spec)
        _check_end(trace, stack, blocks, spec)
    _check_chain(trace, spec)
    config = read_config(spec)  # a model may have that of its text part instead
    others = [task for task in TASKS if task != "seq2seq" and auto_class(task, config)]
    first = trace.results[0]
    return Family(
        model_types=(spec.model_type,),
        blocks=blocks,
        before=tuple(trace.before),
        inputs=None,
        tasks=("seq2seq",) if decodes else tuple(sorted(others)),
        stack=stack_path[len(base_path(model)) :].lstrip("."),
        input_name=stack.main_input_name,
        entry="pixel_values" if stack.main_input_name == "pixel_values" else "inputs_embeds",
        decodes=decodes,
        block_results=0 if isinstance(first, Tensor) else len(first),
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
        raise refusal(spec, "it has no list of blocks")
    return (own or equal)[0]


def _is_layer(kind: type) -> bool:
    return issubclass(kind, GradientCheckpointingLayer)


def _find_stack(model: PreTrainedModel, blocks_path: str) -> tuple[str, PreTrainedModel]:
    """Find the innermost library model around the blocks that reads raw inputs."""
    names = blocks_path.split(".")
    for depth in range(len(names) - 1, 0, -1):
        path = ".".join(names[:depth])
        module = model.get_submodule(path)
        if isinstance(module, PreTrainedModel) and module.main_input_name in arguments_of(module):
            return path, module
    raise ModelError(
        f"model type {model.config.model_type!r} cannot be split: nothing around its blocks "
        "reads input_ids, pixel_values or input_features"
    )


def _run(stack: PreTrainedModel, blocks_path: str, spec: ModelSpec) -> _Trace:
    trace = _Trace()
    blocks: Any = stack.get_submodule(blocks_path)
    _watch_before(stack, blocks_path, trace)
    for block in blocks:
        block.register_forward_pre_hook(
            lambda _, args, kwargs: trace.arguments.append((args, kwargs)), with_kwargs=True
        )
        block.register_forward_hook(lambda _, __, result: trace.results.append(result))
    blocks[-1].register_forward_hook(lambda _, __, result: _detach(result))
    inputs = make_example_inputs(stack.config, stack.main_input_name, _LENGTH, _EXAMPLES)
    for name in arguments_of(stack, needed=True):
        if name not in inputs:
            raise refusal(
                spec,
                f"it needs {name!r}, and models are traced with {', '.join(sorted(inputs))} only: "
                "give SplitModel a module of your own around it, with an example",
            )
    try:
        with _DrawnMarker():
            trace.output = stack(**inputs, **disable_cache(stack))
    except VALUES_ASKED as cause:
        raise refusal(spec, ON_VALUES) from cause
    except UNFIT as cause:
        reason = explain_unfit(cause, stack.config)
        raise refusal(spec, f"transformers cannot run it on shapes alone, {reason}") from cause
    if len(trace.results) != len(blocks):
        raise refusal(
            spec, f"its {len(blocks)} blocks ran {len(trace.results)} times instead of once each"
        )
    return trace


def _watch_before(stack: nn.Module, blocks_path: str, trace: _Trace) -> None:
    """Record the outermost modules with parameters that run ahead of block 0."""
    for name, module in stack.named_modules():
        if not name or is_within(blocks_path, [name]) or is_within(name, [blocks_path]):
            continue
        parent = name.rpartition(".")[0]
        outermost = not parent or is_within(blocks_path, [parent])
        if outermost and next(module.parameters(), None) is not None:
            module.register_forward_pre_hook(partial(trace.note_before, name))


def _check_chain(trace: _Trace, spec: ModelSpec) -> None:
    """Raise ModelError unless hidden states alone connect the blocks, and nothing changes them."""
    for index, (args, kwargs) in enumerate(trace.arguments):
        if not args or not isinstance(args[0], Tensor):
            raise refusal(spec, f"block {index} does not take hidden states first")
        if args[0].shape[0] != _EXAMPLES:
            raise refusal(spec, "the hidden states that its blocks read do not begin with examples")
        if index and args[0] is not hidden_of(trace.results[index - 1]):
            raise refusal(spec, f"something happens between its blocks {index - 1} and {index}")
        if args[0].shape != trace.arguments[0][0][0].shape:
            raise refusal(spec, f"its block {index - 1} changes the shape of hidden states")
        others = {**{f"argument {i}": arg for i, arg in enumerate(args[1:], 1)}, **kwargs}
        own = [
            name
            for name, value in others.items()
            if any(isinstance(t, Tensor) and t.requires_grad for t in tree_leaves(value))
        ]
        if own:
            raise refusal(
                spec,
                f"block {index} reads {own[0]!r} besides hidden states, which is learned or drawn "
                "at random: other machines would have another",
            )


def _check_end(trace: _Trace, stack: nn.Module, blocks: str, spec: ModelSpec) -> None:
    """Raise ModelError if anything learned ahead of the last block's result is read behind it."""
    ahead = [stack.get_submodule(name) for name in (*trace.before, blocks)]
    learned = [parameter for module in ahead for parameter in module.parameters()]
    read = torch.autograd.grad(hidden_of(trace.output).sum(), learned, allow_unused=True)
    if any(gradient is not None for gradient in read):
        raise refusal(spec, "what stands behind its blocks reads more than the last one's result")


def _detach(result: Any) -> Any:
    if isinstance(result, Tensor):
        return result.detach().requires_grad_()
    return (_detach(result[0]), *result[1:])


def refusal(spec: ModelSpec, reason: str) -> ModelError:
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
        return is_transformers_class(type(model.get_submodule(stack_path(model, family))))
    except AttributeError:
        return False


def family_for(spec: ModelSpec) -> Family:
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

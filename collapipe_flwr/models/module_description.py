"""Turn any torch module into a spec, from which other machines build and cut it as traced here."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from collapipe_flwr.core.errors import ModelError, prefix_errors
from collapipe_flwr.core.imports import is_within, load_builder
from collapipe_flwr.models.foreign_errors import translate_errors
from collapipe_flwr.models.layout import find_block_index, group_tensors, list_block_paths
from collapipe_flwr.models.likeness import describe_tensor, refuse_differences
from collapipe_flwr.models.module_call import list_names
from collapipe_flwr.models.part import normalises_batches
from collapipe_flwr.models.skeleton import build_module
from collapipe_flwr.models.spec import (
    ModuleSpec,
)
from collapipe_flwr.models.trace import ModelTrace, trace_module

_LISTS = (nn.ModuleList, nn.Sequential)
_BUILT_SO = (
    "let its constructor set it, or pass SplitModel(build, arguments={...}) with the class or "
    "function that builds the live one"
)
_TRACED = 2  # examples


def describe_module(
    model: nn.Module,
    *,
    build: str,
    arguments_json: str,
    example: Mapping[str, Tensor],
    blocks: str,
    embed: Sequence[str],
    head: Sequence[str],
    inputs: tuple[str, ...],
    **choices: Any,
) -> ModuleSpec:
    """Rebuild ``model`` as other machines will, and trace it.

    ``choices`` are fields of its spec. Raises ModelError if no cut is exact.
    """
    name = type(model).__name__
    builder = load_builder(build, nn.Module)
    if arguments_json == "{}" and (needed := list_names(builder, needed=True)):
        raise ModelError(
            f"{name} needs {', '.join(needed)} to be built on other machines: pass "
            f"SplitModel({name}, arguments={{{needed[0]!r}: ...}})"
        )
    twin = _build_twin(model, build, arguments_json)
    with prefix_errors(f"{name} cannot be split"):
        blocks = blocks or _find_blocks(model)
        names = list_block_paths(model, blocks)
        if not names or not isinstance(model.get_submodule(blocks), _LISTS):
            raise ModelError(f"blocks={blocks!r} is not a list of blocks in it")
        _refuse_shared(model, names)
        trace = trace_module(twin, blocks, inputs, take_first_examples(example))
        keys = group_tensors(model)
        owners = _find_owners(model, keys, names, trace, embed, head)
        tied = [key for key in keys if len(owners.get(key, ())) > 1]
        ids = {key: _ids_of(model, key, keys[key], trace) for key in tied}
    return ModuleSpec(
        build=build,
        arguments_json=arguments_json,
        blocks=blocks,
        num_blocks=len(names),
        before=tuple(key for key in keys if owners.get(key) == {"embed"}),
        tied=tuple(ids.items()),
        updated=trace.updated,
        frozen=tuple(key for key, p in model.named_parameters() if not p.requires_grad),
        inputs=inputs,
        tail=tuple(name for name in inputs if name in trace.tail),
        call_json=json.dumps(trace.template, sort_keys=True),
        results=trace.results,
        example=tuple(
            (k, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for k, t in example.items()
        ),
        drops=trace.drops,
        whole_batches=normalises_batches(model) or bool(trace.updated),
        **choices,
    )


def _build_twin(model: nn.Module, build: str, arguments_json: str) -> nn.Module:
    """Build the model as other machines do, with the live one's weights."""
    twin = build_module(build, arguments_json, seed=0)
    name = type(model).__name__
    ours, theirs = model.state_dict(), twin.state_dict()
    for key in (*ours, *theirs):
        here, there = describe_tensor(ours.get(key)), describe_tensor(theirs.get(key))
        if here != there:
            raise ModelError(
                f"{name} cannot be split: other machines build another one, in which {key!r} is "
                f"{there} instead of {here}: pass SplitModel(build, arguments={{...}}), the class "
                "or function that built the live one"
            )
    with translate_errors(f"{name} cannot be split", (RuntimeError,)):
        twin.load_state_dict(ours)
    refuse_differences(model, twin, _BUILT_SO)
    return twin.train()


def take_first_examples(example: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Take the first few examples, if all tensors hold the same number."""
    sizes = {len(tensor) if tensor.dim() else -1 for tensor in example.values()}
    if len(sizes) != 1:
        return dict(example)
    return {key: tensor[:_TRACED] for key, tensor in example.items()}


def _find_blocks(model: nn.Module) -> str:
    """Find the only list of two or more modules of one class that is in no other such list."""
    found: list[str] = []
    for path, module in model.named_modules():
        kinds = [type(child) for child in module._modules.values()]
        equal = isinstance(module, _LISTS) and len(kinds) > 1 and len(set(kinds)) == 1
        if equal and not is_within(path, found):
            found.append(path)
    if not found:
        raise ModelError(
            "it has no list of equal blocks (nn.ModuleList or nn.Sequential): put its blocks into "
            "one, or name it by blocks='...'"
        )
    if len(found) > 1:
        raise ModelError(
            f"it has {len(found)} lists of equal blocks ({', '.join(map(repr, found))}): name one "
            "by blocks='...'"
        )
    return found[0]


def _refuse_shared(model: nn.Module, names: Sequence[str]) -> None:
    """Raise ModelError for a tensor of a block that is also used elsewhere."""
    for paths in group_tensors(model).values():
        holders = {find_block_index(path, names) for path in paths}
        if len(holders) > 1:
            raise ModelError(
                f"{paths[0]!r} and {paths[-1]!r} are one parameter, and blocks may share none"
            )
    if len({id(model.get_submodule(name)) for name in names}) < len(names):
        raise ModelError(
            "one of its blocks stands in the list twice: blocks may share no parameter"
        )


def _find_owners(
    model: nn.Module,
    keys: Mapping[str, tuple[str, ...]],
    names: Sequence[str],
    trace: ModelTrace,
    embed: Sequence[str],
    head: Sequence[str],
) -> dict[str, set[str]]:
    """Find where each tensor outside of blocks is read: "embed", "head", or both."""
    for name in (*embed, *head):
        if not any(is_within(path, [name]) for paths in keys.values() for path in paths):
            raise ModelError(f"embed or head names {name!r}, which holds no tensor of it")
    parameters = {key for key, _ in model.named_parameters()}
    found: dict[str, set[str]] = {}
    for key in keys:
        if find_block_index(key, names) is not None:
            continue
        if is_within(key, embed):
            found[key] = {"embed"}
        elif is_within(key, head):
            found[key] = {"head"}
        else:
            sides = {"embed": trace.ahead, "head": trace.behind}
            found[key] = {side for side, read in sides.items() if key in read}
        if len(found[key]) > 1 and key not in parameters:
            raise ModelError(f"the buffer {key!r} is read both before and after its blocks")
    return found


def _ids_of(model: nn.Module, key: str, paths: Sequence[str], trace: ModelTrace) -> str:
    """Return the input that holds the row numbers of a table that is read on both sides."""
    holders = [model.get_submodule(path.rpartition(".")[0]) for path in paths]
    found = trace.ids_of.get(key, {None})
    (name,) = found if len(found) == 1 else {None}
    if name is None or not any(isinstance(holder, nn.Embedding) for holder in holders):
        raise ModelError(
            f"{key!r} is read both before and after its blocks, and is not an nn.Embedding of an "
            "input's tokens: use two parameters"
        )
    return name

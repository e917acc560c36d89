"""Whether other machines build the same model: a live one and its rebuilt twin, side by side.

Weights and persistent buffers travel, and so does which parameters are frozen. All else that a
module holds must come out of its constructor: settings, hooks, functions, constants, structure.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterator, Mapping
from functools import partial
from math import isnan
from types import FunctionType, MethodType
from typing import Any
from weakref import ReferenceType

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import type_before_parametrizations
from transformers import PreTrainedConfig, PreTrainedModel

from collapipe_flwr.core.errors import ModelError

_CARRIED = frozenset(
    {
        *("_parameters", "_buffers", "_modules", "training"),  # compared or sent one by one
        *("gradient_checkpointing", "_gradient_checkpointing_func"),  # refused elsewhere
        *("_require_grads_hook", "_require_grads_hooks"),  # what is left of it when it is off
        *(
            "_is_hf_initialized",
            "name_or_path",
            "warnings_issued",
            "_weight_conversions",
        ),  # of loading
        *("all_tied_weights_keys", "generation_config", "_is_full_backward_hook"),
        "peft_config",  # of which parts get what they compute with
    }
)
# Set for every cut model, or of no effect on a model that is built
_SET_BY_THE_CUT = frozenset(
    {
        *("dtype", "torch_dtype", "return_dict", "use_cache", "tie_word_embeddings"),
        *("share_encoder_decoder_embeddings", "architectures", "_name_or_path"),
        "transformers_version",
    }
)
_UNSET = {"_use_kernels": False}  # what loading sets, and building does not
_ADDED = re.compile(r"\.(lora_\w+|modules_to_save)(\.|$)")
_ABSENT = object()
_LONGEST = 60  # characters of a value in a sentence


def refuse_differences(
    live: nn.Module, rebuilt: nn.Module, way_out: str, *, same_ties: bool = True
) -> None:
    """Raise ModelError for the first difference, which names its module and attribute.

    ``rebuilt`` may have meta parameters. Only the values that travel are not compared, and with
    ``same_ties`` off neither which parameters are one.
    """
    difference = next(_find_differences(live, rebuilt, same_ties=same_ties), None)
    if difference is not None:
        where, ours, theirs = difference
        raise ModelError(
            f"{type(live).__name__} cannot be split: its {where} is {ours}, but {theirs} where "
            f"other machines build it; {way_out}"
        )


def _find_differences(
    live: nn.Module, rebuilt: nn.Module, *, same_ties: bool = True
) -> Iterator[tuple[str, str, str]]:
    ours, theirs = (dict(m.named_modules(remove_duplicate=False)) for m in (live, rebuilt))
    for path in (*ours, *theirs):
        here, there = (_kind(modules.get(path)) for modules in (ours, theirs))
        if here != there or _find_class(ours[path]) is not _find_class(theirs[path]):
            yield f"module {path!r}", here, there
            return
    paths: dict[int, str] = {}
    for modules in (ours, theirs):
        for path, module in modules.items():
            paths.setdefault(id(module), path)
    for path, module in ours.items():
        yield from _compare_module(path, module, theirs[path], paths)
    if same_ties:
        yield from _compare_ties(live, rebuilt)
    yield from _compare_modes(ours, theirs, rebuilt, training=live.training)


def _compare_module(
    path: str, live: nn.Module, rebuilt: nn.Module, paths: Mapping[int, str]
) -> Iterator[tuple[str, str, str]]:
    if paths[id(live)] != paths[id(rebuilt)]:
        yield f"module {path!r}", f"also {paths[id(live)]!r}", f"also {paths[id(rebuilt)]!r}"
    if list(live._modules) != list(rebuilt._modules):
        yield _name(path, "order of modules"), str([*live._modules]), str([*rebuilt._modules])
    yield from _compare_tensors(path, live, rebuilt)
    ours, theirs = ({**_UNSET, **vars(module)} for module in (live, rebuilt))
    for name in dict.fromkeys((*ours, *theirs)):
        if name in _CARRIED or (name == "kwargs" and type(live).__module__.startswith("peft.")):
            continue  # the latter: where an adapter was made
        here, there = ours.get(name, _ABSENT), theirs.get(name, _ABSENT)
        if name.endswith("_hooks") and isinstance(here, dict) and isinstance(there, dict):
            here, there = _list_hooks(here), _list_hooks(there)
        elif "hooks_" in name and isinstance(here, dict) and isinstance(there, dict):
            here, there = len(here), len(there)
        if not _are_equal(here, there, paths, set()):
            yield _name(path, name), _show(here), _show(there)


def _compare_tensors(
    path: str, live: nn.Module, rebuilt: nn.Module
) -> Iterator[tuple[str, str, str]]:
    """Compare all but the values that travel: those of parameters and persistent buffers."""
    for kind in ("_parameters", "_buffers"):
        ours, theirs = getattr(live, kind), getattr(rebuilt, kind)
        for key in dict.fromkeys((*ours, *theirs)):
            here, there, name = ours.get(key), theirs.get(key), _name(path, key)
            if describe_tensor(here) != describe_tensor(there):
                yield name, describe_tensor(here), describe_tensor(there)
            elif isinstance(here, nn.Parameter):
                if here.requires_grad and not there.requires_grad:
                    yield f"{name}.requires_grad", "True", "False"
                if here._backward_hooks or here._post_accumulate_grad_hooks:
                    yield f"gradient of {name}", "changed by a hook", "not"
            elif key in live._non_persistent_buffers_set and not _are_equal(here, there, {}, set()):
                yield f"{name}, a buffer that does not travel,", "changed", "as built"


def _compare_ties(live: nn.Module, rebuilt: nn.Module) -> Iterator[tuple[str, str, str]]:
    ours, theirs = (dict(m.named_parameters(remove_duplicate=False)) for m in (live, rebuilt))
    here: dict[int, str] = {}
    there: dict[int, str] = {}
    for path in ours:
        first = here.setdefault(id(ours[path]), path)
        wanted = there.setdefault(id(theirs[path]), path)
        if first != wanted:
            yield f"parameter {path!r}", f"the one of {first!r}", f"that of {wanted!r}"


def _compare_modes(
    ours: Mapping[str, nn.Module],
    theirs: Mapping[str, nn.Module],
    rebuilt: nn.Module,
    *,
    training: bool,
) -> Iterator[tuple[str, str, str]]:
    """Yield a module in another mode than its model's own ``train`` puts it into.

    peft adds modules in training mode to whatever model.
    """
    ours, theirs = ({p: m for p, m in ms.items() if not _is_added(p, m)} for ms in (ours, theirs))
    built = {path: module.training for path, module in theirs.items()}
    rebuilt.train(training)
    wanted = {path: module.training for path, module in theirs.items()}
    live = {path: module.training for path, module in ours.items()}
    if live not in (built, wanted):
        path = next(path for path in live if live[path] != wanted[path])
        yield _name(path, "training"), str(live[path]), str(wanted[path])


def _is_added(path: str, module: nn.Module) -> bool:
    return _ADDED.search(path) is not None or type(module).__module__.startswith("peft.")


def _list_hooks(hooks: Mapping[int, Any]) -> list[Any]:
    """Return what a module calls, but for what gradient checkpointing has left."""
    left = PreTrainedModel.enable_input_require_grads.__qualname__
    return [h for h in hooks.values() if not getattr(h, "__qualname__", "").startswith(left)]


def _are_equal(
    ours: Any, theirs: Any, paths: Mapping[int, str], seen: set[tuple[int, int]]
) -> bool:
    """Return whether two attributes are the same to a model that computes with them."""
    if ours is theirs or (id(ours), id(theirs)) in seen:
        return True
    if id(ours) in paths or id(theirs) in paths:
        return paths.get(id(ours)) == paths.get(id(theirs))
    if type(ours) is not type(theirs):
        return False
    seen.add((id(ours), id(theirs)))
    if isinstance(ours, Tensor):
        return _are_equal_tensors(ours, theirs)
    if isinstance(ours, float):
        return bool(ours == theirs or (isnan(ours) and isnan(theirs)))
    if isinstance(ours, Mapping):
        ours, theirs = [*ours.items()], [*theirs.items()]
    elif (held := _list_contents(ours)) is not None:
        ours, theirs = held, _list_contents(theirs)
    if isinstance(ours, (list, tuple)):
        pairs = zip(ours, theirs, strict=False)
        return len(ours) == len(theirs) and all(_are_equal(a, b, paths, seen) for a, b in pairs)
    return _compare_otherwise(ours, theirs)


def _list_contents(value: Any) -> list[Any] | None:
    """Return what makes up an object that is not a collection; None if it compares as it is."""
    if isinstance(value, PreTrainedConfig):
        found = {k: v for k, v in value.to_dict().items() if k not in _SET_BY_THE_CUT}
        return [found]
    if isinstance(value, FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        return [value.__code__, value.__defaults__, value.__kwdefaults__, cells]
    if isinstance(value, MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, ReferenceType):
        return [value()]
    if isinstance(value, torch.Generator):
        return [value.get_state()]
    if isinstance(value, type):
        return None
    fields = dict(getattr(value, "__dict__", None) or {})
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(value, name):
                fields[name] = getattr(value, name)
    return [fields] if fields else None


def _are_equal_tensors(ours: Tensor, theirs: Tensor) -> bool:
    if (
        describe_tensor(ours) != describe_tensor(theirs)
        or ours.requires_grad != theirs.requires_grad
    ):
        return False
    if ours.is_meta or theirs.is_meta:
        return True
    return torch.equal(torch.nan_to_num(ours), torch.nan_to_num(theirs))


def _compare_otherwise(ours: Any, theirs: Any) -> bool:
    own: Any = type(ours).__eq__
    if own is not object.__eq__:
        try:
            return bool(ours == theirs)
        except (ValueError, RuntimeError):  # an array is equal number by number
            pass
    try:
        return pickle.dumps(ours) == pickle.dumps(theirs)
    except (pickle.PicklingError, TypeError, AttributeError):
        return True  # a lock or the like, which holds no setting


def describe_tensor(tensor: Any) -> str:
    """Return dtype and shape of a tensor, as in a sentence; "missing" for None."""
    if not isinstance(tensor, Tensor):
        return "missing" if tensor is None else f"a {type(tensor).__name__}"
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def _find_class(module: nn.Module) -> type:
    """Return a module's class; torch gives each parametrized module a class of its own."""
    return type_before_parametrizations(module)


def _kind(module: nn.Module | None) -> str:
    return "missing" if module is None else f"a {type(module).__name__}"


def _name(path: str, name: str) -> str:
    return repr(f"{path}.{name}" if path else name)


def _show(value: Any) -> str:
    if value is _ABSENT:
        return "not set"
    if isinstance(value, Tensor):
        return f"a tensor {describe_tensor(value)}"
    text = " ".join(repr(value).split())
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."

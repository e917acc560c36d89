"""What a torch module is that knows no library: how it is built, and where it may be cut.

It is built by an import path, whole or without memory for its parameters.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from collapipe_flwr.core.errors import ModelError, ProtocolError
from collapipe_flwr.core.imports import load_builder
from collapipe_flwr.core.json_codec import from_json
from collapipe_flwr.models.validation import refusing

Example = tuple[str, str, tuple[int, ...]]  # tensor of a batch, dtype, shape
_MOST_BLOCKS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleSpec:
    """One torch module by the import path of what ``build``s it, without weights.

    ``before`` are the keys that the control unit owns, ``tied`` those tables among the edge's that
    the embedding reads too, with the input that holds the ids. ``updated`` are buffers that
    training changes, ``frozen`` parameters that it does not.

    ``inputs`` are the tensors of a batch that forward takes; ``tail`` those that travel because
    what stands behind the blocks reads them. ``call_json`` says how blocks are called beside hidden
    states, ``results`` how long the tuple is that they return (0: bare hidden states). ``example``
    is the shape of one batch. A trace of the live model found all this (`module_trace`).
    """

    build: str
    arguments_json: str = "{}"
    blocks: str
    num_blocks: int
    before: tuple[str, ...]
    tied: tuple[tuple[str, str], ...] = ()
    updated: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()
    inputs: tuple[str, ...]
    tail: tuple[str, ...] = ()
    call_json: str = "{}"
    results: int = 0
    example: tuple[Example, ...]
    drops: bool = True
    whole_batches: bool = False
    edge_blocks: int = 0
    loss: str = ""
    weight: str = ""

    def __post_init__(self) -> None:
        for text in (self.arguments_json, self.call_json):
            if not isinstance(json.loads(text), dict):
                raise ModelError(f"{text[:80]!r} holds no arguments by name")
        for name, dtype, _ in self.example:
            if not isinstance(getattr(torch, dtype, None), torch.dtype):
                raise ModelError(f"the example's {name!r} is of no type that torch has: {dtype!r}")
        if not 0 < self.num_blocks <= _MOST_BLOCKS:
            raise ModelError(f"a module of {self.num_blocks} blocks cannot be cut")
        if not 0 <= self.edge_blocks < self.num_blocks:
            raise ModelError(
                f"edge_blocks must be below the model's {self.num_blocks} blocks, got "
                f"{self.edge_blocks}"
            )

    @property
    def batch_size(self) -> int:
        """Examples in the example; 0 where its tensors do not agree."""
        sizes = {shape[0] if shape else 0 for _, _, shape in self.example}
        return sizes.pop() if len(sizes) == 1 else 0

    def to_json(self) -> str:
        """One string; the inverse of ``from_json``."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> ModuleSpec:
        """Rebuild a spec; raises ModelError if ``text`` is not one."""
        try:
            return from_json(cls, text, "it")
        except (ProtocolError, ValueError) as cause:  # its arguments are JSON within
            raise ModelError(f"the description of a module cannot be read: {cause}") from cause


_BUILDING = threading.Lock()  # torch is patched for a moment
_register: Any = nn.Module.register_parameter


class _Thread(threading.local):
    hollow = False  # whether modules that this thread builds get parameters without memory


_thread = _Thread()


def build_module(path: str, arguments_json: str, seed: int | None = None) -> nn.Module:
    """The module with the first weights that it draws itself; raises ModelError.

    With a ``seed`` they are drawn from it, and chance outside stays as it was.
    """
    builder, arguments = load_builder(path, nn.Module), json.loads(arguments_json)
    with unset_fake_temporarily(), torch.random.fork_rng(devices=(), enabled=seed is not None):
        if seed is not None:
            torch.manual_seed(seed)
        with refusing(f"{path!r} cannot be built", (Exception,)):  # whatever the user's code does
            model = builder(**arguments)
    if not isinstance(model, nn.Module):
        raise ModelError(f"{path!r} must return an nn.Module, got {type(model).__name__}")
    return model


def build_hollow(path: str, arguments_json: str) -> nn.Module:
    """The module with its parameters on the meta device, and with real buffers."""
    try:
        with _on_meta():
            return build_module(path, arguments_json, seed=0)
    except ModelError:
        return build_module(path, arguments_json, seed=0)  # it reads what it draws


@contextmanager
def _on_meta() -> Iterator[None]:
    kind: Any = nn.Module
    with _BUILDING:
        kind.register_parameter = _register_on_meta
        _thread.hollow = True
        try:
            yield
        finally:
            _thread.hollow = False
            kind.register_parameter = _register


def _register_on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
    if param is not None and _thread.hollow and param.device.type != "meta":
        param = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
    _register(module, name, param)

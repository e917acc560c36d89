"""Building torch modules by import path, whole or without memory for their parameters."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from collapipe_flwr.core.errors import CollaPipeError, ModelError
from collapipe_flwr.core.imports import load_builder
from collapipe_flwr.models.validation import first_lines

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
        try:
            model = builder(**arguments)
        except CollaPipeError:
            raise
        except Exception as cause:  # whatever the user's code does
            raise ModelError(f"{path!r} cannot be built: {first_lines(cause)}") from cause
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

"""A pretend accelerator: real numbers, computed on the CPU, at a place of their own.

Its tensors wrap CPU tensors. An operation that takes some of both kinds fails, as on a real one;
only copies from one to the other pass, and numbers without dimensions. What it has out is counted,
as an allocator does. It is torch's own backend for such things under the name ``pretend``, which
stays with the process: nothing takes it unless it is asked for. Where autograd was used before
that, backward passes must stay in one thread (`pipeline.compute.use_one_thread`).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils import backend_registration

NAME = "pretend"
LACKING = (
    ""
    if hasattr(backend_registration, "_setup_privateuseone_for_python_backend")
    else f"torch {torch.__version__} knows no accelerators that are written in Python"
)
_aten = torch.ops.aten


@cache
def pretend_device() -> torch.device:
    """The device; its backend is registered with the first call."""
    backend_registration._setup_privateuseone_for_python_backend(NAME, _module)
    here = torch.library.Library("aten", "IMPL")
    for name, make in (
        ("empty.memory_format", torch.empty),
        ("empty_strided", torch.empty_strided),
    ):
        here.impl(name, _maker(make), "PrivateUse1")
    here.impl("_copy_from", _copied, "PrivateUse1")
    _kept.append(here)
    return torch.device(NAME, 0)


class PretendTensor(Tensor):
    """`inner` holds the numbers."""

    inner: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: Tensor) -> PretendTensor:
        """Of the same shape and strides."""
        with torch.inference_mode(False):  # in which torch lets no such tensor be a view
            made = Tensor._make_wrapper_subclass(
                cls,
                inner.shape,
                strides=inner.stride(),
                storage_offset=inner.storage_offset(),
                dtype=inner.dtype,
                device=torch.device(NAME, 0),
            )
        made.inner = inner
        _module.count(inner)
        return made

    def untyped_storage(self) -> Any:
        """Of the numbers."""
        return self.inner.untyped_storage()

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Compute on the CPU what is all here; refuse what mixes places."""
        del types
        if func is _aten.copy_.default:
            return _copied(args[1], args[0])
        if func is _aten._to_copy.default:
            return _to(*args, **(kwargs or {}))
        if torch.is_inference_mode_enabled():  # else autograd has taken it apart already
            apart = func.decompose(*args, **(kwargs or {}))
            if apart is not NotImplemented:
                return apart
        known: dict[int, PretendTensor] = {}

        def unwrapped(leaf: Any) -> Any:
            if isinstance(leaf, PretendTensor):
                known[id(leaf.inner)] = leaf
                return leaf.inner
            if isinstance(leaf, Tensor) and leaf.dim():
                raise RuntimeError(f"{func} is called with tensors on {NAME} and on cpu")
            return torch.device("cpu") if isinstance(leaf, torch.device) else leaf

        def wrapped(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            return known[id(leaf)] if id(leaf) in known else PretendTensor(leaf)

        found = func(*_each(unwrapped, args), **_each(unwrapped, dict(kwargs or {})))
        return _each(wrapped, found)


class _Module(getattr(backend_registration, "_DummyBackendModule", object)):  # torch 2.9 has none
    """What `torch.pretend` is: how much memory is out, and how much is kept for what comes."""

    def __init__(self) -> None:
        self.now = self.most = self.kept = 0  # bytes
        self._lock = threading.RLock()  # storages go whenever the interpreter finds the time
        self._out: dict[int, weakref.ref[Any]] = {}  # storages by address

    def count(self, inner: Tensor) -> None:
        """A tensor is here; its storage counts once, until it is gone."""
        storage = inner.untyped_storage()
        address, size = storage.data_ptr(), storage.nbytes()
        with self._lock:
            if size and address not in self._out:
                self._out[address] = weakref.ref(storage, lambda _: self._gone(address, size))
                self.now += size
                self.kept = max(self.kept - size, 0)
                self.most = max(self.most, self.now)

    def _gone(self, address: int, size: int) -> None:
        with self._lock:
            del self._out[address]
            self.now -= size
            self.kept += size

    def empty_cache(self) -> None:
        self.kept = 0

    def synchronize(self, _: object = None) -> None:
        """Nothing is under way."""

    def memory_allocated(self, _: object = None) -> int:
        return self.now

    def max_memory_allocated(self, _: object = None) -> int:
        return self.most

    def reset_peak_memory_stats(self, _: object = None) -> None:
        self.most = self.now

    def mem_get_info(self, _: object = None) -> tuple[int, int]:
        return 10**9 - self.now - self.kept, 10**9


_module = _Module()
_kept: list[object] = []


def _each(change: Callable[[Any], Any], value: Any) -> Any:
    """Apply to everything in lists, tuples and dicts."""
    if isinstance(value, (list, tuple)):
        return type(value)([_each(change, item) for item in value])
    if isinstance(value, dict):
        return {key: _each(change, item) for key, item in value.items()}
    return change(value)


def _unwrapped(tensor: Tensor) -> Tensor:
    return tensor.inner if isinstance(tensor, PretendTensor) else tensor


def _copied(source: Tensor, target: Tensor, _: bool = False) -> Tensor:
    _unwrapped(target).copy_(_unwrapped(source))
    return target


def _to(source: Tensor, *, device: Any = None, **kind: Any) -> Tensor:
    kind.pop("non_blocking", None)
    there = source.device if device is None else torch.device(device)
    found: Tensor = _aten._to_copy.default(_unwrapped(source), **kind)
    return PretendTensor(found) if there.type == NAME else found


def _maker(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def made(*sizes: Any, dtype: Any = None, **_: Any) -> Tensor:
        return PretendTensor(make(*sizes, dtype=dtype))

    return made

"""A pretend accelerator: real numbers, computed on the CPU, at a place of their own.

Its tensors wrap CPU tensors. An operation that takes some of both kinds fails, as on a real one;
only copies from one to the other pass, and numbers without dimensions. What it has out is counted,
as an allocator does. It is torch's own backend for such things under the name ``pretend``, which
stays with the process: nothing takes it unless it is asked for.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._pytree import tree_leaves, tree_map

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
        leaves = tree_leaves((args, dict(kwargs or {})))
        if any(_is_elsewhere(leaf) for leaf in leaves):
            raise RuntimeError(f"{func} is called with tensors on {NAME} and on cpu")
        known = {id(leaf.inner): leaf for leaf in leaves if isinstance(leaf, PretendTensor)}
        own_args, own = tree_map(_unwrapped, (args, dict(kwargs or {})))
        return tree_map(lambda leaf: _wrapped(leaf, known), func(*own_args, **own))


class _Module(getattr(backend_registration, "_DummyBackendModule", object)):  # torch 2.9 has none
    """What `torch.pretend` is: how much memory is out."""

    def __init__(self) -> None:
        self.out: dict[int, int] = {}  # bytes by address
        self.most = 0

    def count(self, inner: Tensor) -> None:
        storage = inner.untyped_storage()
        address = storage.data_ptr()
        if address not in self.out and storage.nbytes():
            self.out[address] = storage.nbytes()
            self.most = max(self.most, sum(self.out.values()))
            weakref.finalize(storage, self.out.pop, address, None)

    def synchronize(self, _: object = None) -> None:
        """Nothing is under way."""

    def memory_allocated(self, _: object = None) -> int:
        return sum(self.out.values())

    def max_memory_allocated(self, _: object = None) -> int:
        return self.most

    def reset_peak_memory_stats(self, _: object = None) -> None:
        self.most = sum(self.out.values())

    def mem_get_info(self, _: object = None) -> tuple[int, int]:
        return 10**9 - sum(self.out.values()), 10**9


_module = _Module()
_kept: list[object] = []


def _is_elsewhere(leaf: object) -> bool:
    return isinstance(leaf, Tensor) and not isinstance(leaf, PretendTensor) and leaf.dim() > 0


def _unwrapped(leaf: Any) -> Any:
    if isinstance(leaf, PretendTensor):
        return leaf.inner
    return torch.device("cpu") if isinstance(leaf, torch.device) else leaf


def _wrapped(leaf: Any, known: Mapping[int, PretendTensor]) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return known[id(leaf)] if id(leaf) in known else PretendTensor(leaf)


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

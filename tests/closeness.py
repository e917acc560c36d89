"""How far apart two computations of the same numbers may lie: what rounding explains, and no more.

Sums that are added in another order differ in their last bits, and the order is a matter of the
processor: of how many numbers it adds at once. So whatever one machine shows says little about
the next one, and an absolute bound says nothing without the size of the numbers. Here the bound is
`ROUNDINGS` roundings of the largest number compared, 8e-6 of it in single precision. The models of
the tests stay below a seventh of that with every kind of kernel that torch has on x86: SSE, AVX2,
AVX-512.

A mistake is far larger. What is left out (a residual, a mask, a micro-batch) moves the result by
the order of its size, and a scale that is wrong by a thousandth moves it by 130 times the bound.
What is the same computation, whoever carries it out, is compared with `torch.equal` instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

ROUNDINGS = 64
SINGLE = ROUNDINGS * torch.finfo(torch.float32).eps


def near(expected: float | Iterable[float]) -> Any:
    """For ``==``: numbers that were computed in single precision, each on its own scale."""
    return pytest.approx(expected, rel=SINGLE)


def assert_near(found: Any, wanted: Any, *, depth: int = 1) -> None:
    """Tensors, or mappings or sequences of them, which share the scale of the largest number.

    Gradients whose true value is 0, as those of the biases of attention's keys, are rounding errors
    of larger ones, so no tensor has a scale of its own. A run of many steps is as many times as
    deep: AdamW takes what is left of a small gradient for a direction.
    """
    ours, theirs = _named(found), _named(wanted)
    assert ours.keys() == theirs.keys()
    largest = max(_size(tensor) for tensor in theirs.values() if tensor.is_floating_point())
    for name, tensor in theirs.items():
        assert (ours[name].shape, ours[name].dtype) == (tensor.shape, tensor.dtype), name
        if not tensor.is_floating_point():
            assert torch.equal(ours[name], tensor), name
            continue
        apart = _size(ours[name] - tensor)
        allowed = depth * ROUNDINGS * torch.finfo(tensor.dtype).eps * largest
        assert apart <= allowed, f"{name} is off by {apart:.2e}, {allowed:.2e} is allowed"


def assert_same(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    """The same tensors to the last bit, by name."""
    assert set(found) == set(wanted)
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)


def _named(tensors: Any) -> Mapping[str, Tensor]:
    if isinstance(tensors, Tensor):
        return {"the tensor": tensors.detach()}
    pairs = tensors.items() if isinstance(tensors, Mapping) else enumerate(tensors)
    return {str(name): tensor.detach() for name, tensor in pairs}


def _size(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0

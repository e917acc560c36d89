"""Random operations on an accelerator, with the numbers that a CPU would draw.

Every kind of device has a generator of its own, so the same seed means other masks on each. Here
the masks are drawn on the CPU, from its generator as it stands, and moved; the products with them
are the accelerator's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._pytree import tree_leaves, tree_map

from collapipe_flwr.pipeline.compute import CPU

_DROPOUTS = (functional.dropout, functional.dropout1d, functional.dropout2d, functional.dropout3d)
Function = Callable[..., Any]


def drawn_on_cpu(func: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """`func` of the arguments; without any on an accelerator a plain call."""
    place = _place(args, kwargs)
    if place == CPU:
        return func(*args, **kwargs)
    if func in _DROPOUTS:
        return _dropout(func, *args, **kwargs)
    if func is functional.scaled_dot_product_attention:
        return _attention(*args, **kwargs)
    if func is functional.multi_head_attention_forward:
        return _multi_head(*args, **kwargs)
    return _there_and_back(func, args, kwargs, place)


def _dropout(
    func: Function, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    """What is kept of ones is by how much all else is multiplied.

    They lie in memory as the input does, for that is the order in which they are drawn.
    """
    if not training or p == 0:
        same: Tensor = func(input, p, training, inplace)
        return same
    kept: Tensor = func(torch.ones_like(input, device=CPU), p, training).to(input.device)
    return input.mul_(kept) if inplace else input * kept


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """With dropout by the definition, in the order in which torch computes it on a CPU."""
    if not dropout_p:
        return functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask,
            dropout_p,
            is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
        )
    if enable_gqa:
        key, value = (t.repeat_interleave(query.size(-3) // t.size(-3), -3) for t in (key, value))
    root = (query.shape[-1] ** -0.5 if scale is None else scale) ** 0.5
    scores = (query * root) @ (key.transpose(-2, -1) * root)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(
            ~attn_mask, -torch.inf
        )
    if attn_mask is not None:
        scores = scores + attn_mask
    shares = torch._safe_softmax(scores, -1)  # 0 where everything is masked
    return _dropout(functional.dropout, shares, dropout_p) @ value


def _there_and_back(
    func: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any], place: torch.device
) -> Any:
    """All of it on the CPU, for what is rare; results in place are written back."""
    here_args, here = tree_map(_here, (args, dict(kwargs)))
    found = func(*here_args, **here)
    if func in (torch.Tensor.bernoulli_, torch.Tensor.uniform_) or here.get("inplace"):
        return args[0].copy_(found)
    return tree_map(lambda leaf: leaf.to(place) if isinstance(leaf, Tensor) else leaf, found)


def _here(leaf: Any) -> Any:
    if isinstance(leaf, torch.device):
        return CPU
    return leaf.to(CPU) if isinstance(leaf, Tensor) else leaf


def _place(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.device:
    """The first that is not the CPU, of tensors and of what is asked for."""
    asked = torch.device(kwargs["device"]) if kwargs.get("device") is not None else CPU
    leaves = tree_leaves((args, dict(kwargs)))
    places = (leaf.device for leaf in leaves if isinstance(leaf, Tensor))
    return next((place for place in (asked, *places) if place != CPU), CPU)


def _by_draws_here(function: Any) -> Function:
    """The same code, whose dropout is the one above.

    Modes do not see what a function of torch calls within.
    """
    own = {
        **function.__globals__,
        "dropout": lambda *args, **kwargs: _dropout(functional.dropout, *args, **kwargs),
        "scaled_dot_product_attention": _attention,
        "has_torch_function": lambda _: False,
    }
    copied = FunctionType(function.__code__, own, function.__name__, function.__defaults__)
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied


_multi_head = _by_draws_here(functional.multi_head_attention_forward)

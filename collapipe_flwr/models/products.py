"""Adapters as the products that they add to weights, of which models of any rank have a mean.

An adapter of rank r is a pair of factors, B (out, r) and A (r, in), that adds s B A to a matrix,
where s = alpha / r (alpha / sqrt(r) in rsLoRA). The mean of s B A over clusters is exact, the means
of B and of A are not, and have no meaning across ranks.

A product is kept as U C V^T, with orthonormal U (out, k) and V (in, k). Models in the same bases
differ in their cores C (k, k) alone, which are small, and whose mean is that of the products.

Factors of rank r come from the r largest singular values of C. As in a new adapter, one factor
keeps the length of its draw, here along singular vectors, and the other holds the singular values:
factors of a product of zero are not both zero, from where nothing could be learnt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

Factors = tuple[Tensor, Tensor]
"""A (r, in, ...) and B (out, r, ...)."""
_DRAWN_A = 3.0**-0.5  # the length of a drawn row of A: uniform within 1 / sqrt(in)


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """The keys of one pair of factors, and its scale s; of a table's adapter, B is drawn."""

    a: str
    b: str
    scale: float
    on_table: bool = False


class Bases(NamedTuple):
    """Orthonormal columns, (out, k) and (in, k), that span the factors of several models."""

    left: Tensor
    right: Tensor

    @staticmethod
    def of(models: Sequence[Factors]) -> Bases:
        """Find the bases of these models' factors."""
        rows, columns = zip(*map(_as_matrices, models), strict=True)
        left, _ = torch.linalg.qr(torch.cat(columns, dim=1))
        right, _ = torch.linalg.qr(torch.cat(rows).T)
        return Bases(left, right)

    def core_of(self, factors: Factors, scale: float) -> Tensor:
        """Return C of the product of factors that these bases span, (k, k)."""
        a, b = _as_matrices(factors)
        return scale * (self.left.T @ b) @ (a @ self.right)


def multiply(factors: Factors, scale: float) -> Tensor:
    """Return the whole product s B A, (out, in), in single precision."""
    a, b = _as_matrices(factors)
    return (scale * b @ a).float()


def factorize(
    core: Tensor, bases: Bases | None, adapter: Adapter, like: Factors
) -> tuple[Factors, float]:
    """Return the nearest factors with the shapes of ``like``, and the squared norm that is lost.

    Without ``bases``, ``core`` is the whole product. The largest entry of a left singular vector is
    positive, so that factors do not depend on the library that computes them.
    """
    left, values, right = torch.linalg.svd(core.double(), full_matrices=False)
    if bases is not None:
        left, right = bases.left @ left, right @ bases.right.T
    signs = left.gather(0, left.abs().argmax(0, keepdim=True)).sign()
    left, right = left * signs, right * signs.T
    rank = min(len(like[0]), len(values))
    drawn = len(left) ** 0.5 if adapter.on_table else _DRAWN_A
    sizes = (values / (drawn * adapter.scale), torch.full_like(values, drawn))
    of_a, of_b = sizes if adapter.on_table else sizes[::-1]
    a, b = (torch.zeros_like(factor, dtype=torch.float64).flatten(1) for factor in like)
    a[:rank] = (of_a[:, None] * right)[:rank]
    b[:, :rank] = (left * of_b)[:, :rank]
    shaped = a.view(like[0].shape).to(like[0].dtype), b.view(like[1].shape).to(like[1].dtype)
    return shaped, float(values[rank:].square().sum())


def _as_matrices(factors: Factors) -> Factors:
    a, b = factors
    return a.double().flatten(1), b.double().flatten(1)

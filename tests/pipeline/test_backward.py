"""Gradients are bit for bit those of a backward pass in one piece; that of the input is first."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional

from collapipe_flwr.pipeline.backward import input_first

torch.set_num_threads(1)
WIDTH = 8


class Tied(nn.Module):
    """One matrix used twice: the order in which its gradients are added must not change."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.last(
            functional.linear(functional.linear(hidden, self.weight).tanh(), self.weight)
        )


class Beside(nn.Module):
    """A branch that does not see the input, as the decoder of an encoder-decoder model begins."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(3, WIDTH)
        self.deep = nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        )
        self.mixed = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.mixed(hidden) * self.deep(self.table(torch.tensor([0, 2, 0, 1])))


def frozen_base() -> nn.Module:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
    model[2].weight.requires_grad_(False)
    return model


def encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)


class InBfloat16(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.inner(hidden)


def gradients(make, *, in_two: bool) -> list[Tensor | None]:
    """Of inputs and weights after two micro-batches."""
    torch.manual_seed(0)
    model = make()
    inputs = [torch.randn(2, 4, WIDTH, requires_grad=True) for _ in range(2)]
    for hidden in inputs:
        output = model(hidden)
        edge, gradient = get_gradient_edge(output), torch.ones_like(output) / 3
        if in_two:
            input_first(edge, gradient, hidden).finish()
        else:
            torch.autograd.backward(edge, gradient)
    return [tensor.grad for tensor in (*inputs, *model.parameters())]


@pytest.mark.parametrize("make", [encoder, Tied, Beside, frozen_base, InBfloat16])
def test_gradients_are_those_of_one_piece(make):
    whole, halves = gradients(make, in_two=False), gradients(make, in_two=True)
    assert [g is None for g in halves] == [g is None for g in whole]
    assert all(torch.equal(a, b) for a, b in zip(halves, whole, strict=True) if a is not None)


def test_the_input_comes_first_and_matrices_later():
    model, hidden = encoder(), torch.randn(2, 4, WIDTH, requires_grad=True)
    rest = input_first(get_gradient_edge(model(hidden).sum()), None, hidden)
    assert hidden.grad is not None
    missing = {name for name, weight in model.named_parameters() if weight.grad is None}
    assert missing == {name for name, weight in model.named_parameters() if weight.dim() > 1}
    assert rest.tensors
    rest.finish()
    assert all(weight.grad is not None for weight in model.parameters())
    assert not rest.tensors


def test_an_input_that_is_not_used_gets_no_gradient():
    weight, hidden = torch.ones(2, 2, requires_grad=True), torch.ones(2, requires_grad=True)
    input_first(get_gradient_edge(weight.sum()), None, hidden).finish()
    assert hidden.grad is None
    assert weight.grad is not None

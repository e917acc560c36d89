"""Gradients added in place are autograd's, at once or later."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from collapipe_flwr.pipeline.backward import (
    FusedEmbedding,
    FusedLinear,
    defer_products,
    fuse_accumulation,
)
from tests.closeness import assert_near

pytestmark = pytest.mark.usefixtures("small_matrices_are_fused")

WIDTH, MICRO_BATCHES = 8, 3


class Tied(nn.Module):
    """One matrix used by a layer and by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.last(functional.linear(hidden, self.last.weight).tanh())


class Twice(nn.Module):
    """One layer used twice, once on what does not come from the input."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(3, WIDTH)
        self.layer = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.layer(hidden) * self.layer(self.table(torch.tensor([0, 2, 0, 1])))


def frozen_base() -> nn.Module:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
    model[2].weight.requires_grad_(False)
    return model


def encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)


class Words(nn.Module):
    """A padded table whose rows are also the output layer; hidden states pick rows."""

    def __init__(self, rows: int = 40) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, WIDTH, padding_idx=3)
        self.out = nn.Linear(WIDTH, rows, bias=False)
        self.out.weight = self.table.weight

    def forward(self, hidden: Tensor) -> Tensor:
        ids = (hidden.detach().abs() * 4).long()[..., 0] % self.table.num_embeddings
        return self.out(self.table(ids) + hidden)


def small_table() -> nn.Module:
    """More places than rows."""
    return Words(rows=7)


def transposed() -> nn.Module:
    return nn.Sequential(Conv1D(2 * WIDTH, WIDTH), nn.GELU(), Conv1D(WIDTH, 2 * WIDTH))


class InBfloat16(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.inner(hidden)


def gradients(make, *, adding: bool, later: bool = False) -> list[Tensor | None]:
    """Of inputs and weights after some micro-batches, in double precision."""
    torch.manual_seed(0)
    model = make().double()
    if adding:
        fuse_accumulation(model)
    inputs = [
        torch.randn(2, 4, WIDTH, dtype=torch.float64, requires_grad=True)
        for _ in range(MICRO_BATCHES)
    ]
    for hidden in inputs:
        output = model(hidden)
        with defer_products() as deferred:
            output.backward(torch.ones_like(output) / 3)
            if not later:
                deferred.add()
        deferred.add()
    return [tensor.grad for tensor in (*inputs, *model.parameters())]


@pytest.mark.parametrize(
    "make",
    [encoder, Tied, Twice, frozen_base, InBfloat16, transposed, Words, small_table],
)
@pytest.mark.parametrize("later", [False, True])
def test_gradients_are_those_of_autograd(make, later):
    plain, added = gradients(make, adding=False), gradients(make, adding=True, later=later)
    assert [g is None for g in added] == [g is None for g in plain]
    assert_near([g for g in added if g is not None], [g for g in plain if g is not None])


def test_a_gradient_that_is_there_is_added_to_where_it_lies():
    layer = nn.Linear(WIDTH, WIDTH)
    fuse_accumulation(layer)
    layer(torch.ones(2, WIDTH)).sum().backward()
    first = layer.weight.grad
    layer(torch.ones(2, WIDTH)).sum().backward()
    assert layer.weight.grad is first
    assert torch.equal(first, torch.full((WIDTH, WIDTH), 4.0))


def test_layers_of_another_class_are_left_alone():
    class Scaled(nn.Linear):
        def forward(self, given: Tensor) -> Tensor:
            return 2 * super().forward(given)

    part = nn.Sequential(nn.Linear(WIDTH, WIDTH), Scaled(WIDTH, WIDTH))
    fuse_accumulation(part)
    assert [type(layer) for layer in part] == [FusedLinear, Scaled]
    assert set(part.state_dict()) == {"0.weight", "0.bias", "1.weight", "1.bias"}


def test_small_matrices_are_left_alone(monkeypatch):
    monkeypatch.undo()
    part = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(512, 512), Conv1D(512, 512))
    fuse_accumulation(part)
    assert [type(layer) for layer in part[:2]] == [nn.Linear, FusedLinear]
    assert type(part[2]) is not Conv1D


def test_only_rows_that_occur_are_touched():
    table = nn.Embedding(10, WIDTH)
    fuse_accumulation(table)
    assert type(table) is FusedEmbedding
    table(torch.tensor([1, 1])).sum().backward()
    first = table.weight.grad
    table(torch.tensor([[2], [1]])).sum().backward()
    assert table.weight.grad is first
    assert torch.equal(first[:4].sum(1) / WIDTH, torch.tensor([0.0, 3.0, 1.0, 0.0]))


@pytest.mark.parametrize("make", [encoder, transposed, Words])
def test_outputs_are_those_of_the_plain_layers_to_the_bit(make):
    torch.manual_seed(0)
    model, given = make(), torch.randn(2, 5, WIDTH)
    plain = model(given)
    fuse_accumulation(model)
    assert torch.equal(model(given), plain)


def test_a_weight_that_is_made_of_others_stays_autograds():
    layer = nn.Linear(512, 512)
    made = layer.weight.detach().clone()
    del layer.weight
    layer.weight = made
    fuse_accumulation(nn.Sequential(layer))
    assert type(layer) is nn.Linear

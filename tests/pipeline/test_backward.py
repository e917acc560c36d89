"""Gradients added in place are autograd's; those of weights can come after that of the input."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from collapipe_flwr.pipeline.backward import AddingLinear, add_in_place, owing

torch.set_num_threads(1)
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
        add_in_place(model)
    inputs = [
        torch.randn(2, 4, WIDTH, dtype=torch.float64, requires_grad=True)
        for _ in range(MICRO_BATCHES)
    ]
    for hidden in inputs:
        output = model(hidden)
        with owing() as owed:
            output.backward(torch.ones_like(output) / 3)
            if not later:
                owed.pay()
        owed.pay()
    return [tensor.grad for tensor in (*inputs, *model.parameters())]


@pytest.mark.parametrize("make", [encoder, Tied, Twice, frozen_base, InBfloat16])
@pytest.mark.parametrize("later", [False, True])
def test_gradients_are_those_of_autograd(make, later):
    plain, added = gradients(make, adding=False), gradients(make, adding=True, later=later)
    assert [g is None for g in added] == [g is None for g in plain]
    for ours, theirs in zip(added, plain, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_the_input_comes_first_and_matrices_later():
    model, hidden = encoder(), torch.randn(2, 4, WIDTH, requires_grad=True)
    add_in_place(model)
    with owing() as owed:
        model(hidden).sum().backward()
    assert hidden.grad is not None
    missing = {name for name, weight in model.named_parameters() if weight.grad is None}
    assert missing == {"linear1.weight", "linear2.weight"}
    assert len(owed.gradients) == len(missing)
    owed.pay()
    assert all(weight.grad is not None for weight in model.parameters())
    assert not owed.gradients


def test_a_gradient_that_is_there_is_added_to_where_it_lies():
    layer = nn.Linear(WIDTH, WIDTH)
    add_in_place(layer)
    layer(torch.ones(2, WIDTH)).sum().backward()
    first = layer.weight.grad
    layer(torch.ones(2, WIDTH)).sum().backward()
    assert layer.weight.grad is first
    assert torch.equal(first, torch.full((WIDTH, WIDTH), 4.0))


def test_who_listens_to_a_weight_hears_its_gradient():
    layer, heard = nn.Linear(WIDTH, WIDTH), []
    add_in_place(layer)
    layer.weight.register_hook(lambda gradient: heard.append(gradient.shape))
    with owing():
        layer(torch.ones(2, WIDTH)).sum().backward()
    assert heard == [(WIDTH, WIDTH)]


def test_layers_of_another_class_are_left_alone():
    class Scaled(nn.Linear):
        def forward(self, given: Tensor) -> Tensor:
            return 2 * super().forward(given)

    part = nn.Sequential(nn.Linear(WIDTH, WIDTH), Scaled(WIDTH, WIDTH))
    add_in_place(part)
    assert [type(layer) for layer in part] == [AddingLinear, Scaled]
    assert set(part.state_dict()) == {"0.weight", "0.bias", "1.weight", "1.bias"}

"""The optimisers equal those of torch."""

from __future__ import annotations

import pytest
import torch

from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.pipeline.optimizer import Optimizer, OptimizerConfig
from tests.closeness import assert_near


def twins(dtype=torch.float32):
    torch.manual_seed(0)
    first = [
        torch.nn.Parameter(torch.randn(7, 5, dtype=dtype)),
        torch.nn.Parameter(torch.randn(3, dtype=dtype)),
    ]
    return first, [torch.nn.Parameter(p.detach().clone()) for p in first]


def named(parameters):
    return [(f"layer.{index}", p) for index, p in enumerate(parameters)]


def train(mine, theirs, rule, reference, steps=5):
    optimizer = Optimizer(rule, named(mine))
    for step in range(steps):
        for index, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            skip = index == 1 and step == 2  # a parameter without gradient is left alone
            gradient = torch.randn_like(a)
            a.grad = None if skip else gradient
            b.grad = None if skip else gradient.clone()
        optimizer.step()
        reference.step()
        optimizer.zero_grad()
        assert all(p.grad is None for p in mine)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_adamw_is_torch_adamw(weight_decay):
    mine, theirs = twins()
    rule = OptimizerConfig(
        learning_rate=0.01, weight_decay=weight_decay, betas=(0.8, 0.95), eps=1e-6
    )
    reference = torch.optim.AdamW(
        theirs, lr=0.01, weight_decay=weight_decay, betas=(0.8, 0.95), eps=1e-6
    )
    train(mine, theirs, rule, reference)
    assert_near(mine, theirs)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_is_torch_sgd(momentum):
    mine, theirs = twins()
    rule = OptimizerConfig(name="sgd", learning_rate=0.1, weight_decay=0.01, momentum=momentum)
    reference = torch.optim.SGD(theirs, lr=0.1, weight_decay=0.01, momentum=momentum)
    train(mine, theirs, rule, reference)
    assert_near(mine, theirs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_momentum_in_half_precision_is_that_of_torch(dtype):
    """Not that of its fused operator, which spoils momenta of half precision on CPUs."""
    mine, theirs = twins(dtype)
    rule = OptimizerConfig(name="sgd", learning_rate=0.1, weight_decay=0.01, momentum=0.9)
    reference = torch.optim.SGD(theirs, lr=0.1, weight_decay=0.01, momentum=0.9)
    train(mine, theirs, rule, reference)
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_state_moves_to_another_optimizer(name):
    mine, twin = twins()
    rule = OptimizerConfig(name=name, learning_rate=0.1, momentum=0.9)
    first, second = Optimizer(rule, named(mine)), Optimizer(rule, named(twin))
    gradients = [[torch.randn_like(p) for p in mine] for _ in range(2)]
    for optimizer, parameters in ((first, mine), (second, twin)):
        for p, g in zip(parameters, gradients[0], strict=True):
            p.grad = g.clone()
        optimizer.step()
    resumed = Optimizer(rule, named(twin))
    resumed.load_state(second.collect_state())
    for optimizer, parameters in ((first, mine), (resumed, twin)):
        for p, g in zip(parameters, gradients[1], strict=True):
            p.grad = g.clone()
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(mine, twin, strict=True))


def test_frozen_parameters_have_no_state():
    frozen = torch.nn.Parameter(torch.ones(3), requires_grad=False)
    assert Optimizer(OptimizerConfig(), [("w", frozen)]).parameters == ()


def test_bad_settings_are_named():
    with pytest.raises(ConfigError, match="'lion' is unknown; known are adamw, sgd, ASGD"):
        OptimizerConfig(name="lion")
    with pytest.raises(ConfigError, match="learning rate"):
        OptimizerConfig(learning_rate=float("nan"))

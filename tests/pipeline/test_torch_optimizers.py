"""Every optimizer of torch.optim, in parts or whole, takes the steps of its class."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from collapipe_flwr.core.errors import ConfigError, ModelError
from collapipe_flwr.core.json_codec import from_json, to_json
from collapipe_flwr.pipeline.backward import fuse_accumulation
from collapipe_flwr.pipeline.optimizer import (
    Optimizer,
    OptimizerConfig,
    ParameterGroup,
    optimizer_config,
)
from collapipe_flwr.pipeline.optimizer_settings import list_rule_names
from collapipe_flwr.pipeline.state import (
    PartState,
    count_state_bytes,
    load_optimizer_state,
    view_state,
)
from tests.pipeline.chains import Chain, classic, make_batch, make_parts

MADE = [
    partial(torch.optim.ASGD, lr=0.05, t0=1),
    partial(torch.optim.Adadelta, rho=0.8),
    partial(torch.optim.Adafactor, lr=0.05, beta2_decay=-0.7),
    partial(torch.optim.Adagrad, lr=0.05, initial_accumulator_value=0.1),
    partial(torch.optim.Adam, lr=0.01, amsgrad=True, weight_decay=0.1),
    partial(torch.optim.AdamW, lr=0.01, betas=(0.8, 0.95)),
    partial(torch.optim.AdamW, lr=0.01, fused=True),
    partial(torch.optim.Adamax, lr=0.01),
    partial(torch.optim.NAdam, lr=0.01, decoupled_weight_decay=True, weight_decay=0.1),
    partial(torch.optim.RAdam, lr=0.01),
    partial(torch.optim.RMSprop, lr=0.01, centered=True, momentum=0.9),
    partial(torch.optim.Rprop, lr=0.01, etas=(0.4, 1.3)),
    partial(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.1, maximize=True),
    partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    partial(torch.optim.SGD, lr=0.1),
]


def name_of(made: partial) -> str:
    return f"{made.func.__name__}-{'-'.join(made.keywords)}"


def make_layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.ModuleDict(
        {
            "linear": nn.Linear(3, 5),
            "conv": nn.Conv1d(1, 2, 3),
            "norm": nn.LayerNorm(1),
            "scale": nn.ParameterList([nn.Parameter(torch.tensor(2.0))]),
        }
    )


def draw_gradients(mine: nn.Module, theirs: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    pairs = zip(mine.parameters(), theirs.parameters(), strict=True)
    for index, (a, b) in enumerate(pairs):
        gradient = torch.randn(a.shape, generator=generator)
        skip = index == 1 and step == 2  # a parameter without gradient is left alone
        a.grad, b.grad = (None, None) if skip else (gradient, gradient.clone())


def assert_same(mine: nn.Module, theirs: nn.Module) -> None:
    pairs = zip(mine.named_parameters(), theirs.parameters(), strict=True)
    assert all(torch.equal(a, b) for (_, a), b in pairs)


@pytest.mark.parametrize("made", MADE, ids=name_of)
def test_steps_and_moved_state_are_those_of_the_class(made) -> None:
    mine, theirs = make_layers(), make_layers()
    config = from_json(OptimizerConfig, to_json(optimizer_config(made)), "optimizer")
    optimizer, reference = Optimizer(config, mine.named_parameters()), made(theirs.parameters())
    for step in range(5):
        draw_gradients(mine, theirs, step)
        optimizer.step()
        reference.step()
        assert_same(mine, theirs)
        kept = PartState.from_tensors(view_state(mine, optimizer).copy().flatten())
        optimizer = Optimizer(config, mine.named_parameters())  # moves to another machine
        load_optimizer_state(optimizer, kept.optimizer)


@pytest.mark.parametrize("made", MADE, ids=name_of)
def test_the_state_is_foreseen(made) -> None:
    mine = make_layers()
    optimizer = Optimizer(optimizer_config(made), mine.named_parameters())
    draw_gradients(mine, make_layers(), 0)
    held = sum(p.nbytes for p in mine.parameters())
    foreseen = count_state_bytes(mine, optimizer)
    optimizer.step()
    state = optimizer.collect_state()
    assert foreseen == 2 * held + sum(t.nbytes for kept in state.values() for t in kept)
    expected = {key: kept for key, kept in optimizer.make_meta_state().items() if kept}
    assert {k: [(t.shape, t.dtype) for t in v] for k, v in state.items()} == {
        k: [(t.shape, t.dtype) for t in v] for k, v in expected.items()
    }


@pytest.mark.parametrize("made", MADE, ids=name_of)
def test_a_pipeline_takes_the_steps_of_one_process(made) -> None:
    batches = [make_batch((2, 3), seed) for seed in range(3)]
    wholes = nn.ModuleList(make_parts((1, 2)))
    fuse_accumulation(wholes)  # as stages do
    reference, losses = made(wholes.parameters()), []
    for batch in batches:
        total, loss = sum(m.weight for m in batch), 0.0
        for micro_batch in batch:
            hidden = wholes[0](micro_batch.inputs)
            for part in wholes[1:]:
                hidden = part(hidden, micro_batch.context)
            part_loss = hidden * (micro_batch.weight / total)
            part_loss.backward()
            loss += float(part_loss.detach())
        reference.step()
        reference.zero_grad()
        losses.append(loss)
    chain = Chain(make_parts((1, 2)), classic("1f1b"), rule=optimizer_config(made))
    with chain.running() as first:
        found = [first.train_step(batch).loss for batch in batches]
    assert found == losses
    assert_same(nn.ModuleList([stage.part for stage in chain.stages]), wholes)


def test_muon_trains_matrices() -> None:
    mine, theirs = nn.Linear(4, 6, bias=False), nn.Linear(4, 6, bias=False)
    theirs.load_state_dict(mine.state_dict())
    made = partial(torch.optim.Muon, lr=0.1)
    config = optimizer_config(made)
    optimizer, reference = Optimizer(config, mine.named_parameters()), made(theirs.parameters())
    for step in range(3):
        draw_gradients(mine, theirs, step)
        optimizer.step()
        reference.step()
    assert_same(mine, theirs)
    with pytest.raises(ConfigError, match=r"optimizer Muon: .*2D parameters"):
        Optimizer(config, nn.Linear(2, 2).named_parameters())


def test_torch_brings_no_other_name() -> None:
    assert {made.func.__name__ for made in MADE} | {"Muon", "adamw", "sgd"} == set(
        list_rule_names()
    )


def test_groups_are_chosen_by_key() -> None:
    config = OptimizerConfig(
        name="SGD",
        learning_rate=0.1,
        weight_decay=0.5,
        arguments={"momentum": 0.9},
        groups=(
            ParameterGroup(patterns=("*.bias", "norm.*"), weight_decay=0.0),
            ParameterGroup(patterns=("conv.*",), learning_rate=1.0, arguments={"momentum": 0.0}),
        ),
    )
    assert from_json(OptimizerConfig, to_json(config), "optimizer") == config
    mine, theirs = make_layers(), make_layers()
    optimizer = Optimizer(config, mine.named_parameters())
    named = dict(theirs.named_parameters())
    bare = [p for n, p in named.items() if n.endswith(".bias") or n.startswith("norm.")]
    conv = [named["conv.weight"]]
    rest = [named["linear.weight"], named["scale.0"]]
    reference = torch.optim.SGD(
        [
            {"params": bare, "weight_decay": 0.0},
            {"params": conv, "lr": 1.0, "momentum": 0.0},
            {"params": rest},
        ],
        lr=0.1,
        weight_decay=0.5,
        momentum=0.9,
    )
    for step in range(3):
        draw_gradients(mine, theirs, step)
        optimizer.step()
        reference.step()
    assert_same(mine, theirs)
    halved = config.with_learning_rate(0.05)
    assert halved.keywords("conv.weight")["lr"] == 0.5
    assert halved.keywords("linear.weight")["lr"] == 0.05


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"name": "LBFGS"}, "LBFGS cannot train a model in parts: it searches along all weights"),
        ({"name": "SparseAdam"}, "SparseAdam cannot train a model in parts: it takes sparse"),
        ({"name": "adam"}, "'adam' is unknown; did you mean adamw?"),
        ({"name": "RMSProp"}, "'RMSProp' is unknown; did you mean RMSprop?"),
        ({"name": "Adam", "arguments": {"beta": 1.0}}, "no argument 'beta'; it knows betas, eps,"),
        ({"name": "sgd", "arguments": {"centered": True}}, "no argument 'centered'; it knows mom"),
        ({"name": "SGD", "arguments": {"nesterov": True}}, "optimizer SGD: Nesterov momentum"),
        ({"arguments": {"betas": (2.0, 0.9)}}, "optimizer adamw: Invalid beta"),
        ({"name": "Adam", "arguments": {"eps": "small"}}, "optimizer Adam: .*not supported"),
        (
            {"name": "Adam", "eps": 1e-3},
            "eps is for the optimizer adamw; Adam takes its own as arg",
        ),
        ({"name": "Rprop", "weight_decay": 0.1}, "Rprop has no argument 'weight_decay'"),
        ({"groups": (ParameterGroup(patterns=("*",), learning_rate=-1.0),)}, "rate must be >= 0"),
        (
            {"name": "SGD", "arguments": {"momentum": 0.9, "maximize": "False"}},
            "optimizer SGD: maximize must be true or false, got 'False'",
        ),
        ({"name": "Adam", "arguments": {"foreach": "None"}}, "foreach must be true or false"),
        (
            {"name": "Adam", "arguments": {"betas": (0.9,)}},
            r"Adam: betas must be a list of 2, such as \[0.9, 0.999\], got \(0.9,\)",
        ),
        ({"arguments": {"betas": {"a": 1}}}, "adamw: betas must be a list of 2"),
        ({"name": "SGD", "arguments": {"momentum": 0.9, "dampening": "x"}}, "SGD: unsupported"),
        ({"arguments": {"lr": 0.1}}, "may not hold lr=0.1: set train.learning-rate instead"),
        (
            {"weight_decay": 0.0, "arguments": {"weight_decay": 0.1}},
            "may not hold weight_decay=0.1: set train.weight-decay instead",
        ),
        (
            {"groups": (ParameterGroup(patterns=("*",), arguments={"lr": "fast"}),)},
            "may not hold lr='fast': set .* in a program learning_rate",
        ),
        (
            {
                "name": "Adagrad",
                "groups": (
                    ParameterGroup(patterns=("*",), arguments={"initial_accumulator_value": 0.5}),
                ),
            },
            "Adagrad has one initial_accumulator_value for all parameters, and a group asks",
        ),
        ({"schedule": "cosin"}, "'cosin'; did you mean cosine"),
        ({"warmup_steps": -1}, "warmup_steps and total_steps must be >= 0"),
        ({"proximal_mu": float("nan")}, "proximal_mu must be >= 0"),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(wrong, words) -> None:
    with pytest.raises(ConfigError, match=words):
        OptimizerConfig(**wrong)


def test_another_optimizers_state_is_refused() -> None:
    layers = make_layers()
    optimizer = Optimizer(OptimizerConfig(name="Adam"), layers.named_parameters())
    with pytest.raises(ModelError, match="Adam keeps tensors of shapes"):
        load_optimizer_state(optimizer, {"linear.weight": (torch.zeros(5, 3),)})


def tied() -> nn.Module:
    model = nn.ModuleDict({"embed": nn.Embedding(4, 3), "head": nn.Linear(3, 4)})
    model["head"].weight = model["embed"].weight
    return model


def test_an_instance_is_taken_with_its_groups() -> None:
    model = tied()
    optimizer = torch.optim.AdamW(
        [
            {"params": [model["embed"].weight], "betas": (0.5, 0.6)},
            {"params": [model["head"].bias], "weight_decay": 0.0, "lr": torch.tensor(0.5)},
        ],
        lr=0.25,
    )
    config = optimizer_config(optimizer, model)
    assert config == OptimizerConfig(
        name="AdamW",
        learning_rate=0.25,
        groups=(
            ParameterGroup(
                patterns=("embed.weight", "head.weight"), arguments={"betas": (0.5, 0.6)}
            ),
            ParameterGroup(patterns=("head.bias",), learning_rate=0.5, weight_decay=0.0),
        ),
    )
    plain = torch.optim.Adam(model.parameters(), eps=1e-6)
    assert optimizer_config(plain, model) == OptimizerConfig(
        name="Adam", learning_rate=1e-3, arguments={"eps": 1e-6}
    )
    assert optimizer_config(config) is config
    assert optimizer_config("sgd") == OptimizerConfig(name="sgd")
    assert optimizer_config(torch.optim.Adafactor).learning_rate == 0.01


class OwnAdam(torch.optim.Adam):
    pass


def scheduled(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters())
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 0.5)
    return optimizer


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda _: OwnAdam, "a class of torch.optim, .* got OwnAdam: stages know no other"),
        (lambda _: len, "a class of torch.optim, .* got len"),
        (
            lambda model: torch.optim.LBFGS(model.parameters()),
            "LBFGS cannot train a model in parts",
        ),
        (lambda _: partial(torch.optim.SGD, [], 0.1), "must be named, as partial"),
        (lambda _: partial(torch.optim.SGD, lr=print), "lr must be a number"),
        (lambda _: torch.optim.SGD(nn.Linear(1, 1).parameters()), "that are not the model's"),
        (lambda model: torch.optim.SGD([model["embed"].weight]), "leaves out head.bias"),
        (scheduled, "a scheduler of torch has changed"),
        (
            lambda model: torch.optim.AdamW(
                [{"params": model.parameters(), "decoupled_weight_decay": False}]
            ),
            "a parameter group .* decoupled_weight_decay=False, which is no argument of AdamW",
        ),
    ],
)
def test_what_a_configuration_cannot_say_is_refused(make, words) -> None:
    model = tied()
    with pytest.raises(ConfigError, match=words):
        optimizer_config(make(model), model)
    with pytest.raises(ConfigError, match="already needs the model"):
        optimizer_config(torch.optim.SGD(model.parameters()))

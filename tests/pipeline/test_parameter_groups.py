"""Parameter groups are torch's own, however the model is cut into stages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from collapipe_flwr.pipeline.optimizer import (
    Optimizer,
    OptimizerConfig,
    ParameterGroup,
    optimizer_config,
)
from collapipe_flwr.pipeline.optimizer_settings import list_rule_names
from tests.thorough import examples

SHAPES = ((3, 5), (4,), (2, 3, 2), (), (5, 1), (6, 2))
ALL = range(len(SHAPES))
STEPS = 4


def _some(**choices: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Some of these arguments."""
    return st.fixed_dictionaries({}, optional=choices)


def _one_of(*values: Any) -> st.SearchStrategy[Any]:
    return st.sampled_from(values)


RATES, EPS = _one_of(1e-3, 0.01, 0.3), _one_of(1e-8, 1e-4, 0.1)
DECAY, BETAS = _one_of(0.0, 0.01, 0.1, 0.5), _one_of((0.9, 0.999), (0.5, 0.6), (0.0, 0.9))
SWITCH, FOREACH = st.booleans(), _one_of(None, True, False)
MOMENTUM = _one_of(0.0, 0.5, 0.9)
COMMON = {"lr": RATES, "weight_decay": DECAY, "maximize": SWITCH, "foreach": FOREACH}
ADAM = {**COMMON, "betas": BETAS, "eps": EPS}
NESTEROV = st.fixed_dictionaries(
    {"momentum": _one_of(0.5, 0.9), "dampening": st.just(0.0), "nesterov": st.just(True)}
)
HEAVY = st.fixed_dictionaries(
    {"momentum": MOMENTUM, "dampening": _one_of(0.0, 0.2), "nesterov": st.just(False)}
)
ARGUMENTS: dict[str, st.SearchStrategy[dict[str, Any]]] = {
    "ASGD": _some(**COMMON, lambd=_one_of(1e-4, 0.1), alpha=_one_of(0.5, 0.75), t0=_one_of(1, 1e6)),
    "Adadelta": _some(**COMMON, rho=_one_of(0.5, 0.9), eps=EPS),
    "Adafactor": _some(
        **COMMON,
        beta2_decay=_one_of(-0.8, -0.5),
        eps=_one_of((None, 1e-3), (1e-6, 0.1)),
        d=_one_of(1.0, 2.0),
    ),
    "Adagrad": _some(**COMMON, lr_decay=_one_of(0.0, 0.1), eps=EPS),
    "Adam": _some(**ADAM, amsgrad=SWITCH),
    "AdamW": _some(**ADAM, amsgrad=SWITCH),
    "Adamax": _some(**ADAM),
    "Muon": _some(
        lr=RATES,
        weight_decay=DECAY,
        momentum=_one_of(0.5, 0.95),
        nesterov=SWITCH,
        ns_steps=_one_of(2, 5),
    ),
    "NAdam": _some(**ADAM, momentum_decay=_one_of(4e-3, 0.1), decoupled_weight_decay=SWITCH),
    "RAdam": _some(**ADAM, decoupled_weight_decay=SWITCH),
    "RMSprop": _some(
        **COMMON, alpha=_one_of(0.9, 0.99), eps=EPS, momentum=MOMENTUM, centered=SWITCH
    ),
    "Rprop": _some(
        lr=RATES,
        etas=_one_of((0.5, 1.2), (0.4, 1.3)),
        step_sizes=_one_of((1e-6, 50), (1e-3, 1.0)),
        maximize=SWITCH,
        foreach=FOREACH,
    ),
    "SGD": st.builds(dict.__or__, _some(**COMMON), st.just({}) | NESTEROV | HEAVY),
    "adamw": _some(lr=RATES, weight_decay=DECAY, betas=BETAS, eps=EPS),
    "sgd": _some(lr=RATES, weight_decay=DECAY, momentum=MOMENTUM),
}
TWINS = {"adamw": ("AdamW", {"fused": True}), "sgd": ("SGD", {"fused": True})}


def shapes_of(name: str) -> tuple[tuple[int, ...], ...]:
    return tuple(s for s in SHAPES if len(s) == 2) if name == "Muon" else SHAPES


def make_model(name: str) -> nn.ParameterDict:
    generator = torch.Generator().manual_seed(0)
    drawn = (torch.randn(shape, generator=generator) for shape in shapes_of(name))
    return nn.ParameterDict({f"p{index}": nn.Parameter(t) for index, t in enumerate(drawn)})


def as_fields(given_: Mapping[str, Any], owner: type) -> dict[str, Any]:
    """Torch's arguments as fields of a configuration or a group."""
    fields = {"lr": "learning_rate", "weight_decay": "weight_decay"}
    own = {fields[key]: value for key, value in given_.items() if key in fields}
    rest = {key: value for key, value in given_.items() if key not in fields}
    return {**own, "arguments": rest} if rest or owner is ParameterGroup else own


def draw_gradients(model: nn.ParameterDict, step: int) -> None:
    generator = torch.Generator().manual_seed(1 + step)
    for index, parameter in enumerate(model.values()):
        gradient = torch.randn(parameter.shape, generator=generator)
        skip = step and (index + step) % 4 == 3  # not at first, which torch's fused SGD refuses
        parameter.grad = None if skip else gradient


def bits(tensor: Tensor) -> bytes:
    return tensor.detach().numpy().tobytes()


def sizes_of(state: Mapping[str, Any]) -> list[tuple[torch.Size, torch.dtype]]:
    return [(t.shape, t.dtype) for t in state.values() if isinstance(t, Tensor)]


def test_every_rule_is_drawn() -> None:
    assert set(ARGUMENTS) == set(list_rule_names())


@pytest.mark.parametrize("name", sorted(ARGUMENTS))
@examples(6, 15)
@given(data=st.data())
def test_groups_are_those_of_torch_under_every_cut(name: str, data: st.DataObject) -> None:
    common = data.draw(ARGUMENTS[name], label="all")
    of_groups = data.draw(st.lists(ARGUMENTS[name], max_size=3), label="groups")
    theirs, mine, copied = make_model(name), make_model(name), make_model(name)
    chosen = st.integers(0, len(of_groups))  # the last one: of no group
    group_of = {key: data.draw(chosen, label=f"group of {key}") for key in theirs}
    stage_of = {key: data.draw(st.integers(0, 2), label=f"stage of {key}") for key in theirs}

    members = [[key for key in theirs if group_of[key] == n] for n in range(len(of_groups) + 1)]
    asked = [
        {"params": [theirs[key] for key in keys], **own}
        for keys, own in zip(members, [*of_groups, {}], strict=True)
        if keys
    ]
    kind, always = TWINS.get(name, (name, {}))
    common = {"lr": 1e-3} | common
    reference = getattr(torch.optim, kind)(data.draw(st.permutations(asked)), **common, **always)
    config = OptimizerConfig(
        name=name,
        **as_fields(common, OptimizerConfig),
        groups=tuple(
            ParameterGroup(patterns=tuple(keys), **as_fields(own, ParameterGroup))
            for keys, own in zip(members, of_groups, strict=False)
            if keys
        ),
    )

    def cut(model: nn.ParameterDict, by: OptimizerConfig) -> list[Optimizer]:
        return [
            Optimizer(by, [(key, p) for key, p in model.items() if stage_of[key] == stage])
            for stage in range(3)
        ]

    stages = cut(mine, config) + cut(copied, optimizer_config(reference, theirs))
    for step in range(STEPS):
        for model in (theirs, mine, copied):
            draw_gradients(model, step)
        for each in (reference, *stages):
            each.step()
        for key, parameter in theirs.items():
            assert bits(mine[key]) == bits(copied[key]) == bits(parameter), key

    planned = config.make_meta_states({key: (p.shape, p.dtype) for key, p in theirs.items()})
    for key, parameter in theirs.items():
        assert [(t.shape, t.dtype) for t in planned[key]] == sizes_of(reference.state[parameter])
    held = [stage.collect_state() for stage in stages[:3]]
    assert {key: sum(t.nbytes for t in kept) for state in held for key, kept in state.items()} == {
        key: sum(t.nbytes for t in kept) for key, kept in planned.items() if kept
    }

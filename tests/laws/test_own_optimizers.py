"""Laws: optimizer, groups, schedule and proximal term act as in a user's own training loop."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import get_scheduler

from collapipe_flwr.cluster.control_unit import ClusterResult, train_round
from collapipe_flwr.cluster.fleet import ThreadFleet
from collapipe_flwr.cluster.hosted import ThreadEdge
from collapipe_flwr.cluster.unsplit import train_unsplit
from collapipe_flwr.core import imports
from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.models.profile import profile_model
from collapipe_flwr.models.spec import BatchShape
from collapipe_flwr.models.splitter import Splitter
from collapipe_flwr.pipeline.config import Execution
from collapipe_flwr.pipeline.optimizer import Optimizer, OptimizerConfig, optimizer_config
from collapipe_flwr.pipeline.state import OptimizerState
from tests.closeness import assert_near, near
from tests.cluster.faults import Fault, failing
from tests.laws.test_adapted_and_tied import _splitter as tied_splitter
from tests.rounds import (
    Batch,
    Cut,
    largest_difference,
    micro_batches,
    order_of,
    recovery,
    steps_of,
    without_labels,
)
from tests.thorough import few

pytestmark = pytest.mark.usefixtures("small_matrices_are_fused")

CUT = Cut(stops=(1, 3, 5), micro_batches=(2, 1), schedule="1f1b")
STEPS = 4
Steps = Sequence[Sequence[Batch]]


def halving(step: int) -> float:
    return 0.5**step


def falling_below_zero(step: int) -> float:
    return 1.0 - step


@pytest.fixture(autouse=True)
def _own_module_is_allowed() -> None:
    imports.allow(__name__)


@dataclass
class Cluster:
    """Devices and edge in threads."""

    splitter: Splitter
    config: OptimizerConfig
    cut: Cut = CUT
    clip_norm: float = 0.0
    every: int = 0
    faults: tuple[Fault, ...] = ()
    probe: int = 0

    def train(
        self, weights: dict[str, Tensor], steps: Steps, slots: OptimizerState | None = None
    ) -> tuple[ClusterResult, dict[str, Tensor]]:
        """One round; the whole model behind it."""
        execution = Execution(clip_norm=self.clip_norm)
        order = order_of(
            self.cut,
            weights,
            self.config,
            execution=execution,
            every=self.every,
            slots=slots or {},
            keep_optimizer=slots is not None,
            batches=len(steps),
        )
        result = train_round(
            self.splitter,
            order,
            iter(micro_batches(self.splitter, steps)),
            ThreadFleet(ThreadEdge(), failing(*self.faults)),
            micro_batches(self.splitter, steps[: self.probe]),
            recovery=recovery(self.splitter),
        )
        return result, {**weights, **result.weights}


@dataclass
class Loop:
    """A user's own training loop."""

    make: Callable[[nn.Module], torch.optim.Optimizer]
    factor: Callable[[int], float] = lambda _: 1.0
    mu: float = 0.0
    clip_norm: float = 0.0
    optimizer: torch.optim.Optimizer | None = None

    def train(
        self, splitter: Splitter, model: nn.Module, steps: Steps
    ) -> tuple[list[float], dict[str, Tensor]]:
        model.train()
        self.optimizer = self.optimizer or self.make(model)
        scheduler = LambdaLR(self.optimizer, self.factor) if self.factor(1) != 1.0 else None
        first = [p.detach().clone() for p in model.parameters()]
        losses = []
        for step in steps:
            count = sum(splitter.task.targets(b["labels"]) for b in step)
            if not count:
                continue
            parts = [model(**b).loss * (splitter.task.targets(b["labels"]) / count) for b in step]
            loss = torch.stack(parts).sum()
            away = zip(model.parameters(), first, strict=True)
            term = sum((p - p0).square().sum() for p, p0 in away) if self.mu else 0.0
            (loss + self.mu / 2 * term).backward()
            if self.clip_norm:
                torch.nn.utils.clip_grad_norm_(model.parameters(), self.clip_norm)
            self.optimizer.step()
            self.optimizer.zero_grad()
            if scheduler is not None:
                scheduler.step()
            losses.append(float(loss.detach()))
        return losses, {k: t.detach().clone() for k, t in model.state_dict().items()}


def grouped(model: nn.Module) -> torch.optim.Optimizer:
    """No decay for biases and norms; a faster head."""
    named = dict(model.named_parameters())
    plain = [n for n in named if n.endswith(".bias") or "LayerNorm" in n]
    head = [n for n in named if n.startswith("classifier") and n not in plain]
    rest = [n for n in named if n not in (*plain, *head)]
    return torch.optim.AdamW(
        [
            {"params": [named[n] for n in rest]},
            {"params": [named[n] for n in plain], "weight_decay": 0.0},
            {"params": [named[n] for n in head], "lr": 5e-3},
        ],
        lr=1e-3,
        weight_decay=0.1,
        eps=1e-3,
    )


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)


def assert_equal_runs(
    found: dict[str, Tensor], expected: dict[str, Tensor], start: dict[str, Tensor]
) -> None:
    whole = {key: expected[key] for key in found}
    assert_near(found, whole, depth=STEPS)
    assert largest_difference(whole, start) > 1e-3


@pytest.mark.parametrize("make", [grouped, momentum])
def test_the_optimizer_of_a_loop_acts_alike_in_parts(bert: Splitter, make) -> None:
    weights, steps = bert.initial_weights(seed=1), steps_of(bert, CUT, STEPS)
    model = bert.build_whole(weights)
    config = optimizer_config(make(model), model)
    losses, expected = Loop(make).train(bert, model, steps)
    result, found = Cluster(bert, config).train(weights, steps)
    assert result.losses == near(losses)
    assert_equal_runs(found, expected, weights)


@pytest.mark.parametrize(
    ("schedule", "warmup", "factor"),
    [
        ("linear", 2, lambda step: step / 2 if step < 2 else (STEPS - step) / (STEPS - 2)),
        ("cosine", 0, lambda step: 0.5 * (1.0 + math.cos(math.pi * step / STEPS))),
        ("tests.laws.test_own_optimizers:halving", 0, halving),
    ],
)
@pytest.mark.parametrize("every", few([0, 1], 1))
def test_a_schedule_counts_optimizer_steps_whatever_lies_between(
    bert: Splitter, schedule: str, warmup: int, factor, every: int
) -> None:
    """Tests of unseen examples, a batch without labels, snapshots and a lost device."""
    weights, steps = bert.initial_weights(seed=2), steps_of(bert, CUT, STEPS)
    blank = [without_labels(batch) for batch in steps[0]]
    config = replace(
        optimizer_config(partial(torch.optim.SGD, lr=0.2, momentum=0.9)),
        schedule=schedule,
        warmup_steps=warmup,
        total_steps=STEPS,
    )
    mixed = [steps[0], blank, *steps[1:]]
    losses, expected = Loop(momentum, factor).train(bert, bert.build_whole(weights), mixed)
    fault = Fault(step=4, device_id="A/d1", phase="backward")
    cluster = Cluster(bert, config, every=every, faults=(fault,), probe=1)
    result, found = cluster.train(weights, mixed)
    assert len(result.incidents) == 1
    assert result.losses == near(losses)
    assert_equal_runs(found, expected, weights)


def test_the_factors_are_those_of_the_libraries() -> None:
    for name, warmup in (("linear", 3), ("cosine", 3), ("linear", 0), ("cosine", 7)):
        parameter = nn.Parameter(torch.zeros(1))
        optimizer = torch.optim.SGD([parameter], lr=0.3)
        scheduler = get_scheduler(name, optimizer, warmup, 11)
        rates = OptimizerConfig(schedule=name, warmup_steps=warmup).rates(batches=11)
        for factor in islice(rates, 14):
            assert optimizer.param_groups[0]["lr"] == 0.3 * factor
            optimizer.step()
            scheduler.step()
    assert list(islice(OptimizerConfig(warmup_steps=4).rates(first=2), 3)) == [0.5, 0.75, 1.0]


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        ("linear", "linear needs total_steps"),
        ("tests.laws.test_own_optimizers:missing", "leads nowhere: .*has no 'missing'"),
        ("tests.laws.test_own_optimizers:STEPS", "leads into builtins"),
        ("math:nan", "start it with --import math"),
        ("tests.laws.test_own_optimizers:falling_below_zero", "must return a number >= 0, got -1"),
    ],
)
def test_a_schedule_that_cannot_be_followed_is_refused(schedule: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        list(islice(OptimizerConfig(schedule=schedule).rates(), 3))


@pytest.mark.parametrize(
    ("every", "step", "clip_norm"),
    few([(0, 2, 0.5), (1, 2, 0.0), (2, 3, 0.5), (0, 2, 0.0), (1, 2, 0.5), (2, 3, 0.0)], 0, 1),
)
def test_the_proximal_term_is_that_of_the_loss(
    bert: Splitter, clip_norm: float, every: int, step: int
) -> None:
    weights, steps = bert.initial_weights(seed=3), steps_of(bert, CUT, STEPS)
    config = replace(
        optimizer_config(partial(torch.optim.SGD, lr=0.2, momentum=0.9)), proximal_mu=0.7
    )
    loop = Loop(momentum, mu=0.7, clip_norm=clip_norm)
    losses, expected = loop.train(bert, bert.build_whole(weights), steps)
    fault = Fault(step=step, device_id="A/d0", phase="forward")
    cluster = Cluster(bert, config, clip_norm=clip_norm, every=every, faults=(fault,))
    result, found = cluster.train(weights, steps)
    assert len(result.incidents) == 1
    assert result.losses == near(losses)
    assert_equal_runs(found, expected, weights)
    _, free = Cluster(bert, replace(config, proximal_mu=0.0), clip_norm=clip_norm).train(
        weights, steps
    )
    assert largest_difference(free, found) > 1e-3  # the comparison above can fail


def test_the_proximal_term_of_shared_weights_counts_once() -> None:
    splitter = tied_splitter("t5", "seq2seq", {"shared": "sum", "ties": "rows"})
    cut = Cut(stops=(1, 2, 4), micro_batches=(2, 1))
    weights, steps = splitter.initial_weights(seed=3), steps_of(splitter, CUT, STEPS)
    config = OptimizerConfig(
        name="sgd", learning_rate=0.3, weight_decay=0.0, momentum=0.9, proximal_mu=0.9
    )
    model = splitter.build_whole(weights)
    model.config.use_cache = False
    optimizer = Optimizer(config, model.named_parameters())
    execution = Execution(clip_norm=0.7)
    losses = train_unsplit(splitter, model, optimizer, steps, execution)
    state = model.state_dict()
    expected = {key: state[key] for key in weights}
    result, found = Cluster(splitter, config, cut, clip_norm=0.7).train(weights, steps)
    assert result.losses == near(losses)
    assert_equal_runs(found, expected, weights)


@pytest.mark.parametrize("every", few([0, 1], 1))
@pytest.mark.parametrize(
    "made",
    [
        partial(torch.optim.NAdam, lr=1e-2, eps=1e-2),
        partial(torch.optim.Adafactor, lr=1e-2),
        partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    ],
    ids=lambda made: made.func.__name__,
)
def test_kept_state_continues_and_the_proximal_term_starts_anew(
    bert: Splitter, made, every: int
) -> None:
    """That of the edge as well, which comes back with the devices'."""
    weights = bert.initial_weights(seed=4)
    config = replace(optimizer_config(made), proximal_mu=0.5)
    loop = Loop(lambda model: made(model.parameters()), mu=0.5)
    model, cluster = bert.build_whole(weights), Cluster(bert, config, every=every)
    slots: OptimizerState = {}
    found = weights
    for _ in range(2):
        _, expected = loop.train(bert, model, steps_of(bert, CUT, 2))
        result, found = cluster.train(found, steps_of(bert, CUT, 2), slots)
        slots = result.slots
    assert slots.keys() >= set(bert.edge_keys())
    assert not any(key.startswith("start/") for key in slots)
    assert_equal_runs(found, expected, weights)


def test_costs_count_what_an_optimizer_keeps(bert: Splitter) -> None:
    shape = BatchShape(source_length=8, target_length=1)

    def kept(config: OptimizerConfig) -> float:
        """Beside weights and gradients, in weights of a block."""
        block = profile_model(bert, shape, config.state_bytes).blocks[1]
        return block.state_bytes / block.parameter_bytes - 2

    assert profile_model(bert, shape, OptimizerConfig().state_bytes) == profile_model(bert, shape)
    assert kept(OptimizerConfig(name="sgd")) == 0
    assert kept(OptimizerConfig(name="sgd", momentum=0.9)) == 1
    assert kept(OptimizerConfig(name="Adam")) == 2
    assert kept(OptimizerConfig(name="Adam", arguments={"amsgrad": True})) == 3
    assert kept(OptimizerConfig(name="Adam", proximal_mu=0.1)) == 3
    assert 0 < kept(OptimizerConfig(name="Adafactor")) < 0.5
    with pytest.raises(ConfigError, match="optimizer Muon"):
        kept(OptimizerConfig(name="Muon"))

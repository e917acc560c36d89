"""Small models cut into parts, rounds of a cluster in this process, and the unsplit model.

One SGD step with rate 1 moves every weight by minus its gradient, so equal weights after a step
mean equal gradients; AdamW over several steps covers the state that lives between steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from benchmarks.plans import make_plan
from collapipe_flwr.cluster.control_unit import train_round
from collapipe_flwr.cluster.fleet import ThreadFleet
from collapipe_flwr.cluster.hosted import ThreadEdge
from collapipe_flwr.cluster.order import LearningSettings, TrainingOrder
from collapipe_flwr.cluster.recovery import Recovery
from collapipe_flwr.cluster.unsplit import train_unsplit
from collapipe_flwr.core.domain import (
    ClusterPlan,
    ClusterProfile,
    DeviceProfile,
    ModelProfile,
    PlannedExecution,
)
from collapipe_flwr.models.describing import make_spec
from collapipe_flwr.models.profile import profile_model
from collapipe_flwr.models.spec import BatchShape
from collapipe_flwr.models.splitter import Splitter
from collapipe_flwr.pipeline.config import Execution
from collapipe_flwr.pipeline.optimizer import Optimizer, OptimizerConfig
from collapipe_flwr.pipeline.step import MicroBatch

BLOCKS = 5
DEVICES = ("A/d0", "A/d1", "A/d2")  # those of `profile`
SGD = OptimizerConfig(name="sgd", learning_rate=1.0, weight_decay=0.0)
ADAMW = OptimizerConfig(name="adamw", learning_rate=1e-3)
Batch = dict[str, Tensor]


def make_splitter(model_type: str, dropout: float) -> Splitter:
    if model_type == "marian":
        sizes = {"d_model": 16, "encoder_layers": BLOCKS, "decoder_layers": 1}
        heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
        rest = {"encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "max_position_embeddings": 32}
        off = {"dropout": dropout, "attention_dropout": dropout}
        spec = make_spec(
            "seq2seq",
            model_type="marian",
            overrides={**sizes, **heads, **rest, **off},
            vocab_size=50,
            pad_token_id=0,
            eos_token_id=1,
            bos_token_id=2,
            decoder_start_token_id=0,
        )
    else:
        sizes = {"hidden_size": 16, "num_hidden_layers": BLOCKS, "num_attention_heads": 2}
        off = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
        spec = make_spec(
            "sequence-classification",
            model_type="bert",
            overrides={**sizes, "intermediate_size": 24, "max_position_embeddings": 32, **off},
            vocab_size=50,
            pad_token_id=0,
            num_labels=4,
        )
    return Splitter(spec)


@cache
def bert() -> Splitter:
    """One for all tests that need no dropout."""
    return make_splitter("bert", 0.0)


@dataclass(frozen=True, kw_only=True)
class Cut:
    """Where blocks go and how a batch is cut; sizes of micro-batches may be uneven."""

    stops: tuple[int, ...]
    micro_batches: tuple[int, ...]
    schedule: str = "gpipe"

    def plan(self) -> ClusterPlan:
        plan = make_plan(
            "A", self.stops, size=max(self.micro_batches), count=len(self.micro_batches)
        )
        execution = PlannedExecution(schedule=self.schedule)
        return replace(plan, warmup_depth=self.warmup_depth(), execution=execution)

    def warmup_depth(self) -> tuple[int, ...]:
        stages = len(self.stops) + 2
        if self.schedule == "gpipe":
            return (len(self.micro_batches),) * stages
        return tuple(range(stages, 0, -1))


@dataclass(frozen=True, kw_only=True)
class Replicated(Cut):
    """A cut whose stages have so many replicas; depths are those of each replica."""

    replicas: tuple[int, ...]
    depths: tuple[int, ...] = ()

    def plan(self) -> ClusterPlan:
        plan = super().plan()
        segments = tuple(
            replace(s, replicas=tuple(f"{s.device_id}r{i}" for i in range(1, count)))
            for s, count in zip(plan.segments, self.replicas, strict=True)
        )
        return replace(plan, segments=segments, warmup_depth=self.depths or plan.warmup_depth)


def one_to_three_devices(micro_batches: tuple[int, ...]) -> list[Cut]:
    return [
        Cut(stops=(BLOCKS,), micro_batches=micro_batches),
        Cut(stops=(2, BLOCKS), micro_batches=micro_batches, schedule="1f1b"),
        Cut(stops=(1, 3, BLOCKS), micro_batches=micro_batches, schedule="1f1b"),
    ]


def tiny_batch(splitter: Splitter, size: int, seed: int) -> Batch:
    """Padded examples of different lengths, with labels to match the task."""
    rng = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, 9, (size,), generator=rng)
    mask = (torch.arange(8)[None] < lengths[:, None]).long()
    ids = torch.randint(3, 50, (size, 8), generator=rng) * mask
    if splitter.task.name == "seq2seq":
        labels = torch.randint(3, 50, (size, 6), generator=rng)
        labels[torch.arange(6)[None] >= lengths[:, None]] = -100
    else:
        labels = torch.randint(0, 4, (size,), generator=rng)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def without_labels(batch: Batch) -> Batch:
    return {**batch, "labels": torch.full_like(batch["labels"], -100)}


def steps_of(splitter: Splitter, cut: Cut, count: int = 1) -> list[list[Batch]]:
    return [
        [
            tiny_batch(splitter, size, seed=100 * step + i)
            for i, size in enumerate(cut.micro_batches)
        ]
        for step in range(count)
    ]


def micro_batches(splitter: Splitter, steps: Sequence[Sequence[Batch]]) -> list[list[MicroBatch]]:
    count = splitter.weight_of
    return [
        [MicroBatch(inputs=b, context=splitter.context(b), weight=count(b)) for b in step]
        for step in steps
    ]


def order_of(
    cut: Cut,
    weights: dict[str, Tensor],
    rule: OptimizerConfig,
    *,
    execution: Execution | None = None,
    every: int = 0,
    **options: Any,
) -> TrainingOrder:
    """A round of the cut; with ``every``, a snapshot is kept after so many steps."""
    learning = LearningSettings(
        optimizer=rule,
        deadline_s=20.0,
        execution=execution or Execution(),
        snapshot_every=every,
    )
    asked = PlannedExecution(schedule=cut.schedule, recompute=learning.execution.recompute)
    plan = replace(cut.plan(), execution=asked)
    return TrainingOrder(plan=plan, weights=weights, learning=learning, **options)


def train_split(
    splitter: Splitter,
    weights: dict[str, Tensor],
    cut: Cut,
    steps: Sequence[Sequence[Batch]],
    rule: OptimizerConfig,
    **options: Any,
) -> tuple[tuple[float, ...], dict[str, Tensor]]:
    """One round of a cluster on threads; losses and all weights behind it."""
    order = order_of(cut, weights, rule, **options)
    batches = micro_batches(splitter, steps)
    result = train_round(splitter, order, batches, ThreadFleet(ThreadEdge()))
    return result.losses, dict(result.weights)


def train_whole(
    splitter: Splitter,
    weights: dict[str, Tensor],
    steps: Sequence[Sequence[Batch]],
    rule: OptimizerConfig,
) -> tuple[tuple[float, ...], dict[str, Tensor]]:
    model = splitter.build_whole(weights)
    optimizer = Optimizer(rule, model.named_parameters())
    rates = rule.rates(batches=len(steps))
    losses = train_unsplit(splitter, model, optimizer, steps, rates=rates)
    state = model.state_dict()
    return losses, {key: state[key] for key in weights}


def largest_difference(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    assert set(left) == set(right)
    return max(float((left[key] - right[key]).abs().max()) for key in left)


def device(name: str, speed: float = 1e9, memory_bytes: int = 2**30) -> DeviceProfile:
    return DeviceProfile(
        device_id=name,
        kind="board",
        speed_flop_per_s=speed,
        memory_bytes=memory_bytes,
        energy_per_flop_j=1e-9,
        tx_power_max_w=0.1,
        energy_budget_j=1.0,
    )


def profile(memory_bytes: int = 2**30) -> ClusterProfile:
    speeds = dict(zip(DEVICES, (1e9, 2e9, 3e9), strict=True))
    return ClusterProfile(
        cluster_id="A",
        examples=9,
        control_unit=device("A/cu"),
        devices=tuple(device(name, speed, memory_bytes) for name, speed in speeds.items()),
        d2d_bandwidth_hz=1e6,
        server_rate_bit_per_s=1e6,
    )


@cache
def costs_of(splitter: Splitter) -> ModelProfile:
    return profile_model(splitter, BatchShape(source_length=8, target_length=1))


def recovery(splitter: Splitter, **options: int) -> Recovery:
    return Recovery(profile=profile(**options), model=lambda: costs_of(splitter))

"""The control unit: one planned round of one cluster, from weights in to weights out.

It cuts the encoder as planned, gives every device its segment, joins

    control unit -> device 1 -> ... -> device K -> edge

by links, drives the optimiser steps of the round, and collects the segments. A plan changes where
blocks run, never what they compute.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor, nn

from collapipe_flwr.cluster.device import DeviceThread, running
from collapipe_flwr.core.domain import ClusterPlan
from collapipe_flwr.models.splitter import Splitter
from collapipe_flwr.pipeline.link import Link, memory_pair
from collapipe_flwr.pipeline.meter import StageReport
from collapipe_flwr.pipeline.optimizer import Optimizer, OptimizerSettings
from collapipe_flwr.pipeline.roles import FirstStage, MicroBatch, MiddleStage
from collapipe_flwr.pipeline.stage import StageSettings
from collapipe_flwr.scheduler.plans import check_cluster_plan

CONTROL_UNIT = "control-unit"
PATIENCE_PER_STAGE = 0.5  # upstream waits longer, so that the neighbour of a silent stage speaks


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundOrder:
    """What the server asks of one cluster; ``weights`` are those of embedding and blocks."""

    plan: ClusterPlan
    weights: Mapping[str, Tensor]
    optimizer: OptimizerSettings
    schedule: str
    deadline_s: float  # longest silence of a neighbour inside a step
    dropout_seed: int | None = None  # the same dropout for every cut; None where there is none


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundResult:
    """What came of it; ``reports`` are those of the control unit and of each device in order."""

    weights: dict[str, Tensor]
    losses: tuple[float, ...]  # per optimiser step
    reports: tuple[StageReport, ...]
    wall_s: float


def train_round(
    splitter: Splitter,
    order: RoundOrder,
    batches: Iterable[Sequence[MicroBatch]],
    edge: Link,
) -> RoundResult:
    """Run every batch as one optimiser step; ``edge`` leads to this cluster's decoder.

    Raises ScheduleError for a plan that does not cover every block exactly once, and LinkError
    (LinkTimeout) when a device or the edge fails (stays silent); the weights in ``order`` are
    unchanged then and every thread has ended.
    """
    start_s = time.perf_counter()
    check_cluster_plan(order.plan, splitter.num_blocks)
    first, devices = _build_chain(splitter, order, edge)
    with running(devices, order.deadline_s), first.telling_neighbours():
        losses = tuple(first.train_step(batch).loss for batch in batches)
        first.finish()
    return RoundResult(
        weights=_collect([first.part, *(device.stage.part for device in devices)]),
        losses=losses,
        reports=(first.report(), *(device.report() for device in devices)),
        wall_s=time.perf_counter() - start_s,
    )


def _build_chain(
    splitter: Splitter, order: RoundOrder, edge: Link
) -> tuple[FirstStage, list[DeviceThread]]:
    """All stages but the edge, joined by in-memory links, the last one to ``edge``."""
    names = [CONTROL_UNIT, *(segment.device_id for segment in order.plan.segments)]
    pairs = [memory_pair(left, right) for left, right in pairwise(names)]
    downstream: list[Link] = [*(left for left, _ in pairs), edge]
    first = FirstStage(
        *_trained(splitter.build_embedding(order.weights), order, stage=0),
        downstream=downstream[0],
    )
    devices = []
    for index, segment in enumerate(order.plan.segments):
        part = splitter.build_segment(segment.first_block, segment.stop_block, order.weights)
        stage = MiddleStage(
            *_trained(part, order, stage=index + 1),
            upstream=pairs[index][1],
            downstream=downstream[index + 1],
        )
        devices.append(DeviceThread(stage))
    return first, devices


def _trained(
    part: nn.Module, order: RoundOrder, *, stage: int
) -> tuple[nn.Module, Optimizer, StageSettings]:
    """A part with its optimiser and its place in the schedule."""
    names = [CONTROL_UNIT, *(segment.device_id for segment in order.plan.segments)]
    stages_between_here_and_edge = len(names) - 1 - stage
    settings = StageSettings(
        name=names[stage],
        schedule=order.schedule,
        depth=order.plan.warmup_depth[stage],
        deadline_s=order.deadline_s * (1 + PATIENCE_PER_STAGE * stages_between_here_and_edge),
        seed=order.dropout_seed,
    )
    return part, Optimizer(order.optimizer, part.parameters()), settings


def _collect(parts: Iterable[nn.Module]) -> dict[str, Tensor]:
    """The weights of all parts under their keys in the whole model."""
    return {key: value.detach() for part in parts for key, value in part.state_dict().items()}

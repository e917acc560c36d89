"""The control unit: one planned round of one cluster, from weights in to weights out.

It keeps the embedding, has its fleet place the segments of the plan, so that there is

    control unit -> device 1 -> ... -> device K -> edge

drives the optimiser steps of the round, and collects the segments. A plan changes where blocks
run, never what they compute; whether a device is a thread or a daemon is the fleet's business.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from collapipe_flwr.cluster.fleet import Fleet
from collapipe_flwr.cluster.guessing import Guessing, Tested
from collapipe_flwr.cluster.leg import MeanLoss, run_leg, run_test
from collapipe_flwr.cluster.order import CONTROL_UNIT, RoundOrder
from collapipe_flwr.cluster.recovery import Incident, RecoveringRound, Recovery
from collapipe_flwr.core.domain import ClusterPlan
from collapipe_flwr.models.splitter import Splitter
from collapipe_flwr.pipeline.meter import StageReport
from collapipe_flwr.pipeline.roles import MicroBatch
from collapipe_flwr.pipeline.state import Slots
from collapipe_flwr.scheduler.plans import check_cluster_plan
from collapipe_flwr.transport.weights import TransferStats


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundResult:
    """What came of it; ``reports`` are those of the control unit and of each device in order.

    They, and ``moved``, are of the legs that count: what was void and replayed is not in them.
    """

    weights: dict[str, Tensor]
    slots: Slots = field(default_factory=dict)  # of embedding and blocks, where asked for
    losses: tuple[float, ...]  # per optimiser step; a batch without labels makes none
    probe: MeanLoss  # before the first step
    reports: tuple[StageReport, ...]
    wall_s: float
    moved: TransferStats = field(default_factory=TransferStats)  # weights to and from the devices
    plan: ClusterPlan  # that the round ended with
    incidents: tuple[Incident, ...] = ()


def train_round(
    splitter: Splitter,
    order: RoundOrder,
    batches: Iterable[Sequence[MicroBatch]],
    fleet: Fleet,
    probe: Iterable[Sequence[MicroBatch]] = (),
    *,
    recovery: Recovery | None = None,
) -> RoundResult:
    """Run every batch as one optimiser step on the devices of ``fleet``, after testing ``probe``.

    Raises ScheduleError for a plan that does not cover every block exactly once, and LinkError
    (LinkTimeout) when a device or the edge fails (stays silent); the weights in ``order`` are
    unchanged then and no device holds anything of the round. With ``recovery`` it goes on without
    devices that are lost, see `RecoveringRound.run` for what it raises then.
    """
    start_s = time.perf_counter()
    check_cluster_plan(order.plan, splitter.num_blocks)
    if recovery is None:
        leg = run_leg(
            splitter, order, batches, fleet, probe, keep_optimizer=lambda: order.keep_optimizer
        )
        legs, plan, incidents = [leg], order.plan, []
    else:
        course = RecoveringRound(splitter, order, fleet, recovery)
        course.run(batches, probe)
        legs, plan, incidents = course.legs, course.order.plan, course.incidents
    return RoundResult(
        slots=legs[-1].state.slots if order.keep_optimizer else {},
        weights={k: t for leg in legs for k, t in leg.state.weights.items()},
        losses=tuple(loss for leg in legs for loss in leg.losses),
        probe=legs[0].probe,
        reports=joined(leg.reports for leg in legs),
        wall_s=time.perf_counter() - start_s,
        moved=sum((leg.moved for leg in legs), TransferStats()),
        plan=plan,
        incidents=tuple(incidents),
    )


def evaluate_batches(
    splitter: Splitter,
    order: RoundOrder,
    batches: Iterable[Sequence[MicroBatch]],
    fleet: Fleet,
    *,
    recovery: Recovery | None = None,
    wanted: Guessing | None = None,
) -> Tested:
    """The same chain without training it; raises, and goes on, as ``train_round``."""
    check_cluster_plan(order.plan, splitter.num_blocks)
    if recovery is None:
        return run_test(splitter, order, batches, fleet, wanted)
    return RecoveringRound(splitter, order, fleet, recovery).test(batches, wanted)


def joined(reports: Iterable[Sequence[StageReport]]) -> tuple[StageReport, ...]:
    """One report per stage over all legs: those of the last leg in its order, behind the first."""
    by_name: dict[str, StageReport] = {}
    for leg in reports:
        for report in leg:
            before = by_name.pop(report.name, None)
            by_name[report.name] = report if before is None else before + report
    control_unit = by_name.pop(CONTROL_UNIT, None)
    return tuple(filter(None, (control_unit, *by_name.values())))

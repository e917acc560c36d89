"""The control unit: one planned round of one cluster, from weights in to weights out.

It keeps the embedding, places the segments of the plan on its fleet, which makes the chain

    control unit -> device 1 -> ... -> device K -> edge

drives the optimizer steps of the round, and collects the segments. A plan changes where blocks
run, never what they compute.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from collapipe_flwr.cluster.evaluation import EvalResult, PredictionConfig
from collapipe_flwr.cluster.fleet import Fleet
from collapipe_flwr.cluster.order import CONTROL_UNIT, TrainingOrder
from collapipe_flwr.cluster.recovery import Interruption, RecoveringPipeline, Recovery
from collapipe_flwr.core.domain import ClusterPlan
from collapipe_flwr.core.errors import ScheduleError
from collapipe_flwr.core.links import QUEUE_FRAMES
from collapipe_flwr.core.measurements import StageMeasurement, TransferStats
from collapipe_flwr.models.any_splitter import AnySplitter
from collapipe_flwr.pipeline.offload import LazyMapping
from collapipe_flwr.pipeline.state import OptimizerState, drop_round_start
from collapipe_flwr.pipeline.step import MicroBatch
from collapipe_flwr.scheduler.plans import check_cluster_plan, dry_run_plan


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterResult:
    """The result of a round; ``reports`` are in pipeline order: control unit, devices, edge.

    They, and ``moved``, leave out intervals that were void and replayed.
    """

    weights: LazyMapping[Tensor]
    slots: OptimizerState = field(default_factory=dict)  # of all parts, on request
    losses: tuple[float, ...]  # per optimizer step; a batch without labels makes none
    probe: EvalResult  # before the first step
    reports: tuple[StageMeasurement, ...]
    wall_s: float
    moved: TransferStats = field(default_factory=TransferStats)  # weights to and from all hosts
    plan: ClusterPlan  # at the end of the round
    incidents: tuple[Interruption, ...] = ()
    quarantined: Mapping[str, str] = field(default_factory=dict)  # reasons by device


def train_round(
    splitter: AnySplitter,
    order: TrainingOrder,
    batches: Iterable[Sequence[MicroBatch]],
    fleet: Fleet,
    probe: Iterable[Sequence[MicroBatch]] = (),
    *,
    recovery: Recovery | None = None,
) -> ClusterResult:
    """Run every batch as one optimizer step on the devices of ``fleet``, after testing ``probe``.

    Raises ScheduleError for a plan that does not cover every block exactly once, or whose schedule
    would deadlock or keep more in flight than planned. Raises LinkError when a device or the edge
    fails, LinkTimeout when it stays silent; the weights in ``order`` are unchanged then, and no
    device keeps anything of the round. With ``recovery`` the round continues without lost devices
    and raises as `RecoveringPipeline.run`.
    """
    start_s = time.perf_counter()
    check_cluster_plan(order.plan, splitter.num_blocks)
    _refuse_cut_batches(splitter, order.plan)
    dry_run_plan(order.plan, QUEUE_FRAMES)
    done = RecoveringPipeline(splitter, order, fleet, recovery)
    done.run(batches, probe)
    intervals, last = done.intervals, done.intervals[-1].held.state
    return ClusterResult(
        slots=drop_round_start(last.optimizer) if order.keep_optimizer else {},
        weights=LazyMapping.join(last.weights),
        losses=tuple(loss for interval in intervals for loss in interval.losses),
        probe=intervals[0].probe,
        reports=join_reports(interval.held.reports for interval in intervals),
        wall_s=time.perf_counter() - start_s,
        moved=sum((interval.held.moved for interval in intervals), TransferStats()),
        plan=done.order.plan,
        incidents=tuple(done.incidents),
        quarantined=done.suspects.quarantined,
    )


def _refuse_cut_batches(splitter: AnySplitter, plan: ClusterPlan) -> None:
    """Raise ScheduleError if the plan cuts the batches of a model that needs whole ones."""
    if splitter.whole_batches and plan.micro_batches > 1:
        raise ScheduleError(
            f"the plan cuts batches into {plan.micro_batches} micro-batches, but the model or its "
            "loss computes with whole batches: plan one micro-batch"
        )


def evaluate_batches(
    splitter: AnySplitter,
    order: TrainingOrder,
    batches: Iterable[Sequence[MicroBatch]],
    fleet: Fleet,
    *,
    recovery: Recovery | None = None,
    wanted: PredictionConfig | None = None,
) -> EvalResult:
    """Evaluate the chain without training it; recovers and raises as ``train_round``."""
    check_cluster_plan(order.plan, splitter.num_blocks)
    return RecoveringPipeline(splitter, order, fleet, recovery).test(batches, wanted)


def join_reports(reports: Iterable[Sequence[StageMeasurement]]) -> tuple[StageMeasurement, ...]:
    """Add up the reports of each stage over all intervals; order them as in the last one."""
    by_name: dict[str, StageMeasurement] = {}
    for interval in reports:
        for report in interval:
            before = by_name.pop(report.name, None)
            by_name[report.name] = report if before is None else before + report
    control_unit = by_name.pop(CONTROL_UNIT, None)
    return tuple(filter(None, (control_unit, *by_name.values())))

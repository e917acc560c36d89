"""The outcome of a round of a cluster of machines, from what they measured.

Seconds are those of each machine's own clock: the control unit's from its order to its reply, every
stage's for its passes. The way to the Flower server is not timed and counts as the cost model has
it. Energy is measured by a sensor if a machine has one, else modelled from measured times: the
power of its profile while it computes, and its planned transmit powers while it sends. Weights that
are placed and collected are not timed hop by hop and spend no energy here.

A stage cannot have computed for longer than the round lasted, nor for zero seconds: such a report
is ignored, and its energy counts as planned.

`MovementMeter` measures how far the model moved, which the convergence bound learns from.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from collapipe_flwr.core.domain import (
    ClusterOutcome,
    ClusterPlan,
    ClusterProfile,
    LinkSample,
    ModelProfile,
    RoundOutcome,
    StageSample,
)
from collapipe_flwr.costs.measured import server_s, stage_parts
from collapipe_flwr.costs.replicas import PricedCluster
from collapipe_flwr.federation.arrays import averaging_view
from collapipe_flwr.federation.rounds import ClosedRound
from collapipe_flwr.federation.telemetry import ClusterTelemetry
from collapipe_flwr.pipeline.meter import StageReport

CLOCKS_DIFFER = 1.1  # a stage's seconds over the control unit's, at most


def measured_outcome(
    plan: ClusterPlan,
    planned: PricedCluster,
    measured: ClusterTelemetry,
    profile: ClusterProfile,
    model: ModelProfile,
    *,
    links: tuple[LinkSample, ...],
    recompute: bool,
) -> ClusterOutcome:
    """Compute the measured outcome of ``plan``, whose predicted price was ``planned``."""
    reports = _by_member(plan, measured)
    trusted = {name: report for name, report in reports.items() if _is_true(report, measured)}
    energy_j = {member.device_id: planned.energy_j[member.device_id] for member in profile.members}
    for member in profile.members:
        if member.device_id in trusted:
            watt = member.speed_flop_per_s * member.energy_per_flop_j
            energy_j[member.device_id] = _energy_j(plan, member.device_id, trusted, watt)
        elif not plan.memory_bytes.get(member.device_id):
            energy_j[member.device_id] = 0.0
    is_timed = 0 < measured.wall_s < math.inf
    return ClusterOutcome(
        cluster_id=plan.cluster_id,
        latency_s=measured.wall_s + server_s(profile, model) if is_timed else planned.latency_s,
        energy_j=energy_j,
        loss=measured.loss,
        gradient_noise=measured.gradient_noise,
        links=links,
        stages=tuple(_samples(plan, measured, trusted, model, recompute)),
        measured=is_timed,
        metered=tuple(name for name, report in trusted.items() if _is_metered(report)),
    )


def _by_member(plan: ClusterPlan, measured: ClusterTelemetry) -> dict[str, StageReport]:
    """Index the reports by device id, and the edge's by the edge's id."""
    control_unit, *devices = measured.reports or (None,)
    found = {report.name: report for report in devices if report is not None}
    if control_unit is not None:
        found[plan.member_ids[0]] = control_unit
    return found if measured.edge is None else {**found, plan.edge: measured.edge}


def _busy_s(report: StageReport) -> float:
    return report.forward_s + report.backward_s + report.optimizer_s


def _is_true(report: StageReport, measured: ClusterTelemetry) -> bool:
    passes_s = report.forward_s + report.backward_s
    return 0 < passes_s <= _busy_s(report) <= CLOCKS_DIFFER * measured.wall_s


def _is_metered(report: StageReport) -> bool:
    return report.energy_j is not None and 0 < report.energy_j < math.inf


def _energy_j(plan: ClusterPlan, name: str, reports: dict[str, StageReport], watt: float) -> float:
    """Joules of one member: metered, else modelled with ``watt`` while it computes."""
    report = reports[name]
    if report.energy_j is not None and _is_metered(report):
        return report.energy_j
    ahead = plan.tx_power_w.get(name, 0.0) * report.sent_down.sending_s
    back = plan.gradient_power_w.get(name, 0.0) * report.sent_up.sending_s
    return watt * _busy_s(report) + ahead + back


def _micro_batches(plan: ClusterPlan, report: StageReport | None) -> int:
    """Micro-batches that passed a stage, or one of its replicas, in training."""
    return (report.micro_batches or report.steps * plan.micro_batches) if report else 0


def _samples(
    plan: ClusterPlan,
    measured: ClusterTelemetry,
    reports: dict[str, StageReport],
    model: ModelProfile,
    recompute: bool,
) -> Iterator[StageSample]:
    """Yield a sample of every stage, or none if blocks moved during the round."""
    if measured.incidents:
        return
    together = {name: s.device_ids for s in plan.segments for name in s.device_ids}
    for name, (passes, flop) in stage_parts(plan, model, recompute=recompute).items():
        report, count = reports.get(name), _micro_batches(plan, reports.get(name))
        whole = sum(_micro_batches(plan, reports.get(n)) for n in together.get(name, (name,)))
        if report is None or count <= 0:
            continue
        busy_s = _busy_s(report)
        yield StageSample(
            device_id=name,
            passes=passes,
            flop=flop * measured.examples / whole,
            busy_s=(report.forward_s + report.backward_s) / count,
            watt=report.energy_j / busy_s if report.energy_j and _is_metered(report) else None,
            planned_bytes=plan.memory_bytes.get(name, 0),
            peak_bytes=report.peak_tensor_bytes,
        )


class MovementMeter:
    """How far the model moved in successive rounds; ``last`` is the previous update.

    With x the global update and x_m that of cluster m: |x|, |x - previous x|, and the
    example-weighted mean of |x_m - x|^2. Works key by key, so memory stays at one model.
    """

    def __init__(self) -> None:
        self.last: dict[str, NDArray[np.floating]] = {}

    def measure(self, closed: ClosedRound, outcome: RoundOutcome) -> RoundOutcome:
        """Add the round's movement to the outcome, unless the inner strategy dropped the round."""
        if closed.after is None:
            return outcome
        before, after = averaging_view(closed.before), averaging_view(closed.after)
        moved = {}
        for key in (key for key in before if key in after):
            start = before[key].numpy()
            if np.isfinite(start).all():  # a mask may hold -inf
                moved[key] = after[key].numpy() - start
        change = None
        if self.last.keys() == moved.keys():
            change = math.sqrt(sum(_square(x - self.last[k]) for k, x in moved.items()))
        self.last = moved
        return replace(
            outcome,
            update_norm=math.sqrt(sum(_square(x) for x in moved.values())),
            update_change_norm=change,
            update_spread=_spread({k: after[k].numpy() for k in moved}, closed),
        )


def _spread(after: Mapping[str, NDArray[np.floating]], closed: ClosedRound) -> float:
    total = math.fsum(closed.examples[name] for name in closed.models)
    if total <= 0:
        return 0.0
    spread = 0.0
    for name, record in closed.models.items():
        view = averaging_view(record)
        distance = sum(_square(view[k].numpy() - mean) for k, mean in after.items() if k in view)
        spread += closed.examples[name] / total * distance
    return spread


def _square(x: NDArray[np.floating]) -> float:
    flat = x.ravel().astype(np.float64, copy=False)
    return float(flat @ flat)

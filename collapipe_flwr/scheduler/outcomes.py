"""The outcome of a round, from which schedulers learn: measured by machines, or simulated.

**Measured.** Seconds are those of each machine's own clock: the control unit's from its order to
its reply, every stage's for its passes. The way to the Flower server is not timed and counts as the
cost model has it. Energy is measured by a sensor if a machine has one, else modelled from measured
times: the power of its profile while it computes, and its planned transmit powers while it sends.
Weights that are placed and collected are not timed hop by hop and spend no energy here. A stage
cannot have computed for longer than the round lasted, nor for zero seconds: such a measurement is
ignored, and its energy counts as planned.

**Simulated.** Clusters that are threads of some machine take seconds that say nothing about the
described boards: their outcome is the plan's price in the world as it truly is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

from collapipe_flwr.core.domain import (
    ClusterPlan,
    ClusterProfile,
    ModelProfile,
    Snapshot,
)
from collapipe_flwr.core.links import LinkTraffic
from collapipe_flwr.core.measurements import ClusterMeasurement, StageMeasurement
from collapipe_flwr.core.outcome import ClusterOutcome, LinkSample, StageSample
from collapipe_flwr.costs.measured import (
    compute_pass_s,
    compute_server_s,
    count_stage_parts,
    explain_latency_s,
)
from collapipe_flwr.costs.replicas import PricedCluster
from collapipe_flwr.costs.work import PricingOptions

CLOCKS_DIFFER = 1.1  # a stage's seconds over the control unit's, at most
KEPT = 0.8  # of a planned rate: a slower sender was limited by something else


def measure_outcome(
    plan: ClusterPlan,
    planned: PricedCluster,
    measured: ClusterMeasurement,
    profile: ClusterProfile,
    model: ModelProfile,
    *,
    links: tuple[LinkSample, ...],
) -> ClusterOutcome:
    """Compute the measured outcome of ``plan``, whose predicted price was ``planned``."""
    reports = _index_reports(plan, measured)
    trusted = {name: report for name, report in reports.items() if _is_true(report, measured)}
    energy_j = {member.device_id: planned.energy_j[member.device_id] for member in profile.members}
    for member in profile.members:
        if member.device_id in trusted:
            watt = member.speed_flop_per_s * member.energy_per_flop_j
            energy_j[member.device_id] = _compute_energy_j(plan, member.device_id, trusted, watt)
        elif not plan.memory_bytes.get(member.device_id):
            energy_j[member.device_id] = 0.0
    energy_j = _add_head(energy_j, plan, planned, trusted, profile)
    is_timed = 0 < measured.wall_s < math.inf
    return ClusterOutcome(
        cluster_id=plan.cluster_id,
        latency_s=measured.wall_s + compute_server_s(profile, model)
        if is_timed
        else plan.latency_s,
        energy_j=energy_j,
        loss=measured.loss,
        gradient_noise=measured.gradient_noise,
        links=links,
        stages=tuple(_make_samples(plan, measured, trusted, model)),
        measured=is_timed,
        metered=tuple(name for name, report in trusted.items() if _is_metered(report)),
    )


def _index_reports(plan: ClusterPlan, measured: ClusterMeasurement) -> dict[str, StageMeasurement]:
    """Index the reports by device id, and the edge's by the edge's id."""
    control_unit, *devices = measured.reports or (None,)
    found = {report.name: report for report in devices if report is not None}
    if control_unit is not None:
        found[plan.member_ids[0]] = control_unit
    return found if measured.edge is None else {**found, plan.edge: measured.edge}


def _sum_busy_s(report: StageMeasurement) -> float:
    return report.forward_s + report.backward_s + report.optimizer_s


def _is_true(report: StageMeasurement, measured: ClusterMeasurement) -> bool:
    passes_s = report.forward_s + report.backward_s
    return 0 < passes_s <= _sum_busy_s(report) <= CLOCKS_DIFFER * measured.wall_s


def _is_metered(report: StageMeasurement) -> bool:
    return report.energy_j is not None and 0 < report.energy_j < math.inf


def _compute_energy_j(
    plan: ClusterPlan, name: str, reports: dict[str, StageMeasurement], watt: float
) -> float:
    """Compute the joules of one member: metered, else modelled with ``watt`` while it computes."""
    report = reports[name]
    if report.energy_j is not None and _is_metered(report):
        return report.energy_j
    ahead = plan.tx_power_w.get(name, 0.0) * report.sent_down.sending_s
    back = plan.gradient_power_w.get(name, 0.0) * report.sent_up.sending_s
    return watt * _sum_busy_s(report) + ahead + back


def _add_head(
    energy_j: dict[str, float],
    plan: ClusterPlan,
    planned: PricedCluster,
    reports: dict[str, StageMeasurement],
    profile: ClusterProfile,
) -> dict[str, float]:
    """Add what a member spends as the edge; of a control unit, what is not in its own number."""
    edge, report = profile.edge, reports.get(plan.edge)
    if edge is None or not edge.device_id:
        return energy_j
    if report is None:
        return energy_j | {edge.device_id: planned.energy_j[edge.device_id]}
    own = reports.get(edge.device_id)
    if profile.edge_at_home and (own is None or _is_metered(own)):
        return energy_j
    joules = _compute_energy_j(
        plan, plan.edge, reports, edge.speed_flop_per_s * edge.energy_per_flop_j
    )
    if not _is_metered(report):
        joules += edge.tx_power_w * report.sent_up.sending_s
    return energy_j | {edge.device_id: energy_j.get(edge.device_id, 0.0) + joules}


def _count_micro_batches(plan: ClusterPlan, report: StageMeasurement | None) -> int:
    """Count the micro-batches that passed a stage, or one of its replicas, in training."""
    return (report.micro_batches or report.steps * plan.micro_batches) if report else 0


def _make_samples(
    plan: ClusterPlan,
    measured: ClusterMeasurement,
    reports: dict[str, StageMeasurement],
    model: ModelProfile,
) -> Iterator[StageSample]:
    """Yield a sample of every stage, or none if blocks moved during the round."""
    if measured.incidents:
        return
    together = {name: s.device_ids for s in plan.segments for name in s.device_ids}
    for name, (passes, flop) in count_stage_parts(plan, model).items():
        report, count = reports.get(name), _count_micro_batches(plan, reports.get(name))
        whole = sum(_count_micro_batches(plan, reports.get(n)) for n in together.get(name, (name,)))
        if report is None or count <= 0:
            continue
        busy_s = _sum_busy_s(report)
        yield StageSample(
            device_id=name,
            passes=passes,
            flop=flop * measured.examples / whole,
            busy_s=(report.forward_s + report.backward_s) / count,
            watt=report.energy_j / busy_s if report.energy_j and _is_metered(report) else None,
            planned_bytes=plan.memory_bytes.get(name, 0),
            peak_bytes=report.peak_tensor_bytes,
        )


def sample_links(
    plan: ClusterPlan, measured: ClusterMeasurement, *, paced: bool
) -> Iterator[LinkSample]:
    """Yield a sample of every measured hop, or none if the round lost devices or has replicas.

    The planned rate of a hop between replicas is that of its slowest link.
    """
    if measured.incidents or max(plan.replicas) > 1:
        return
    reports = measured.report_links(plan, paced=paced)
    stages = (*plan.member_ids, plan.edge)
    for ends, hop, seen in zip(pairwise(stages), plan.hops, reports, strict=False):
        ways = ((hop.forward_bit_per_s, seen.forward), (hop.backward_bit_per_s, seen.backward))
        rates = [
            (planned, reached)
            for planned, traffic in ways
            if planned and (reached := _estimate_rate(traffic, planned, paced=paced))
        ]
        if rates:
            yield LinkSample(
                ends=ends,
                planned_bit_per_s=len(rates) / sum(1.0 / planned for planned, _ in rates),
                measured_bit_per_s=len(rates) / sum(1.0 / reached for _, reached in rates),
                paced=paced,
            )


def _estimate_rate(traffic: LinkTraffic, planned_bit_per_s: float, *, paced: bool) -> float | None:
    """Estimate the link's bit/s; None if it is unknown."""
    if traffic.wire_bit_per_s is None:
        return None
    sent = 8.0 * traffic.bytes / traffic.sending_s if traffic.sending_s > 0 else math.inf
    if paced and sent >= KEPT * planned_bit_per_s:
        return traffic.wire_bit_per_s
    return min(traffic.wire_bit_per_s, sent)


def simulate_cluster(
    plan: ClusterPlan,
    priced: PricedCluster,
    profile: ClusterProfile,
    truth: Snapshot,
    seen: Snapshot,
    options: PricingOptions,
) -> ClusterOutcome:
    """Derive an outcome from its price; members with work report true stage times and powers.

    ``profile`` is the cluster's in ``truth``; ``seen`` holds the links, and the devices without
    work, as plans knew them.
    """
    members = {member.device_id: member for member in profile.members}
    samples = []
    for name, (passes, each) in count_stage_parts(plan, truth.find_model(profile)).items():
        member, flop = members.get(name), plan.micro_batch_size * each
        samples.append(
            StageSample(
                device_id=name,
                passes=passes,
                flop=flop,
                busy_s=compute_pass_s(member or truth.find_edge(profile), passes, flop),
                watt=member.speed_flop_per_s * member.energy_per_flop_j if member else None,
                planned_bytes=plan.memory_bytes.get(name, 0),
                peak_bytes=plan.memory_bytes.get(name, 0),
            )
        )
    stages = tuple(samples)
    return ClusterOutcome(
        cluster_id=plan.cluster_id,
        latency_s=priced.latency_s,
        energy_j=priced.energy_j,
        stages=stages,
        explained_s=None if seen is truth else explain_latency_s(plan, stages, seen, options),
    )

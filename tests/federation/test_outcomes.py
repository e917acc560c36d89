"""What clusters of machines measured, as the scheduler learns from it, false reports included."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from collapipe_flwr.cluster.order import CONTROL_UNIT
from collapipe_flwr.core.domain import ClusterPlan, Plan
from collapipe_flwr.core.links import LinkTraffic
from collapipe_flwr.core.measurements import ClusterMeasurement, StageMeasurement
from collapipe_flwr.core.outcome import ClusterOutcome, RoundOutcome
from collapipe_flwr.costs.measured import EDGE, compute_pass_s, compute_server_s, count_stage_parts
from collapipe_flwr.costs.price import price
from collapipe_flwr.federation.planner import (
    KnownClusters,
)
from collapipe_flwr.federation.planning import Planning
from collapipe_flwr.federation.round import RoundPlan
from collapipe_flwr.scheduler.protocol import SchedulerConfig
from tests.federation.test_planner import MODEL, NODES, closed, rounds, weights

NAME, EXAMPLES, STEPS = "cluster-0", 64, 8


def machines() -> KnownClusters:
    """A planner whose clusters are machines."""
    planner = rounds()
    real = tuple(replace(c, real_links=True) for c in planner.world.clusters)
    planner.world = replace(planner.world, clusters=real)
    return planner


def told(plan: ClusterPlan, planner: KnownClusters, slower: float = 2.0) -> ClusterMeasurement:
    """A round in which every device was so many times slower than its profile."""
    profile = planner.world.clusters[0]
    members = {m.device_id: m for m in profile.members}
    passes = STEPS * plan.micro_batches
    reports = {}
    for name, (blocks, flop) in count_stage_parts(plan, MODEL).items():
        profile_ = planner.world.edge if name == EDGE else members[name]
        each_s = slower * compute_pass_s(profile_, blocks, flop * EXAMPLES / passes)
        reports[name] = StageMeasurement(
            name=name,
            steps=STEPS,
            micro_batches=passes,
            forward_s=each_s * passes / 3,
            backward_s=each_s * passes * 2 / 3,
            sent_down=LinkTraffic(bytes=1000, sending_s=0.5),
            sent_up=LinkTraffic(bytes=1000, sending_s=0.25),
            peak_tensor_bytes=plan.memory_bytes.get(name, 0),
        )
    edge = replace(reports.pop(EDGE), name="edge")
    own, *devices = (reports[name] for name in plan.member_ids)
    return ClusterMeasurement(
        cluster_id=NAME,
        examples=EXAMPLES,
        wall_s=3.0,
        losses=(1.0,) * STEPS,
        reports=(replace(own, name=CONTROL_UNIT), *devices),
        edge=edge,
    )


def round_s(plan: ClusterPlan, planner: KnownClusters, slower: float, more_s: float) -> float:
    """Seconds of a round of devices so many times slower, and of ``more_s`` besides."""

    def late(profile):
        return replace(profile, speed_flop_per_s=profile.speed_flop_per_s / slower)

    snapshot = planner.world.snapshot(1, MODEL)
    clusters = (replace(c, profile=c.profile.with_members(late)) for c in snapshot.clusters)
    slow = replace(snapshot, clusters=tuple(clusters), edge=late(snapshot.edge))
    alone = Plan(round_index=1, policy="", clusters=(plan,), latency_s=0.0, rho=1.0)
    whole_s = price(alone, slow, planner._planning.settings).latency_s
    return whole_s - compute_server_s(planner.world.clusters[0], MODEL) + more_s


def settled(
    planner: KnownClusters, planned: RoundPlan, telemetry: ClusterMeasurement
) -> tuple[RoundOutcome, ClusterOutcome]:
    done = closed(planned, NAME, after=weights(1.0))
    done.telemetry[NAME] = telemetry
    outcome = planner.settle(done)
    return outcome, outcome.clusters[0]


def with_report(
    telemetry: ClusterMeasurement, number: int, **changes: object
) -> ClusterMeasurement:
    reports = list(telemetry.reports)
    reports[number] = replace(reports[number], **changes)
    return replace(telemetry, reports=tuple(reports))


def test_seconds_are_those_of_the_clocks_and_stand_beside_what_was_believed() -> None:
    planner = machines()
    planned = planner.plan(1, [11])
    (plan,) = planned.plan.clusters
    outcome, cluster = settled(planner, planned, told(plan, planner))
    assert cluster.measured
    expected = 3.0 + compute_server_s(planner.world.clusters[0], MODEL)
    assert outcome.latency_s == cluster.latency_s == pytest.approx(expected)
    assert {s.device_id for s in cluster.stages} == {*plan.member_ids, EDGE}
    for sample in cluster.stages:
        assert sample.busy_s == pytest.approx(2.0 * sample.expected_s)


def test_a_coded_reply_is_priced_by_its_bytes() -> None:
    planner = machines()
    planned = planner.plan(1, [11]).plan
    latency_s, server = {}, {}
    for codec in ("fp32", "int4", "top-k"):
        profile = replace(planner.world.clusters[0], update_codec=codec)
        assert Planning(updates=codec).described(profile, MODEL).update_codec == codec
        snapshot = planner.world.with_cluster(profile).snapshot(1, MODEL)
        latency_s[codec] = price(planned, snapshot, planner._planning.settings).latency_s
        server[codec] = compute_server_s(profile, MODEL)
    spared_s = server["fp32"] - server["int4"]
    assert server["int4"] / server["fp32"] == pytest.approx((1 + 17 / 128) / 2)
    assert latency_s["fp32"] - latency_s["int4"] == pytest.approx(spared_s)
    assert latency_s["top-k"] < latency_s["int4"]


def test_energy_is_power_by_measured_seconds_and_goes_into_queues() -> None:
    planner = machines()
    planned = planner.plan(1, [11])
    (plan,) = planned.plan.clusters
    telemetry = told(plan, planner)
    outcome, cluster = settled(planner, planned, telemetry)
    assert cluster.metered == ()
    share = SchedulerConfig().aim_share(1)
    for member in planner.world.clusters[0].devices:
        report = next((r for r in telemetry.reports if r.name == member.device_id), None)
        if report is None:
            assert cluster.energy_j[member.device_id] == 0
            continue
        watt = member.speed_flop_per_s * member.energy_per_flop_j
        joules = watt * (report.forward_s + report.backward_s)
        joules += 0.5 * plan.tx_power_w[member.device_id]
        joules += 0.25 * plan.gradient_power_w[member.device_id]
        assert cluster.energy_j[member.device_id] == pytest.approx(joules)
        queue = outcome.queues_j[NAME][member.device_id]
        assert queue == pytest.approx(max(joules - share * member.energy_budget_j, 0.0))


def test_a_sensor_goes_before_the_model_and_the_record_says_so() -> None:
    planner = machines()
    planned = planner.plan(1, [11])
    (plan,) = planned.plan.clusters
    name = plan.segments[0].device_id
    telemetry = with_report(told(plan, planner), 1, energy_j=1.25)
    _, cluster = settled(planner, planned, telemetry)
    assert cluster.metered == (name,) and cluster.energy_j[name] == 1.25
    (sample,) = (s for s in cluster.stages if s.device_id == name)
    report = telemetry.reports[1]
    assert sample.watt == pytest.approx(1.25 / (report.forward_s + report.backward_s))


@pytest.mark.parametrize(
    "changes",
    [
        {"forward_s": 1e6},  # longer than the round
        {"forward_s": math.nan},
        {"forward_s": 0.0, "backward_s": 0.0},
        {"forward_s": 0.0, "backward_s": 0.0, "optimizer_s": 0.1},
        {"forward_s": math.inf},
    ],
)
def test_a_report_that_cannot_be_true_teaches_nothing(changes: dict[str, float]) -> None:
    planner = machines()
    planned = planner.plan(1, [11])
    (plan,) = planned.plan.clusters
    name = plan.segments[0].device_id
    _, cluster = settled(planner, planned, with_report(told(plan, planner), 1, **changes))
    assert name not in {s.device_id for s in cluster.stages}
    assert cluster.energy_j[name] == pytest.approx(plan.energy_j[name])
    assert name not in planner.controller.state.beliefs.stages[NAME]


@pytest.mark.parametrize("joules", [0.0, -1.0, math.nan, math.inf])
def test_joules_that_are_none_are_modelled(joules: float) -> None:
    planner = machines()
    planned = planner.plan(1, [11])
    (plan,) = planned.plan.clusters
    telemetry = told(plan, planner)
    _, cluster = settled(planner, planned, with_report(telemetry, 1, energy_j=joules))
    assert cluster.metered == ()
    assert 0 < cluster.energy_j[plan.segments[0].device_id] < math.inf


@pytest.mark.parametrize("wall_s", [0.0, math.nan, math.inf])
def test_a_round_without_a_clock_counts_as_planned(wall_s: float) -> None:
    planner = machines()
    planned = planner.plan(1, [11])
    (plan,) = planned.plan.clusters
    telemetry = replace(told(plan, planner), wall_s=wall_s)
    outcome, cluster = settled(planner, planned, telemetry)
    assert not cluster.measured
    assert outcome.latency_s == pytest.approx(planned.plan.latency_s)


def test_measured_rounds_are_predicted_after_three() -> None:
    planner, errors = machines(), []
    for index in range(1, 7):
        planned = planner.plan(index, [11])
        (plan,) = planned.plan.clusters
        telemetry = told(plan, planner, slower=3.0)
        telemetry = replace(telemetry, wall_s=round_s(plan, planner, 3.0, more_s=0.4))
        _, cluster = settled(planner, planned, telemetry)
        errors.append(abs(math.log(plan.latency_s / cluster.latency_s)))
    assert errors[0] > 0.5 and max(errors[3:]) < 0.1
    back = machines()
    back.load(planner.dump())
    assert back.plan(7, [11]).plan == planner.plan(7, [11]).plan


def test_a_loader_of_another_length_than_described_changes_the_steps_of_the_next_plan() -> None:
    planner = machines()
    planned = planner.plan(1, [11])
    (plan,) = planned.plan.clusters
    few = told(plan, planner)
    few = replace(few, reports=tuple(replace(r, steps=3) for r in few.reports))
    settled(planner, planned, few)
    (after,) = planner.plan(2, [11]).plan.clusters
    assert after.local_steps * after.micro_batch_size * after.micro_batches == 24


def test_simulated_clusters_are_priced_in_their_true_world_whatever_this_machine_takes() -> None:
    planner = rounds()
    planner.world = replace(planner.world, truth_error=0.5)
    errors = []
    for index in range(1, 7):
        planned = planner.plan(index, list(NODES))
        done = closed(planned, *NODES.values(), after=weights(1.0))
        outcome = planner.settle(done)
        assert not any(cluster.measured for cluster in outcome.clusters)
        errors.append(abs(math.log(planned.plan.latency_s / outcome.latency_s)))
    # The first plan may use a device whose profile happens to be right: roundings choose.
    assert max(errors[:2]) > 0.02 and max(errors[3:]) < 0.1

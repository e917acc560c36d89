"""Laws of overlap in plans: only where asked for and where it wins, for all policies alike."""

from __future__ import annotations

from dataclasses import replace

import pytest

from collapipe_flwr.core.domain import ClusterPlan, Plan, Snapshot
from collapipe_flwr.core.json_codec import from_json, to_json
from collapipe_flwr.costs.price import price
from collapipe_flwr.costs.work import PricingOptions
from collapipe_flwr.scheduler import overlapping
from collapipe_flwr.scheduler.overlapping import with_overlap
from collapipe_flwr.scheduler.plans import check_cluster_plan
from collapipe_flwr.scheduler.policies import POLICIES, make_scheduler
from collapipe_flwr.scheduler.protocol import SchedulerConfig
from collapipe_flwr.scheduler.remaining import without_lost
from collapipe_flwr.scheduler.replan import ReplanInput, replan
from collapipe_flwr.simulation.episode import Distortion, run_episode, simulated_outcome
from collapipe_flwr.simulation.models import ModelShape
from collapipe_flwr.simulation.world import World, make_world, mixed_devices
from tests.scheduler.test_replicating import SETTINGS as REPLICATED
from tests.scheduler.test_replicating import adapted, first_round, replicated

KINDS = ("raspberry-pi-4", "raspberry-pi-5", "jetson-nano", "phone")
SETTINGS = SchedulerConfig(schedule="1f1b", overlap=True)
MODEL = ModelShape(blocks=6).profile()


def small_world(truth_error: float = 0.0) -> World:
    return make_world(
        cluster_devices=mixed_devices(3, 3, 5, KINDS),
        examples=[200, 200, 60],
        channel="block-fading",
        model=MODEL,
        seed=5,
        truth_error=truth_error,
    )


def planned(policy: str, snapshot: Snapshot, settings: SchedulerConfig) -> Plan:
    scheduler = make_scheduler(policy, settings)
    return scheduler.step(scheduler.init(snapshot), snapshot)[0]


def without_flags(plan: Plan, other: Plan) -> Plan:
    """``plan`` without overlap, as long as ``other`` says."""
    clusters = tuple(
        replace(each, overlap=False, latency_s=before.latency_s)
        for each, before in zip(plan.clusters, other.clusters, strict=True)
    )
    return replace(plan, clusters=clusters, latency_s=other.latency_s)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("policy", POLICIES)
def test_all_policies_get_overlap_and_nothing_else_changes(policy: str, schedule: str) -> None:
    snapshot = small_world().snapshot(1, MODEL)
    settings = replace(SETTINGS, schedule=schedule)
    plain = planned(policy, snapshot, replace(settings, overlap=False))
    plan = planned(policy, snapshot, settings)
    assert not any(cluster.overlap for cluster in plain.clusters)
    assert without_flags(plan, plain) == plain
    assert plan.latency_s == max(cluster.latency_s for cluster in plan.clusters)
    trial = replace(plan, clusters=tuple(replace(c, overlap=True) for c in plan.clusters))
    best = price(trial, snapshot, settings).clusters
    for cluster, before, found in zip(plan.clusters, plain.clusters, best, strict=True):
        check_cluster_plan(cluster, len(MODEL.blocks))
        assert cluster.overlap == (cluster.latency_s < before.latency_s)
        assert cluster.latency_s == pytest.approx(min(found.latency_s, before.latency_s), rel=1e-9)
    priced = price(plan, snapshot, settings)
    assert priced.latency_s == pytest.approx(plan.latency_s, rel=1e-9)
    if any(len(cluster.segments) > 1 for cluster in plan.clusters):
        assert any(cluster.overlap for cluster in plan.clusters)


def test_a_device_alone_gains_nothing_and_has_no_overlap() -> None:
    """It begins when it has all weights, and is collected when it has ended."""
    snapshot = small_world().snapshot(1, MODEL)
    plan = planned("fedavg", snapshot, SETTINGS)
    assert all(len(cluster.device_ids) == 1 for cluster in plan.clusters)
    assert plan == planned("fedavg", snapshot, replace(SETTINGS, overlap=False))


@pytest.mark.parametrize("late_slack", [0.0, 1.2])
@pytest.mark.parametrize("policy", ["dssda", "static", "uniform"])
def test_episodes_with_overlap_cost_what_plans_say(policy: str, late_slack: float) -> None:
    settings = replace(SETTINGS, late_slack=late_slack, edge_shared=True)
    rounds = list(
        run_episode(small_world(), make_scheduler(policy, settings), MODEL, 3, options=settings)
    )
    assert all(any(cluster.overlap for cluster in done.plan.clusters) for done in rounds)
    for done in rounds[: 1 if policy == "static" else 3]:  # whose later plans are old
        for cluster, found in zip(done.plan.clusters, done.priced.clusters, strict=True):
            assert found.latency_s == pytest.approx(cluster.latency_s, rel=1e-9)


def test_stages_as_they_were_measured_explain_a_round_with_overlap() -> None:
    world = small_world(truth_error=0.2)
    believed = Distortion(error=0.2).view(world, MODEL)(described := world.snapshot(1, MODEL))
    plan, truth = planned("uniform", believed, SETTINGS), world.truth(described)
    assert any(cluster.overlap for cluster in plan.clusters)
    priced = price(plan, truth, SETTINGS)
    outcome = simulated_outcome(plan, priced, truth, believed, SETTINGS)
    assert priced.latency_s != pytest.approx(plan.latency_s, rel=1e-3)
    for cluster in outcome.clusters:
        assert cluster.explained_s == pytest.approx(cluster.latency_s, rel=1e-9)


def test_replicas_are_handed_their_weights_in_turn() -> None:
    snapshot, settings = first_round(1, adapted(2)), replace(REPLICATED, overlap=True)
    plain, plan = planned("dssda", snapshot, REPLICATED), planned("dssda", snapshot, settings)
    (cluster,) = replicated(plan)
    assert without_flags(plan, plain) == plain
    assert cluster.overlap == (plan.latency_s < plain.latency_s)
    trial = replace(plain, clusters=(replace(plain.clusters[0], overlap=True),))
    found = price(trial, snapshot, settings).latency_s
    assert plan.latency_s == pytest.approx(min(found, plain.latency_s), rel=1e-9)


def test_more_clusters_than_there_is_time_for_are_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    snapshot = small_world().snapshot(1, MODEL)
    plain = planned("uniform", snapshot, replace(SETTINGS, overlap=False))
    assert with_overlap(plain, snapshot, SETTINGS) != plain
    monkeypatch.setattr(overlapping, "MOST_CLUSTERS", 2)
    assert with_overlap(plain, snapshot, SETTINGS) is plain


def test_a_plan_for_the_devices_that_are_left_keeps_its_overlap() -> None:
    world = small_world()
    plan: ClusterPlan = planned("uniform", world.snapshot(1, MODEL), SETTINGS).clusters[0]
    assert plan.overlap and from_json(ClusterPlan, to_json(plan), "plan") == plan
    options = PricingOptions(schedule="1f1b")
    rest = ReplanInput(
        profile=world.clusters[0], model=MODEL, present=plan.device_ids[1:], options=options
    )
    assert replan(plan, rest).overlap
    everyone = without_lost(plan, replace(rest, present=plan.device_ids))
    assert everyone is not None and everyone.overlap

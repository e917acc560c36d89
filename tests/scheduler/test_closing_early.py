"""Rounds that close without slow clusters: sooner where that pays, as ever where it does not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from collapipe_flwr.core.domain import ClusterSnapshot
from collapipe_flwr.core.errors import ScheduleError
from collapipe_flwr.costs.convergence import compute_join_weight
from collapipe_flwr.costs.price import price
from collapipe_flwr.scheduler.decision import EarlyClosing, compute_closing_s, count_rounds_late
from collapipe_flwr.scheduler.dssda import Dssda
from collapipe_flwr.scheduler.policies import make_scheduler
from collapipe_flwr.scheduler.protocol import SchedulerConfig
from collapipe_flwr.simulation.setting import ModelShape
from tests.worlds import first_round, planned

MODEL = ModelShape(blocks=6).profile()
QUICK, SLOW = ["jetson-orin-nano"] * 3, ["raspberry-pi-4"] * 2
SETTINGS = SchedulerConfig(micro_batch_sizes=(4, 8), micro_batches=(2, 4), bound=False)
CLOSING = replace(SETTINGS, late_slack=1.5)


def test_a_round_closes_with_its_last_cluster_or_a_little_after_the_median() -> None:
    latency = np.array([10.0, 11.0, 14.0, 40.0])
    assert compute_closing_s(latency, 1.5) == 16.5
    assert compute_closing_s(latency[:3], 1.5) == 14.0
    assert compute_closing_s(latency[[0, 3]], 1.5) == 15.0  # of two, the quicker one
    assert count_rounds_late(latency, 1.5).tolist() == [0, 0, 0, 2]
    assert count_rounds_late(np.array([10.0, 10.0, 15.0]), 1.5).tolist() == [0, 0, 0]
    assert compute_join_weight(np.array([0, 3])).tolist() == [1.0, 1.0 / 8.0]


@pytest.mark.parametrize("seed", range(3))
def test_equal_clusters_get_the_plan_that_waits_for_all(seed: int) -> None:
    snapshot = first_round([QUICK, QUICK, QUICK], MODEL, 128, seed)
    assert planned(snapshot, CLOSING) == planned(snapshot, SETTINGS)


@pytest.mark.parametrize("bound", [False, True])
def test_nobody_waits_for_a_cluster_of_slow_boards(bound: bool) -> None:
    snapshot = first_round([QUICK, QUICK, SLOW], MODEL, 128, seed=3)
    settings = replace(SETTINGS, bound=bound)
    whole, early = (planned(snapshot, replace(settings, late_slack=slack)) for slack in (0.0, 1.5))
    assert [c.cluster_id for c in early.clusters] == [c.cluster_id for c in whole.clusters]
    latency = np.array([cluster.latency_s for cluster in early.clusters])
    assert early.latency_s == pytest.approx(compute_closing_s(latency, 1.5))
    assert early.latency_s < whole.latency_s
    late = count_rounds_late(latency, 1.5)
    assert late.tolist()[:2] == [0, 0] and late[2] > 0
    # More rounds, of which each holds less, and yet sooner at the target.
    assert early.rho > whole.rho
    assert early.rho * early.latency_s < whole.rho * whole.latency_s


def test_each_cluster_pays_for_its_energy_as_often_as_it_ends() -> None:
    snapshot = first_round([QUICK, QUICK, SLOW], MODEL, 128, seed=3)
    prices = {c.profile.cluster_id: dict.fromkeys(ids(c), 1.0) for c in snapshot.clusters}
    scheduler = make_scheduler("dssda", SETTINGS)
    state = replace(scheduler.init(snapshot), energy_queue_j=prices)
    whole = Dssda(SETTINGS)._decide(replace(state, weight=1.0), snapshot, 1.0)
    energy_m = whole.planner.price_energy(whole.solution.chain, whole.solution.priced)
    late_m = count_rounds_late(whole.solution.priced.latency_s, 1.5)
    assert late_m[2] > late_m[0] == 0 and (energy_m > 0).all()
    early = EarlyClosing(whole=whole, parts=(whole,), slack=1.5)
    time = whole.planner.latency_price * early.rho * compute_closing_s(early.latency_m, 1.5)
    assert early.objective - time == pytest.approx(
        energy_m[0] + energy_m[1] + energy_m[2] / (1 + late_m[2]), rel=1e-6
    )


def ids(cluster: ClusterSnapshot) -> list[str]:
    return [device.device_id for device in cluster.profile.members]


def test_the_parts_share_bandwidth_and_the_edge_and_cost_what_the_cost_model_says() -> None:
    snapshot = first_round([QUICK, QUICK, SLOW], MODEL, 128, seed=3)
    plan = planned(snapshot, CLOSING)
    total_hz = sum(cluster.bandwidth_hz for cluster in plan.clusters)
    assert total_hz <= snapshot.radio.bandwidth_hz * (1.0 + 1e-9)
    priced = price(plan, snapshot, SETTINGS)
    for ours, theirs in zip(plan.clusters, priced.clusters, strict=True):
        assert ours.latency_s == pytest.approx(theirs.latency_s)
        assert dict(ours.energy_j) == pytest.approx(dict(theirs.energy_j))
        assert dict(ours.memory_bytes) == dict(theirs.memory_bytes)


def test_a_slack_below_one_is_refused() -> None:
    with pytest.raises(ScheduleError, match=r"late-slack must be 0 or >= 1, got 0\.5"):
        replace(SETTINGS, late_slack=0.5)


@pytest.mark.parametrize("slack", [0.0, 1.5])
def test_a_plan_that_is_repeated_takes_as_long_as_the_clusters_that_are_left(slack: float) -> None:
    snapshot = first_round([QUICK, QUICK, SLOW], MODEL, 128, seed=3)
    scheduler = make_scheduler("static", replace(SETTINGS, late_slack=slack))
    first, state = scheduler.step(scheduler.init(snapshot), snapshot)
    same, state = scheduler.step(state, snapshot)
    assert same == first
    for names in ("cluster-1", "cluster-2"), ("cluster-1",):
        left = tuple(c for c in snapshot.clusters if c.profile.cluster_id in names)
        plan, state = scheduler.step(state, replace(snapshot, clusters=left))
        assert plan.clusters == tuple(c for c in first.clusters if c.cluster_id in names)
        latency = np.array([cluster.latency_s for cluster in plan.clusters])
        assert plan.latency_s == (compute_closing_s(latency, slack) if slack else latency.max())

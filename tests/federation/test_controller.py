"""The strategy's planners and the simulation run one loop of rounds."""

from __future__ import annotations

from dataclasses import replace

import pytest
from flwr.app import ArrayRecord

from collapipe_flwr.federation.planner import (
    KnownClusters,
)
from collapipe_flwr.federation.planning import Planning
from collapipe_flwr.federation.round import ClosedRound
from collapipe_flwr.scheduler.controller import RoundController
from collapipe_flwr.scheduler.policies import make_scheduler
from collapipe_flwr.scheduler.protocol import SchedulerConfig
from collapipe_flwr.simulation.episode import run_episode
from collapipe_flwr.simulation.world import EnergyBudget, make_world
from tests.federation.test_planner import MODEL, NODES

EMPTY = ArrayRecord()
SETTINGS = SchedulerConfig(micro_batch_sizes=(4,), micro_batches=(2, 4))
BUDGET = EnergyBudget(joule=0.5)


def a_world(truth_error: float = 0.3):
    return make_world(
        cluster_devices=[["raspberry-pi-5", "jetson-nano", "raspberry-pi-4"]] * 2,
        examples=[64, 32],
        channel="block-fading",
        seed=7,
        budget=BUDGET,
        truth_error=truth_error,
    )


@pytest.mark.parametrize("policy", ["dssda", "uniform"])
def test_simulated_clusters_of_a_run_are_planned_and_taught_as_in_a_simulation(policy: str) -> None:
    world = a_world()
    planner = KnownClusters(
        Planning(policy=policy, settings=SETTINGS, budget=BUDGET), world, MODEL, NODES
    )
    episode = run_episode(world, make_scheduler(policy, SETTINGS), MODEL, 3, options=SETTINGS)
    for done in episode:
        planned = planner.plan(done.plan.round_index, [11, 12])
        assert planned.plan == done.plan
        closed = ClosedRound(
            plan=planned, before=EMPTY, models=dict.fromkeys(NODES.values(), EMPTY)
        )
        outcome = planner.settle(closed)
        assert outcome == done.outcome
        assert planner.controller.state == done.state
        if done.plan.round_index == 1:  # what is true was not learnt yet
            assert outcome.latency_s != pytest.approx(done.plan.latency_s, rel=0.01)


def test_a_round_that_is_planned_again_forgets_the_plan_before() -> None:
    world, model = a_world(), MODEL
    once, twice = (RoundController(make_scheduler("dssda", SETTINGS), SETTINGS) for _ in range(2))
    snapshot = world.snapshot(1, model)
    fewer = replace(snapshot, clusters=snapshot.clusters[:1])
    twice.plan(fewer)
    assert once.plan(snapshot) == twice.plan(snapshot)
    assert once.state == twice.state
    before = once.state
    once.look_ahead(world.snapshot(2, model))
    assert once.state == before

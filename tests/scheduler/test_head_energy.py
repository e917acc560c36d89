"""What a device spends as the edge is part of plans, queues and choices, as that of any device."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from collapipe_flwr.core.domain import ClusterPlan, Plan, Snapshot
from collapipe_flwr.costs.price import price, set_planned_rates
from collapipe_flwr.scheduler.dssda import price_heads
from collapipe_flwr.scheduler.policies import make_scheduler
from collapipe_flwr.scheduler.protocol import SchedulerConfig, SchedulerState
from collapipe_flwr.scheduler.replan import ReplanInput, replan
from collapipe_flwr.simulation.setting import ModelShape
from collapipe_flwr.simulation.world import EnergyBudget, make_world
from tests.worlds import simulated_outcome

MODEL = ModelShape(blocks=3, decoder_blocks=2, width=64, tokens=16, wire_bytes=4).profile()
SETTINGS = SchedulerConfig(micro_batch_sizes=(4,), micro_batches=(2,))
BUDGET_J = 0.2


def planned() -> tuple[Plan, Snapshot, SchedulerState]:
    """A plan of a cluster whose last device is the edge; all have small budgets."""
    world = make_world(
        cluster_devices=[["raspberry-pi-5", "raspberry-pi-4", "raspberry-pi-4", "jetson-nano"]],
        examples=[40],
        budget=EnergyBudget(joule=BUDGET_J),
    )
    (cluster,) = world.clusters
    world = world.with_cluster(replace(cluster, edge=cluster.devices[-1].as_edge))
    snapshot = world.snapshot(1, MODEL)
    scheduler = make_scheduler("dssda", SETTINGS)
    plan, state = scheduler.step(scheduler.init(snapshot), snapshot)
    return set_planned_rates(plan, snapshot), snapshot, state


def computing_j(plan: ClusterPlan, per_flop_j: float) -> float:
    """Of the head's passes in a round."""
    examples = plan.local_steps * plan.micro_batches * plan.micro_batch_size
    return per_flop_j * examples * (MODEL.decoder.forward_flop + MODEL.decoder.backward_flop)


def test_the_head_costs_its_device_computing_and_sending_of_gradients() -> None:
    plan, snapshot, _ = planned()
    (cluster,), (part,) = snapshot.clusters, plan.clusters
    edge = cluster.profile.edge
    assert edge is not None and edge.device_id not in part.device_ids
    updates_flop = part.local_steps * 3.0 * MODEL.decoder.parameter_bytes
    expected_j = computing_j(part, edge.energy_per_flop_j) + edge.energy_per_flop_j * updates_flop
    back = part.hops[-1].backward_bit_per_s
    assert back is not None
    bits = 8.0 * part.micro_batch_size * MODEL.blocks[-1].output_bytes
    expected_j += part.local_steps * part.micro_batches * edge.tx_power_w * bits / back
    assert part.energy_j[edge.device_id] == pytest.approx(expected_j)
    priced = price(plan, snapshot, SETTINGS).clusters[0].energy_j
    assert priced[edge.device_id] == pytest.approx(expected_j)


def test_an_edge_that_is_no_member_has_no_joules() -> None:
    plan, snapshot, _ = planned()
    (cluster,) = snapshot.clusters
    profile = replace(cluster.profile, edge=replace(cluster.profile.edge, device_id=""))
    other = replace(snapshot, clusters=(replace(cluster, profile=profile),))
    known = {member.device_id for member in profile.members}
    assert price(plan, other, SETTINGS).clusters[0].energy_j.keys() == known


def test_it_counts_against_the_budget_of_the_device_and_is_priced_where_edges_are_chosen() -> None:
    plan, snapshot, state = planned()
    (cluster,), (part,) = snapshot.clusters, plan.clusters
    name, cluster_id = cluster.profile.edge_device, part.cluster_id
    assert cluster.profile.budgets_j[name] == BUDGET_J
    outcome = simulated_outcome(plan, price(plan, snapshot, SETTINGS), snapshot, snapshot, SETTINGS)
    scheduler = make_scheduler("dssda", SETTINGS)
    before = replace(state, energy_queue_j={}, placeholder_j={})
    assert price_heads(plan, snapshot, before) == 0.0
    after = scheduler.observe(before, plan, outcome)
    queue_j = after.energy_queue_j[cluster_id][name]
    spent_j = part.energy_j[name] - SETTINGS.aim_share(before.rounds) * BUDGET_J
    assert spent_j > 0 and queue_j == pytest.approx(spent_j)
    assert price_heads(plan, snapshot, after) > 0
    free = replace(cluster.profile.edge, energy_budget_j=math.inf)
    endless = replace(cluster, profile=replace(cluster.profile, edge=free))
    assert price_heads(plan, replace(snapshot, clusters=(endless,)), after) == 0.0


def test_a_new_plan_within_a_round_counts_the_head() -> None:
    plan, snapshot, _ = planned()
    (cluster,), (part,) = snapshot.clusters, plan.clusters
    rest = ReplanInput(profile=cluster.profile, model=MODEL, present=part.device_ids[:1])
    again, edge = replan(part, rest), cluster.profile.edge
    assert edge is not None
    head_j = computing_j(part, edge.energy_per_flop_j)
    assert again.energy_j[edge.device_id] == pytest.approx(head_j)
    unit = cluster.profile.control_unit
    home = replace(cluster.profile, edge=unit.as_edge)
    both = replan(part, replace(rest, profile=home)).energy_j[unit.device_id]
    head_j = computing_j(part, unit.energy_per_flop_j)
    assert both == pytest.approx(again.energy_j[unit.device_id] + head_j)

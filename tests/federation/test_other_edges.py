"""Clusters with several edges: each is planned with as what it is, and left out while lost."""

from __future__ import annotations

from dataclasses import replace

import pytest

from collapipe_flwr.core.domain import EdgeProfile
from collapipe_flwr.core.errors import ProtocolError
from collapipe_flwr.core.outcome import RoundOutcome
from collapipe_flwr.costs.measured import compute_pass_s, count_stage_parts
from collapipe_flwr.federation import border
from collapipe_flwr.federation.planner import (
    KnownClusters,
)
from collapipe_flwr.federation.planning import Planning
from tests.federation.test_outcomes import EXAMPLES, NAME, STEPS, told
from tests.federation.test_planner import MODEL, closed, rounds, weights

NEAR, FAR = "near", "far"


def edge(name: str, **more: object) -> EdgeProfile:
    usual = {"speed_flop_per_s": 1e10, "memory_bytes": 2**33, "tx_power_w": 1.0, "name": name}
    return EdgeProfile(**{**usual, "id": name, **more})


def machines(policy: str, *edges: EdgeProfile) -> KnownClusters:
    """A planner whose first cluster is of machines that have these edges to choose from."""
    planner = rounds(policy)
    first, *others = planner.world.clusters
    one, *more = edges
    first = replace(first, real_links=True, edge=one, other_edges=tuple(more))
    planner.world = replace(planner.world, clusters=(first, *others))
    return planner


def settle(planner: KnownClusters, planned, slower: float = 1.0, **changes: object) -> RoundOutcome:
    """A round in which the edge was so many times slower than it claims."""
    plan = planned.cluster_plan(11)
    measured = told(replace(plan, edge=""), planner, slower=1.0)
    used = next(e for e in planner.world.clusters[0].edges if e.id == plan.edge)
    passes, flop = count_stage_parts(plan, MODEL)[plan.edge]
    each_s = slower * compute_pass_s(
        used, passes, flop * measured.examples / measured.edge.micro_batches
    )
    busy_s = STEPS * plan.micro_batches * each_s
    measured = replace(
        measured, edge=replace(measured.edge, forward_s=busy_s / 3, backward_s=busy_s * 2 / 3)
    )
    done = closed(planned, NAME, after=weights(0.5))
    return planner.settle(replace(done, telemetry={NAME: replace(measured, **changes)}))


@pytest.mark.parametrize("policy", ["uniform", "fedavg", "splitfed"])
def test_rules_plan_with_the_first_edge(policy: str) -> None:
    planner = machines(policy, edge(NEAR), edge(FAR))
    planned = planner.plan(1, [11, 12])
    assert planned.cluster_plan(11).edge == NEAR
    assert planned.cluster_plan(12).edge == ""


def test_an_edge_that_was_lost_is_left_out_and_tried_again() -> None:
    planner = machines("uniform", edge(NEAR), edge(FAR))
    planned = planner.plan(1, [11])
    moved = replace(planned.cluster_plan(11), edge=FAR)
    settle(planner, planned, replanned=moved, lost=(NEAR,), quarantined={NEAR: "no answer"})
    edges = []
    for number in range(2, 6):
        planned = planner.plan(number, [11])
        edges.append(planned.cluster_plan(11).edge)
        settle(planner, planned)
    assert edges == [FAR, FAR, NEAR, NEAR]


def test_edges_are_never_all_left_out() -> None:
    planner = machines("uniform", edge(NEAR), edge(FAR))
    settle(planner, planner.plan(1, [11]), quarantined={NEAR: "dead", FAR: "dead"})
    assert planner.plan(2, [11]).cluster_plan(11).edge == NEAR


def test_what_one_edge_shows_is_believed_of_no_other() -> None:
    planner = machines("uniform", edge(NEAR), edge(FAR))
    for number in range(1, 4):
        settle(planner, planner.plan(number, [11]), slower=4.0)
    known = planner.controller.state.beliefs
    assert NEAR in known.stages[NAME] and FAR not in known.stages[NAME]
    assert {"", FAR}.isdisjoint(known.stages[NAME])
    per_flop_s = known.stages[NAME][NEAR].values[1]
    assert per_flop_s == pytest.approx(4.0 / 1e10, rel=0.3)


def test_a_device_that_is_the_edge_holds_no_blocks_and_else_may() -> None:
    named = edge("d2", device_id=f"{NAME}/d2")
    planner = machines("uniform", named, edge(FAR))
    assert planner.plan(1, [11]).cluster_plan(11).device_ids == (f"{NAME}/d1",)
    planner = machines("uniform", edge(FAR), named)
    assert f"{NAME}/d2" in planner.plan(1, [11]).cluster_plan(11).device_ids


def test_a_member_that_computes_the_head_spends_joules_for_it() -> None:
    for member in ("d2", "control-unit"):
        name = f"{NAME}/{member}"
        spent_j = []
        for device_id in ("", name):
            place = edge(member, device_id=device_id, energy_per_flop_j=1e-9)
            planner = machines("uniform", place, edge(FAR))
            planned = planner.plan(1, [11])
            outcome = settle(planner, planned)
            spent_j.append(outcome.clusters[0].energy_j[name])
        plan = planned.cluster_plan(11)
        passes, flop = count_stage_parts(plan, MODEL)[plan.edge]
        del passes
        head_j = 1e-9 * flop * EXAMPLES + 0.25 * place.tx_power_w
        own_j = spent_j[0] if member == "control-unit" else 0.0
        assert spent_j[1] == pytest.approx(own_j + head_j)


def test_labels_at_home_leave_no_choice() -> None:
    planner = machines("uniform", edge(NEAR), edge(FAR))
    profile = Planning(labels_at_home=True).described(planner.world.clusters[0], MODEL)
    assert [e.name for e in profile.edges] == [profile.control_unit.device_id]
    assert profile.edge_id == ""


@pytest.mark.parametrize(
    ("edges", "devices"),
    [
        ((edge(NEAR), edge(NEAR)), 2),
        ((edge(""), edge(NEAR)), 2),
        ((edge(f"{NAME}/d1"), edge(NEAR)), 2),
        ((edge(NEAR, device_id=f"{NAME}/d1"), edge(FAR, device_id=f"{NAME}/d1")), 1),
    ],
)
def test_edges_that_cannot_be_told_apart_or_leave_no_device_are_refused(edges, devices) -> None:
    profile = machines("uniform", *edges).world.clusters[0]
    with pytest.raises(ProtocolError, match=r"several edges|no device"):
        border._check_profile(replace(profile, devices=profile.devices[:devices]))

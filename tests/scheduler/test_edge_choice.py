"""DSSDA among several edges: never worse than everybody's first, and near the best assignment."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from collapipe_flwr.core.domain import ClusterProfile, EdgeProfile, Snapshot
from collapipe_flwr.core.errors import InfeasibleError
from collapipe_flwr.scheduler.dssda import Dssda
from collapipe_flwr.scheduler.edges import EdgeChoice, choose_edges, map_edges
from collapipe_flwr.scheduler.policies import make_scheduler
from collapipe_flwr.scheduler.protocol import SchedulerConfig
from collapipe_flwr.simulation.setting import ModelShape
from collapipe_flwr.simulation.world import World, make_world, mixed_devices
from tests.worlds import BOARDS, planned

ONE = SchedulerConfig(micro_batch_sizes=(4,), micro_batches=(4,))
MODEL = ModelShape(blocks=3, width=256).profile()
ROOM = 8 * 2**30


def machine(name: str, speed: float, memory_bytes: int = ROOM) -> EdgeProfile:
    return EdgeProfile(
        id=name, name=name, speed_flop_per_s=speed, memory_bytes=memory_bytes, tx_power_w=1.0
    )


def member(cluster: ClusterProfile, place: int) -> EdgeProfile:
    """The cluster's control unit or a device as edge."""
    own = cluster.members[place]
    return replace(
        machine(f"member-{place}", own.speed_flop_per_s, own.memory_bytes),
        name=own.device_id,
        device_id=own.device_id,
    )


def with_edges(world: World, *edges: EdgeProfile) -> World:
    first, *others = edges
    clusters = (replace(c, edge=first, other_edges=tuple(others)) for c in world.clusters)
    return replace(world, clusters=tuple(clusters))


def plain_world(clusters: int, seed: int = 0, devices: int = 2) -> World:
    drawn = mixed_devices(clusters, devices, seed, BOARDS)
    return make_world(cluster_devices=drawn, examples=[200] * clusters, seed=seed)


def drawn_world(clusters: int, seed: int) -> World:
    """Clusters whose edge may be a machine, of one or two that all share, or a member."""
    world = plain_world(clusters, seed)
    rng = np.random.default_rng([seed, 47])
    speeds = 10.0 ** rng.uniform(8.5, 11.0, size=2)
    machines = [machine(f"m{n}", float(speed)) for n, speed in enumerate(speeds)]
    found = []
    for cluster in world.clusters:
        own = [*machines[: 1 + rng.integers(2)], member(cluster, 0), member(cluster, 1)]
        one, *others = (own[k] for k in rng.permutation(len(own)))
        found.append(replace(cluster, edge=one, other_edges=tuple(others)))
    return replace(world, clusters=tuple(found))


def costs(world: World, policy: str) -> tuple[float, float, float, int]:
    """Of the choice, of everybody's first edge and of the best assignment; plans for the choice."""
    scheduler = make_scheduler("dssda", ONE)
    assert isinstance(scheduler, Dssda)
    snapshot = world.snapshot(1, MODEL)
    step = scheduler._step if policy == "dssda" else make_scheduler(policy, ONE).step
    choice = EdgeChoice(snapshot, scheduler.init(snapshot), ONE, step)
    plan, _ = choice.choose(scheduler._price_plan)
    planned, chosen = len(choice._trials) + len(choice._refusals), choice._find_edges(plan)
    for assignment in product(*(range(len(edges)) for edges in choice._eliminate_edges)):
        choice._try(assignment, scheduler._price_plan)
    every = {assignment: trial.cost for assignment, trial in choice._trials.items()}
    first = every.get((0,) * len(world.clusters), np.inf)
    return every[chosen], first, min(every.values()), planned


@pytest.mark.parametrize("policy", ["throughput", pytest.param("dssda", marks=pytest.mark.slow)])
@pytest.mark.parametrize("seed", range(6))
def test_the_choice_is_no_worse_than_everybodys_first_and_near_the_best(
    seed: int, policy: str
) -> None:
    found, first, best, planned = costs(drawn_world(2, seed), policy)
    assert found <= first
    assert found <= 1.02 * best
    assert planned <= 5


def chosen_by(world: World) -> dict[str, str]:
    """The edges that are chosen for plans that a rule makes, which is quick."""
    rule, scheduler = make_scheduler("throughput", ONE), make_scheduler("dssda", ONE)
    snapshot = world.snapshot(1, MODEL)
    choice = EdgeChoice(snapshot, scheduler.init(snapshot), ONE, rule.step)
    return map_edges(choice.choose(scheduler._price_plan)[0])


def test_clusters_do_not_crowd_on_an_edge_where_there_is_another() -> None:
    edges = (machine("m0", 2e8), machine("m1", 1.9e8))
    assert set(chosen_by(with_edges(plain_world(2), *edges)).values()) == {"m0", "m1"}


@pytest.mark.parametrize("clusters", [2, 5])
def test_clusters_share_the_only_edge_that_is_worth_it(clusters: int) -> None:
    edges = (machine("slow", 1e7), machine("fast", 1e11))
    assert set(chosen_by(with_edges(plain_world(clusters), *edges)).values()) == {"fast"}


def test_an_edge_without_room_is_not_chosen_however_fast() -> None:
    edges = (machine("full", 1e13, 2**10), machine("slow", 1e9))
    assert set(chosen_by(with_edges(plain_world(2), *edges)).values()) == {"slow"}
    full = with_edges(plain_world(2), machine("full", 1e13, 2**10), machine("too", 1e9, 2**10))
    with pytest.raises(InfeasibleError, match="no layout that fits"):
        chosen_by(full)


def test_clusters_spread_where_no_edge_has_room_for_all() -> None:
    edges = (machine("m0", 1e10, 300 * 2**20), machine("m1", 1e9, 300 * 2**20))
    assert set(chosen_by(with_edges(plain_world(2), *edges)).values()) == {"m0", "m1"}


def test_a_device_that_is_chosen_holds_no_blocks() -> None:
    world = plain_world(1)
    cluster = world.clusters[0]
    world = with_edges(world, machine("slow", 1e6), member(cluster, 2))
    snapshot = world.snapshot(1, MODEL)
    (plan,) = planned(snapshot, ONE).clusters
    assert plan.edge == "member-2"
    assert cluster.members[2].device_id not in plan.device_ids


def test_without_a_choice_nothing_is_copied() -> None:
    snapshot = plain_world(2).snapshot(1, MODEL)
    assert choose_edges(snapshot, {"cluster-0": "m1"}, {}) is snapshot


def with_slow(snapshot: Snapshot, name: str, by: float) -> Snapshot:
    """As if an edge claimed to be so many times slower."""

    def slow(edge: EdgeProfile) -> EdgeProfile:
        speed = edge.speed_flop_per_s / (by if edge.id == name else 1.0)
        return replace(edge, speed_flop_per_s=speed)

    clusters = []
    for each in snapshot.clusters:
        one, *others = map(slow, each.profile.edges)
        profile = replace(each.profile, edge=one, other_edges=tuple(others))
        clusters.append(replace(each, profile=profile))
    return replace(snapshot, clusters=tuple(clusters))


def test_clusters_leave_an_edge_that_became_slow_and_no_round_plans_more_than_two() -> None:
    world = with_edges(
        plain_world(2), machine("m0", 3e10), machine("m1", 2e10), machine("m2", 1e10)
    )
    rule, scheduler = make_scheduler("throughput", ONE), make_scheduler("dssda", ONE)
    state = scheduler.init(world.snapshot(1, MODEL))
    edges = []
    for number in range(1, 4):
        snapshot = world.snapshot(number, MODEL)
        snapshot = with_slow(snapshot, "m0", 1e4) if number > 1 else snapshot
        choice = EdgeChoice(snapshot, state, ONE, rule.step)
        plan, state = choice.choose(scheduler._price_plan)
        edges.append(set(map_edges(plan).values()))
        assert number == 1 or len(choice._trials) <= 2
    assert "m0" in edges[0]
    assert "m0" not in edges[-1]

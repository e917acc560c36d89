"""A cluster that cannot be planned sits out and is told why; the others' bits stay the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from collapipe_flwr.config.parsing import declared_config
from collapipe_flwr.config.schema import parse
from collapipe_flwr.core.domain import ClusterProfile
from collapipe_flwr.core.errors import InfeasibleError
from collapipe_flwr.federation.arrays import encode_tensors
from collapipe_flwr.federation.local_grid import LocalGrid
from collapipe_flwr.federation.planner import (
    KnownClusters,
)
from collapipe_flwr.federation.planning import Planning
from collapipe_flwr.federation.round import RoundPlan
from collapipe_flwr.federation.run.run_strategy import make_planner
from collapipe_flwr.scheduler.protocol import SchedulerConfig
from collapipe_flwr.scheduler.rules import RULES
from collapipe_flwr.simulation.world import make_world, with_edge_at_home
from tests.federation.split_clusters import FixedPlanner, model, trainer, wrapped
from tests.federation.test_planner import MODEL, closed, weights

PROJECT = Path(__file__).parents[2]
NODES = {11: "cluster-0", 12: "cluster-1", 13: "cluster-2"}
SETTINGS = SchedulerConfig(micro_batch_sizes=(4,), micro_batches=(2,), schedule="gpipe")
Change = Callable[[ClusterProfile], ClusterProfile]


def with_memory(size: int, *names: str) -> Change:
    """Leave so many bytes to these members."""

    def change(profile: ClusterProfile) -> ClusterProfile:
        return profile.with_members(
            lambda m: replace(m, memory_bytes=size) if m.device_id.endswith(names) else m
        )

    return change


def trusting(blocks: int, *names: str) -> Change:
    def change(profile: ClusterProfile) -> ClusterProfile:
        return replace(profile, trusted_blocks=blocks).with_members(
            lambda m: replace(m, trusted=m.device_id.endswith(names))
        )

    return change


def on_edges(*sizes: int) -> Change:
    """Name edges with so many bytes."""

    def change(profile: ClusterProfile) -> ClusterProfile:
        like = profile.control_unit.as_edge
        first, *others = (
            replace(like, id=f"e{n}", name=f"e{n}", device_id="", memory_bytes=size)
            for n, size in enumerate(sizes)
        )
        return replace(profile, edge=first, other_edges=tuple(others))

    return change


def sharing(profile: ClusterProfile) -> ClusterProfile:
    """Name an edge that has room for two clusters."""
    edge = replace(profile.control_unit.as_edge, name="shared", device_id="")
    return replace(profile, edge=replace(edge, memory_bytes=2_600_000))


FAULTS: Mapping[str, tuple[Change, str]] = {
    "no trusted device": (trusting(1), "no trusted device is there"),
    "more blocks than the trusted have room for": (
        lambda profile: trusting(3, "d1")(with_memory(1_500_000, "d1")(profile)),
        "trust cluster-1/d2, too, or set privacy.trusted-blocks to 1 at most",
    ),
    "labels where there is no room for the head": (
        lambda profile: with_edge_at_home(with_memory(1000, "control-unit")(profile)),
        "for plans",
    ),
    "tiny devices": (with_memory(1, "d1", "d2"), "add a device"),
    "a tiny control unit": (with_memory(1, "control-unit"), "the control unit needs"),
    "an edge without room": (on_edges(1000), "the edge"),
    "several edges without room": (on_edges(1000, 2000), "the edge"),
}


def planner_of(policy: str, changes: Mapping[str, Change] | None = None) -> KnownClusters:
    """Three clusters, some of which are changed."""
    world = make_world(
        cluster_devices=[["raspberry-pi-5", "jetson-nano", "raspberry-pi-4"]] * 3,
        examples=[64, 32, 48],
        channel="block-fading",
        seed=5,
    )
    clusters = (
        (changes or {}).get(each.cluster_id, lambda same: same)(each) for each in world.clusters
    )
    world = replace(world, clusters=tuple(clusters))
    return KnownClusters(Planning(policy=policy, settings=SETTINGS), world, MODEL, NODES)


def settled(planner: KnownClusters, planned: RoundPlan) -> KnownClusters:
    names = [plan.cluster_id for plan in planned.plan.clusters]
    planner.settle(closed(planned, *names, after=weights(1.0)))
    return planner


@pytest.mark.parametrize(
    ("fault", "policy"),
    [*((fault, "dssda") for fault in FAULTS), *(("tiny devices", rule) for rule in RULES)],
)
def test_one_cluster_that_no_plan_fits_changes_nothing_for_the_others(
    fault: str, policy: str
) -> None:
    change, words = FAULTS[fault]
    beside, without = (planner_of(policy, {"cluster-1": change}) for _ in range(2))
    for server_round in (1, 2):
        planned = beside.plan(server_round, list(NODES))
        honest = without.plan(server_round, [11, 13])
        assert planned.plan.clusters == honest.plan.clusters
        assert planned.plan.fallback is None
        assert not planned.takes_part(12) and planned.left_out.keys() == {"cluster-1"}
        sentence = planned.left_out["cluster-1"]
        assert "cluster-1" in sentence and sentence.isprintable()
        assert words in sentence or policy != "dssda"
        settled(beside, planned)
        settled(without, honest)
        assert beside.controller.state == without.controller.state


@pytest.mark.parametrize("policy", ["dssda", "static"])
def test_one_that_joins_later_takes_no_new_plan_from_the_others(policy: str) -> None:
    beside, without = (
        planner_of(policy, {"cluster-1": with_memory(1, "d1", "d2")}) for _ in range(2)
    )
    for planner in (beside, without):
        settled(planner, planner.plan(1, [11, 13]))
    planned, honest = beside.plan(2, list(NODES)), without.plan(2, [11, 13])
    assert planned.plan.clusters == honest.plan.clusters and planned.plan.fallback is None
    assert planned.left_out.keys() == {"cluster-1"}


def test_of_clusters_that_have_no_room_together_those_that_were_there_go_on() -> None:
    changes = dict.fromkeys(NODES.values(), sharing)
    with pytest.raises(InfeasibleError, match="the edge, for each cluster"):
        planner_of("dssda", changes).plan(1, list(NODES))
    planner = planner_of("dssda", changes)
    settled(planner, planner.plan(1, [11, 13]))
    planned = planner.plan(2, list(NODES))
    assert [plan.cluster_id for plan in planned.plan.clusters] == ["cluster-0", "cluster-2"]
    assert planned.plan.fallback is None
    assert "beside the others" in planned.left_out["cluster-1"]


@pytest.mark.parametrize("policy", ["dssda", "uniform"])
def test_where_nobody_is_left_the_reason_of_one_is_raised(policy: str) -> None:
    changes = dict.fromkeys(NODES.values(), trusting(2))
    with pytest.raises(InfeasibleError, match=r"cluster-0.*no trusted device is there"):
        planner_of(policy, changes).plan(1, list(NODES))


def test_the_round_tells_why_and_has_the_bits_of_one_without_it() -> None:
    class LeavingOut(FixedPlanner):
        def plan(self, server_round: int, nodes: list[int]) -> RoundPlan:
            planned = super().plan(server_round, nodes)
            return replace(planned, left_out={"c3": "it has no room"} if 3 in nodes else {})

    def run(*nodes: int) -> tuple[dict[str, bytes], list]:
        records: list = []
        grid = LocalGrid({node: trainer(0.1 * node, 10 * node) for node in nodes})
        strategy = wrapped(LeavingOut("c1", "c2"), records)
        arrays = strategy.start(grid, encode_tensors(model()), num_rounds=2).arrays
        return {key: array.data for key, array in arrays.items()}, records

    (found, records), (expected, _) = run(1, 2, 3), run(1, 2)
    assert found == expected
    for record in records:
        assert record.failures == {"c3": "it has no room"}
        assert "c3" not in record.asked and "c3: it has no room" in str(record)


@pytest.mark.parametrize("machines", [False, True])
def test_a_run_begins_without_machines_that_cannot_be_planned_but_not_without_its_own_clusters(
    machines: bool,
) -> None:
    change = with_memory(1, "d1", "d2")
    profiles = planner_of("dssda", {"cluster-1": change}).world.clusters
    clusters = {
        node: replace(profile, real_links=machines)
        for node, profile in zip(NODES, profiles, strict=True)
    }
    config = parse({**declared_config(PROJECT), "scheduler.policy": "memory"})
    with pytest.raises(InfeasibleError, match=r"cluster-1.*larger devices") as refused:
        make_planner(config, MODEL, clusters, NODES)
    assert ("world.memory-share" in str(refused.value)) != machines
    if not machines:
        with pytest.raises(InfeasibleError, match="cluster-1"):
            make_planner(config, MODEL, clusters, NODES, leaves_out=True)
        return
    planner = make_planner(config, MODEL, clusters, NODES, leaves_out=True)
    assert planner.plan(1, list(NODES)).left_out.keys() == {"cluster-1"}

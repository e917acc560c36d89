"""The reference latency is a scale for all rounds, whatever was away in the first."""

from __future__ import annotations

from dataclasses import replace

import pytest

from collapipe_flwr.core.domain import Snapshot
from collapipe_flwr.core.outcome import ClusterOutcome, RoundOutcome
from collapipe_flwr.costs.price import price
from collapipe_flwr.scheduler.base import make_initial_state
from collapipe_flwr.scheduler.policies import make_scheduler
from collapipe_flwr.scheduler.protocol import SchedulerConfig, SchedulerState, require_reference
from tests.worlds import draw_world

SETTINGS = SchedulerConfig(micro_batch_sizes=(4,), micro_batches=(4,))


def without(snapshot: Snapshot, *ends: tuple[int, int]) -> Snapshot:
    """Links of the first cluster gone, by members; -1 is the edge."""
    cluster, *others = snapshot.clusters
    gains = [list(row) for row in cluster.channel.d2d_gain]
    edge = list(cluster.channel.edge_gain)
    for one, other in ends:
        if other < 0:
            edge[one] = 0.0
        else:
            gains[one][other] = gains[other][one] = 0.0
    channel = replace(
        cluster.channel, d2d_gain=tuple(tuple(row) for row in gains), edge_gain=tuple(edge)
    )
    return replace(snapshot, clusters=(replace(cluster, channel=channel), *others))


def reference_s(state: SchedulerState) -> float:
    return require_reference(state).latency_s


@pytest.mark.parametrize("seed", range(3))
def test_dead_links_of_the_first_snapshot_leave_the_reference_as_it_is(seed: int) -> None:
    world, model = draw_world(seed)
    snapshot = world.snapshot(1, model)
    usual = make_initial_state(snapshot, SETTINGS)
    members = range(len(snapshot.clusters[0].profile.members))
    every = [(i, j) for i in members for j in (*members, -1) if i != j]
    for gone in (*([pair] for pair in every), every):
        hit = make_initial_state(without(snapshot, *gone), SETTINGS)
        assert reference_s(hit) == pytest.approx(reference_s(usual), rel=0.9)
        assert require_reference(hit).micro_batches == require_reference(usual).micro_batches


def test_rounds_are_as_short_after_a_dead_link_as_without_where_no_budget_can_be_kept() -> None:
    world, model = draw_world(1)
    clusters = tuple(
        c.with_members(lambda member: replace(member, energy_budget_j=1e-6)) for c in world.clusters
    )
    world = replace(world, clusters=clusters)

    def latencies(first: Snapshot) -> list[float]:
        scheduler = make_scheduler("dssda", SETTINGS)
        state, found = scheduler.init(first), []
        for index in range(1, 4):
            snapshot = first if index == 1 else world.snapshot(index, model)
            plan, state = scheduler.step(state, snapshot)
            priced = price(plan, snapshot, SETTINGS)
            told = tuple(
                ClusterOutcome(cluster_id=c.cluster_id, latency_s=c.latency_s, energy_j=c.energy_j)
                for c in priced.clusters
            )
            outcome = RoundOutcome(round_index=index, latency_s=priced.latency_s, clusters=told)
            state = scheduler.observe(state, plan, outcome)
            found.append(priced.latency_s)
        return found[1:]

    snapshot = world.snapshot(1, model)
    usual, hit = latencies(snapshot), latencies(without(snapshot, (1, -1), (0, 1)))
    assert max(hit) < 2 * max(usual)

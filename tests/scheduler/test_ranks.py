"""Law: every cluster is planned and priced with the model that it trains."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace

import numpy as np
import pytest

from benchmarks.scheduling.search_gaps import SearchSize, search_planner
from collapipe_flwr.core.domain import BlockCost, ModelProfile, Plan, Snapshot
from collapipe_flwr.core.errors import InfeasibleError
from collapipe_flwr.costs.layouts import Layouts, stack_layouts
from collapipe_flwr.costs.price import price
from collapipe_flwr.costs.tables import FEW_CLUSTERS, tabulate
from collapipe_flwr.costs.work import PricingOptions
from collapipe_flwr.scheduler.cheapest_rows import cheapest_rows
from collapipe_flwr.scheduler.controller import RoundController
from collapipe_flwr.scheduler.initial_layouts import all_layouts, first_rows, rows_for
from collapipe_flwr.scheduler.policies import make_scheduler
from collapipe_flwr.scheduler.protocol import SchedulerConfig
from collapipe_flwr.scheduler.ranks import choose_ranks
from collapipe_flwr.scheduler.scorer import Scorer
from tests.thorough import few
from tests.worlds import draw_world

SETTINGS = SchedulerConfig(micro_batch_sizes=(2, 8), micro_batches=(2, 4))
SMALL, LARGE = 2, 9  # ranks


def scaled(model: ModelProfile, share: float) -> ModelProfile:
    """A model whose parts cost another share of everything, the embedding most of all."""

    def part(cost: BlockCost, extra: float) -> BlockCost:
        kept = {"output_bytes": cost.output_bytes}
        names = (f.name for f in fields(cost) if f.name not in kept)
        changed = {name: getattr(cost, name) * share * extra for name in names}
        sizes = {name: round(changed[name]) for name in ("parameter_bytes", "state_bytes")}
        return BlockCost(**{**changed, **sizes, **kept})

    return ModelProfile(
        embedding=part(model.embedding, 1.5),
        blocks=tuple(part(block, 1.0) for block in model.blocks),
        decoder=part(model.decoder, 0.9),
    )


def mixed(seed: int, clusters: int = 4) -> Snapshot:
    """Clusters of three models in rotation."""
    world, model = draw_world(seed, clusters=clusters)
    snapshot = world.snapshot(1, model)
    ranks = [(SMALL, LARGE, 0)[m % 3] for m in range(clusters)]
    return replace(
        snapshot,
        clusters=tuple(
            replace(cluster, profile=replace(cluster.profile, lora_rank=rank))
            for cluster, rank in zip(snapshot.clusters, ranks, strict=True)
        ),
        models={SMALL: scaled(model, 0.4), LARGE: scaled(model, 1.7)},
    )


def alone(snapshot: Snapshot, m: int) -> Snapshot:
    """One cluster, in a world of its own model."""
    cluster = snapshot.clusters[m]
    model = snapshot.find_model(cluster.profile)
    edge = replace(snapshot.edge, memory_bytes=snapshot.edge.memory_bytes // len(snapshot.clusters))
    return replace(snapshot, model=model, models={}, clusters=(cluster,), edge=edge)


def decide(
    snapshot: Snapshot,
    policy: str,
    settings: SchedulerConfig = SETTINGS,
    *,
    leaves_out: bool = False,
) -> Plan:
    scheduler = make_scheduler(policy, settings)
    return RoundController(scheduler, settings, leaves_out=leaves_out).plan(snapshot)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("policy", ["dssda", "throughput", "uniform"])
def test_a_cluster_costs_what_it_costs_in_a_world_of_its_model(
    policy: str, schedule: str, recompute: bool
) -> None:
    settings = replace(SETTINGS, schedule=schedule, recompute=recompute, max_model_share=0.6)
    for seed, clusters in ((1, 3), (3, FEW_CLUSTERS + 1)):
        snapshot = mixed(seed, clusters)
        plan = decide(snapshot, policy, settings)
        assert len(plan.clusters) == clusters
        for m, cluster in enumerate(plan.clusters):
            one = replace(plan, clusters=(cluster,))
            (found,) = price(one, alone(snapshot, m), PricingOptions.from_plan(cluster)).clusters
            assert cluster.latency_s == pytest.approx(found.latency_s, rel=1e-9)
            for name, joule in cluster.energy_j.items():
                assert joule == pytest.approx(found.energy_j[name], rel=1e-9)
            for name, size in cluster.memory_bytes.items():
                assert size == pytest.approx(found.memory_bytes[name], abs=1)


def test_models_that_cost_the_same_change_nothing() -> None:
    snapshot = mixed(4, clusters=2)
    same = replace(snapshot, models={SMALL: snapshot.model, LARGE: snapshot.model})
    assert decide(same, "dssda") == decide(replace(snapshot, models={}), "dssda")
    copies = {rank: scaled(snapshot.model, 1.0) for rank in (SMALL, LARGE)}
    assert decide(replace(snapshot, models=copies), "dssda") != decide(same, "dssda")


def test_a_small_rank_fits_where_a_large_one_does_not() -> None:
    one = replace(SETTINGS, micro_batch_sizes=(8,), micro_batches=(2,), schedule="gpipe")
    snapshot = mixed(5, clusters=1)
    (cluster,) = snapshot.clusters
    (plan,) = decide(snapshot, "memory", one).clusters
    needed = sum(plan.memory_bytes[name] for name in plan.device_ids)
    devices = cluster.profile.devices
    room = round(2 * needed / len(devices))
    roomy = replace(cluster.profile, devices=tuple(replace(d, memory_bytes=room) for d in devices))

    def planned(rank: int) -> Plan:
        ranked = replace(cluster, profile=replace(roomy, lora_rank=rank))
        return decide(replace(snapshot, clusters=(ranked,)), "dssda", one)

    assert planned(SMALL).clusters
    with pytest.raises(InfeasibleError, match="no plan fits its memories"):
        planned(LARGE)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_searches_see_every_clusters_own_model(schedule: str) -> None:
    """Prices of rows, and the rows that searches begin with, are those in worlds of one model."""
    size = SearchSize(clusters=3, devices=4, blocks=8, seeds=range(1), schedule=schedule)
    planner = search_planner(size, 0, queues=True)
    seen, batch, lengths = planner.tables.snapshot, (2, 4), np.array([2.0, 1e9])
    ranks = (SMALL, LARGE, 0)
    seen = replace(
        seen,
        clusters=tuple(
            replace(cluster, profile=replace(cluster.profile, lora_rank=rank))
            for cluster, rank in zip(seen.clusters, ranks, strict=True)
        ),
        models={SMALL: scaled(seen.model, 0.4), LARGE: scaled(seen.model, 1.7)},
    )
    prices = planner.make_opening_prices()
    worlds = [
        seen,
        *(replace(seen, model=seen.models.get(r, seen.model), models={}) for r in ranks),
    ]
    planners = [replace(planner, tables=tabulate(world)) for world in worlds]
    scorers = [Scorer(each, prices) for each in planners]
    members, stops = all_layouts(size.devices, size.blocks)
    for m in range(size.clusters):
        rows = rows_for(m, members, stops, np.array([batch]))
        found, wanted = (scorers[n].estimate(rows) for n in (0, m + 1))
        for name in ("latency", "soft", "worth"):
            assert np.array_equal(getattr(found, name), getattr(wanted, name))
    every = stack_layouts(
        [rows_for(m, members, stops, np.array([batch])).take(np.array([5])) for m in range(3)]
    )
    which, firsts = np.arange(size.clusters), []
    for each, scorer in zip(planners, scorers, strict=True):
        firsts.append((first_rows(each, which, batch), cheapest_rows(scorer, every, lengths)))
    for m in range(size.clusters):
        for found_rows, wanted_rows in zip(firsts[0], firsts[m + 1], strict=True):
            ours, theirs = (as_set(each, m) for each in (found_rows, wanted_rows))
            assert ours == theirs and (ours or found_rows is firsts[0][1])


def as_set(rows: Layouts, m: int) -> set[tuple[tuple[int, int], ...]]:
    """Members and stops of the rows of one cluster."""
    here = rows.take(np.flatnonzero(rows.cluster_r == m))
    return {
        tuple(zip(members[used].tolist(), stops[used].tolist(), strict=True))
        for members, stops, used in zip(here.member_rs, here.stop_rs, here.used_rs, strict=True)
    }


def heavier(model: ModelProfile, memory: float, work: float) -> ModelProfile:
    """A model that takes more memory or time, and sends as much."""

    def part(cost: BlockCost) -> BlockCost:
        return replace(
            cost,
            state_bytes=round(cost.state_bytes * memory),
            forward_flop=cost.forward_flop * work,
            backward_flop=cost.backward_flop * work,
        )

    return ModelProfile(
        embedding=part(model.embedding),
        blocks=tuple(map(part, model.blocks)),
        decoder=part(model.decoder),
    )


GRID = (4, 8, 16)


def chosen(
    policy: str, snapshot: Snapshot, models: dict[int, ModelProfile], budgets: bool = False
) -> dict[str, int]:
    def decide_with(ranks: Mapping[str, int]) -> Plan:
        clusters = (
            replace(c, profile=replace(c.profile, lora_rank=ranks[c.profile.cluster_id]))
            for c in snapshot.clusters
        )
        ranked = replace(snapshot, clusters=tuple(clusters), models=models)
        return decide(ranked, policy, leaves_out=True)

    profiles = [cluster.profile for cluster in snapshot.clusters]
    limits = {p.cluster_id: p.budgets_j if budgets else {} for p in profiles}
    return choose_ranks(decide_with, limits, GRID)


@pytest.mark.parametrize("policy", few(["uniform", "dssda"], 0))
def test_every_cluster_gets_the_largest_rank_that_nothing_speaks_against(policy: str) -> None:
    snapshot = mixed(6, clusters=3)
    names = [cluster.profile.cluster_id for cluster in snapshot.clusters]
    free = dict.fromkeys(GRID, snapshot.model)
    assert chosen(policy, snapshot, free) == dict.fromkeys(names, 16)
    slow = {4: snapshot.model, 8: snapshot.model, 16: heavier(snapshot.model, 1.0, 4.0)}
    found = chosen(policy, snapshot, slow)
    plan = decide(replace(snapshot, models={}), policy)
    slowest = max(plan.clusters, key=lambda each: each.latency_s)
    assert found[slowest.cluster_id] == 8  # it would make the round longer
    assert set(found.values()) <= {8, 16}


@pytest.mark.parametrize("policy", few(["uniform", "dssda"], 0))
def test_memory_and_energy_keep_ranks_small(policy: str) -> None:
    snapshot = mixed(6, clusters=3)
    names = [cluster.profile.cluster_id for cluster in snapshot.clusters]
    large = heavier(snapshot.model, 40.0, 1.0)
    models = {4: snapshot.model, 8: snapshot.model, 16: large}
    plan = decide(replace(snapshot, models={}), "memory").clusters[0]
    room = 2 * sum(plan.memory_bytes[name] for name in plan.device_ids)
    first, *others = snapshot.clusters
    devices = tuple(replace(d, memory_bytes=room) for d in first.profile.devices)
    tight = replace(first, profile=replace(first.profile, devices=devices))
    roomy = [
        replace(c, profile=c.profile.with_members(lambda d: replace(d, memory_bytes=2**40)))
        for c in others
    ]
    edge = replace(snapshot.edge, memory_bytes=2**42)
    found = chosen(policy, replace(snapshot, clusters=(tight, *roomy), edge=edge), models)
    assert found == {names[0]: 8, names[1]: 16, names[2]: 16}
    thrifty = replace(
        snapshot,
        clusters=tuple(
            replace(c, profile=c.profile.with_members(lambda d: replace(d, energy_budget_j=1e-9)))
            for c in snapshot.clusters
        ),
    )
    hungry = {4: snapshot.model, 8: heavier(snapshot.model, 1.0, 1.02), 16: snapshot.model}
    assert chosen(policy, thrifty, hungry, budgets=True) == dict.fromkeys(names, 4)
    assert chosen(policy, thrifty, hungry) == dict.fromkeys(names, 16)

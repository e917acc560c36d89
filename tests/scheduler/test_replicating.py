"""Laws of replicas in plans: only where they win, within every limit, and priced as executed."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from collapipe_flwr.core.domain import ClusterPlan, ModelProfile, Plan, Snapshot
from collapipe_flwr.core.json_codec import from_json, to_json
from collapipe_flwr.costs.price import price
from collapipe_flwr.costs.tables import tabulate
from collapipe_flwr.scheduler import replicating
from collapipe_flwr.scheduler.base import make_solver
from collapipe_flwr.scheduler.dssda import select_usable_plans
from collapipe_flwr.scheduler.plans import check_cluster_plan, dry_run_plan
from collapipe_flwr.scheduler.policies import make_scheduler
from collapipe_flwr.scheduler.protocol import SchedulerConfig, SchedulerState
from collapipe_flwr.scheduler.replicating import MOST_CLUSTERS, add_replicas
from collapipe_flwr.simulation.setting import ModelShape
from collapipe_flwr.simulation.world import EnergyBudget, make_world, mixed_devices
from tests.worlds import BOARDS, first_step, planned, with_devices

SETTINGS = SchedulerConfig(
    micro_batch_sizes=(1, 2, 4, 8), micro_batches=(1, 2, 4, 8, 16), schedule="1f1b", replicas=True
)


def adapted(blocks: int) -> ModelProfile:
    """Of whose blocks a hundredth is trained and travels, as with low-rank adapters."""
    whole = ModelShape(blocks=blocks).profile()
    small = tuple(
        replace(b, parameter_bytes=b.parameter_bytes // 100, state_bytes=b.state_bytes // 4)
        for b in whole.blocks
    )
    return replace(whole, blocks=small)


def first_seen(seed: int, model: ModelProfile, *, clusters: int = 1, devices: int = 6) -> Snapshot:
    world = make_world(
        cluster_devices=mixed_devices(clusters, devices, seed, BOARDS),
        examples=[1000] * clusters,
        channel="block-fading",
        budget=EnergyBudget(equal_shares=1.8),
        model=model,
        seed=seed,
    )
    return world.snapshot(1, model)


@cache
def with_adapters() -> tuple[Snapshot, Plan, SchedulerState]:
    """A first round whose plan has replicas."""
    snapshot = first_seen(1, adapted(2))
    return snapshot, *first_step(snapshot, SETTINGS)


def replicated(plan: Plan) -> list[ClusterPlan]:
    return [cluster for cluster in plan.clusters if max(cluster.replicas) > 1]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(
    "seed", [2, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (0, 1, 3))]
)
def test_a_plan_with_replicas_keeps_every_limit_and_pays_less(seed: int, schedule: str) -> None:
    snapshot, settings = first_seen(seed, adapted(4)), replace(SETTINGS, schedule=schedule)
    plain, state = first_step(snapshot, replace(settings, replicas=False))
    plan = planned(snapshot, settings)
    devices = {d.device_id: d for d in snapshot.clusters[0].profile.members}
    for cluster in plan.clusters:
        check_cluster_plan(cluster, 4)
        dry_run_plan(cluster)
        for name, size in cluster.memory_bytes.items():
            assert size <= (1.0 - settings.memory_margin) * devices[name].memory_bytes
        for powers in (cluster.tx_power_w, cluster.gradient_power_w):
            assert all(0 <= w <= devices[n].tx_power_max_w * 1.000001 for n, w in powers.items())
        assert set(cluster.device_ids) <= set(cluster.gradient_power_w)
    priced = price(plan, snapshot, settings)
    assert priced.latency_s == pytest.approx(plan.latency_s, rel=1e-9)
    for cluster, found in zip(plan.clusters, priced.clusters, strict=True):
        assert found.energy_j == pytest.approx(cluster.energy_j, rel=1e-9)
        assert found.memory_bytes == cluster.memory_bytes
    if not replicated(plan):
        assert plan == plain
        return
    problem = make_solver(tabulate(snapshot), state, settings)
    values = [
        problem.latency_price * p.latency_s
        + sum(
            joule * problem.price_mi[0, i]
            for i, joule in enumerate(p.clusters[0].energy_j.values())
        )
        for p in (plain, plan)
    ]
    assert values[1] < values[0] * (1.0 - replicating.WORTH / 2)


@pytest.mark.parametrize(
    "seeds", [(1,), pytest.param((0, 2, 3, 4, 5), marks=pytest.mark.slow)], ids=str
)
def test_few_blocks_with_adapters_are_trained_sooner_by_replicas(seeds: tuple[int, ...]) -> None:
    """Four of these devices have nothing else to do, and little to exchange."""
    gains = []
    for seed in seeds:
        snapshot = first_seen(seed, adapted(2))
        plan = planned(snapshot, SETTINGS)
        plain = planned(snapshot, replace(SETTINGS, replicas=False))
        assert plan.latency_s <= plain.latency_s * 1.000001
        gains.append(1.0 - plan.latency_s / plain.latency_s)
    assert max(gains) > 0.2


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))]
)
def test_where_nothing_wins_the_plan_is_what_it_was(seed: int) -> None:
    """Here all weights travel after every step, which takes longer than replicas spare."""
    snapshot = first_seen(seed, ModelShape().profile(), clusters=2, devices=4)
    settings = replace(SETTINGS, micro_batch_sizes=(2, 8), micro_batches=(4, 16))
    plan = planned(snapshot, settings)
    assert not replicated(plan)
    assert plan == planned(snapshot, replace(settings, replicas=False))


def test_more_clusters_than_there_is_time_for_are_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    snapshot = first_seen(1, adapted(2))
    plain, state = first_step(snapshot, replace(SETTINGS, replicas=False))
    problem = make_solver(tabulate(snapshot), state, SETTINGS)
    assert add_replicas(plain, problem, 1.0) != plain
    monkeypatch.setattr(replicating, "MOST_CLUSTERS", 0)
    assert MOST_CLUSTERS >= 10
    assert add_replicas(plain, problem, 1.0) is plain


def test_a_plan_whose_replica_is_gone_is_not_repeated() -> None:
    snapshot, plan, _ = with_adapters()
    (cluster,) = replicated(plan)
    assert select_usable_plans(plan, snapshot) == (cluster,)
    (only,) = snapshot.clusters
    gone = next(name for s in cluster.segments for name in s.replicas)
    left = tuple(d for d in only.profile.devices if d.device_id != gone)
    fewer = with_devices(only, left)
    assert select_usable_plans(plan, replace(snapshot, clusters=(fewer,))) == ()


def test_a_state_with_replicas_survives_a_checkpoint() -> None:
    *_, state = with_adapters()
    assert state.last_plan is not None and replicated(state.last_plan)
    assert from_json(SchedulerState, to_json(state), "state") == state


def test_rounds_with_replicas_go_on_from_each_other() -> None:
    """The next decision starts from a plan with replicas as from any other."""
    snapshot, plan, state = with_adapters()
    scheduler, lengths = make_scheduler("dssda", SETTINGS), [plan.latency_s]
    for index in (2, 3):
        plan, state = scheduler.step(state, replace(snapshot, round_index=index))
        lengths.append(plan.latency_s)
        assert replicated(plan)
    assert max(lengths) < 1.02 * min(lengths)

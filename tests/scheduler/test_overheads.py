"""What every micro-batch takes besides its operations reaches prices, fast scores and segments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.oracles.brute_force import optimal_plan
from collapipe_flwr.core.domain import DeviceProfile, ModelProfile, Snapshot
from collapipe_flwr.costs.chain import make_chain
from collapipe_flwr.costs.layouts import stack_layouts
from collapipe_flwr.costs.price import price
from collapipe_flwr.costs.tables import tabulate
from collapipe_flwr.scheduler.base import make_initial_state, make_solver
from collapipe_flwr.scheduler.initial_layouts import all_layouts, rows_for
from collapipe_flwr.scheduler.protocol import SchedulerConfig
from collapipe_flwr.scheduler.scorer import Scorer
from collapipe_flwr.simulation.setting import ModelShape
from tests.worlds import KINDS, draw_snapshot, first_round, planned, with_devices

SIZE, COUNT = 4, 8
SETTINGS = SchedulerConfig(micro_batch_sizes=(SIZE,), micro_batches=(COUNT,), bound=False)
OVERHEAD_S = 0.02


def uniform(model: ModelProfile) -> ModelProfile:
    """Equal pieces without weights, so that a device's speed shows in its passes alone."""
    block = replace(model.blocks[0], parameter_bytes=0)
    return ModelProfile(embedding=block, blocks=(block,) * len(model.blocks), decoder=block)


def with_members(
    snapshot: Snapshot, change: Callable[[DeviceProfile], DeviceProfile], edge_overhead_s: float
) -> Snapshot:
    clusters = tuple(replace(c, profile=c.profile.with_members(change)) for c in snapshot.clusters)
    edge = replace(snapshot.edge, overhead_s=edge_overhead_s)
    return replace(snapshot, clusters=clusters, edge=edge)


def late(snapshot: Snapshot) -> Snapshot:
    return with_members(snapshot, lambda d: replace(d, overhead_s=OVERHEAD_S), OVERHEAD_S)


def slower(snapshot: Snapshot) -> Snapshot:
    """As slow as `late` in micro-batches of SIZE, by speed alone, and as thirsty."""
    block = snapshot.model.blocks[0]
    flop = SIZE * (block.forward_flop + block.backward_flop)

    def speed(fast: float) -> float:
        return flop / (flop / fast + OVERHEAD_S)

    def change(device: DeviceProfile) -> DeviceProfile:
        watt = device.speed_flop_per_s * device.energy_per_flop_j
        now = speed(device.speed_flop_per_s)
        return replace(device, speed_flop_per_s=now, energy_per_flop_j=watt / now)

    changed = with_members(snapshot, change, 0.0)
    return replace(
        changed, edge=replace(snapshot.edge, speed_flop_per_s=speed(snapshot.edge.speed_flop_per_s))
    )


@pytest.mark.parametrize("recompute", [False, True])
def test_a_stage_takes_its_operations_and_an_overhead_per_block(recompute: bool) -> None:
    snapshot = late(draw_snapshot(4, clusters=1, devices=2, blocks=5))
    model, device = snapshot.model, snapshot.clusters[0].profile.devices[0]
    settings = replace(SETTINGS, recompute=recompute)
    passes = 4 / 3 if recompute else 1.0  # of forward, backward and forward again: 1/3, 2/3, 1/3
    for size in (1, 16):
        rows = rows_for(0, *all_layouts(1, 5), np.array([[size, COUNT]]))
        chain = make_chain(tabulate(snapshot), rows, settings)
        total = float(chain.forward_stage_s[0, 1] + chain.backward_stage_s[0, 1])
        forward = sum(block.forward_flop for block in model.blocks)
        flop = size * (forward * (1 + recompute) + sum(b.backward_flop for b in model.blocks))
        expected = flop / device.speed_flop_per_s + 5 * passes * OVERHEAD_S
        assert total == pytest.approx(expected, rel=1e-12)


def test_an_overhead_is_a_lower_speed_at_one_size() -> None:
    base = draw_snapshot(5, clusters=2, devices=3, blocks=5)
    base = replace(base, model=uniform(base.model))
    chains, scores = [], []
    for snapshot in (late(base), slower(base)):
        tables = tabulate(snapshot)
        queues = {c.profile.cluster_id: {} for c in snapshot.clusters}
        state = replace(make_initial_state(base, SETTINGS), energy_queue_j=queues)
        planner = make_solver(tables, state, SETTINGS)
        every = [rows_for(m, *all_layouts(3, 5), np.array([[SIZE, COUNT]])) for m in (0, 1)]
        rows = stack_layouts(every)
        chains.append(make_chain(tables, rows, SETTINGS))
        scorer = Scorer(planner, planner.make_opening_prices())
        scores.append(scorer.estimate(rows))
    for one, other in ((chains[0], chains[1]),):
        for name in ("forward_stage_s", "backward_stage_s", "fixed_s", "fixed_j"):
            assert getattr(one, name) == pytest.approx(getattr(other, name), rel=1e-9)
    for name in ("latency", "soft", "worth"):
        assert getattr(scores[0], name) == pytest.approx(getattr(scores[1], name), rel=1e-9)


def test_overheads_make_plans_prefer_large_micro_batches() -> None:
    settings = SchedulerConfig(
        batch_size=32,
        bound=False,
        micro_batch_sizes=(1, 2, 4, 8, 16, 32),
        micro_batches=(1, 2, 4, 8, 16, 32),
    )
    quick = draw_snapshot(6, clusters=1, devices=3, blocks=6)
    sizes = []
    for snapshot in (quick, with_members(quick, lambda d: replace(d, overhead_s=1.0), 0.0)):
        plan = planned(snapshot, settings)
        sizes.append(plan.clusters[0].micro_batch_size)
        assert plan.latency_s == pytest.approx(price(plan, snapshot, settings).latency_s)
    assert sizes[0] < sizes[1]


def test_the_overhead_of_a_round_adds_to_its_latency() -> None:
    quick = draw_snapshot(7, clusters=1)
    plan = planned(quick, SETTINGS)
    profile = replace(quick.clusters[0].profile, overhead_s=3.0)
    behind = replace(quick, clusters=(replace(quick.clusters[0], profile=profile),))
    took = [price(plan, snapshot, SETTINGS).latency_s for snapshot in (quick, behind)]
    assert took[1] - took[0] == pytest.approx(3.0)


def beginning(snapshot: Snapshot, *seconds: float) -> Snapshot:
    """Devices, cluster by cluster, that take so long to begin and end a round."""
    each, clusters = iter(seconds), []
    for cluster in snapshot.clusters:
        devices = tuple(replace(d, round_s=next(each)) for d in cluster.profile.devices)
        clusters.append(with_devices(cluster, devices))
    return replace(snapshot, clusters=tuple(clusters))


def test_a_round_begins_and_ends_with_the_slowest_device_that_works() -> None:
    quick, seconds = draw_snapshot(7, clusters=1, devices=3, blocks=5), (0.5, 2.0, 1.0)
    late = beginning(quick, *seconds)
    rows = rows_for(0, *all_layouts(3, 5), np.array([[SIZE, COUNT]]))
    chains, scores = [], []
    for snapshot in (quick, late):
        tables = tabulate(snapshot)
        planner = make_solver(tables, make_initial_state(quick, SETTINGS), SETTINGS)
        chains.append(make_chain(tables, rows, SETTINGS).fixed_s)
        scorer = Scorer(planner, planner.make_opening_prices())
        scores.append(scorer.estimate(rows).latency)
    used = np.where(rows.used_rs, np.array([0.0, *seconds])[rows.member_rs], 0.0)
    assert chains[1] - chains[0] == pytest.approx(used.max(1), abs=1e-9)
    assert scores[1] - scores[0] == pytest.approx(used.max(1), abs=1e-9)


def test_a_device_that_takes_too_long_to_begin_is_left_out() -> None:
    quick = draw_snapshot(7, clusters=1, devices=3, blocks=6)
    plan = planned(quick, SETTINGS)
    names = [device.device_id for device in quick.clusters[0].profile.devices]
    victim = plan.clusters[0].segments[0].device_id
    late = beginning(quick, *(1e4 * (name == victim) for name in names))
    plan = planned(late, SETTINGS)
    assert victim not in plan.clusters[0].device_ids
    assert plan.latency_s < 1e4


@pytest.mark.parametrize("seed", range(6))
def test_plans_are_optimal_where_devices_take_long_to_begin(seed: int) -> None:
    rng = np.random.default_rng(seed)
    kinds = [[KINDS[kind] for kind in rng.integers(0, len(KINDS), 3)] for _ in range(2)]
    shape = ModelShape(blocks=4, decoder_blocks=2, width=32, tokens=16, wire_bytes=4)
    quick = first_round(kinds, shape.profile(), 40, seed)
    usual_s = planned(quick, SETTINGS).latency_s
    late = beginning(quick, *(usual_s * rng.uniform(0.0, 0.6, 6)))
    plan = planned(late, SETTINGS)
    assert plan.latency_s > usual_s
    assert plan.latency_s == pytest.approx(optimal_plan(late, SETTINGS).latency_s, rel=1e-3)

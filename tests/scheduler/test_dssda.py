"""DSSDA over rounds: budgets, fallbacks, vanishing parties, participation; and the baselines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from collapipe_flwr.core.domain import ModelProfile, Plan, Snapshot
from collapipe_flwr.core.errors import ConfigError, InfeasibleError, ScheduleError
from collapipe_flwr.core.json_codec import from_json, to_json
from collapipe_flwr.core.outcome import RoundOutcome
from collapipe_flwr.costs.convergence import LearningState
from collapipe_flwr.scheduler.plans import check_cluster_plan
from collapipe_flwr.scheduler.policies import POLICIES, make_scheduler
from collapipe_flwr.scheduler.protocol import Scheduler, SchedulerConfig, SchedulerState
from collapipe_flwr.simulation.setting import Setting
from collapipe_flwr.simulation.world import EnergyBudget, World, make_world, mixed_devices
from tests.thorough import examples
from tests.worlds import (
    KINDS,
    QueuesAlone,
    draw_world,
    equal_ends,
    first_round,
    first_step,
    four_boards,
    outcome_of,
    with_devices,
    without_device,
)

FAST = SchedulerConfig(micro_batch_sizes=(2, 8), micro_batches=(2, 4))
ONE = replace(FAST, micro_batch_sizes=(4,), micro_batches=(4,))


def any_world(seed: int, clusters: int, devices: int, blocks: int) -> tuple[World, ModelProfile]:
    """With few examples in some clusters, and a tight budget."""
    model = equal_ends(blocks)
    world = make_world(
        cluster_devices=mixed_devices(clusters, devices, seed, KINDS),
        examples=[int(e) for e in np.random.default_rng(seed).integers(1, 500, clusters)],
        channel="block-fading",
        budget=EnergyBudget(share=0.3, radio_s=1.0),
        model=model,
        seed=seed,
    )
    return world, model


def run(
    scheduler: Scheduler, world: World, model: ModelProfile, rounds: int, options: SchedulerConfig
) -> tuple[list[Plan], list[RoundOutcome], SchedulerState]:
    state = scheduler.init(world.snapshot(1, model))
    plans, outcomes = [], []
    for index in range(1, rounds + 1):
        snapshot = world.snapshot(index, model)
        plan, state = scheduler.step(state, snapshot)
        outcome = outcome_of(plan, snapshot, options)
        state = scheduler.observe(state, plan, outcome)
        plans.append(plan)
        outcomes.append(outcome)
    return plans, outcomes, state


def check_plan(plan: Plan, snapshot: Snapshot, options: SchedulerConfig) -> None:
    """Every hard constraint of a round."""
    blocks = len(snapshot.model.blocks)
    by_id = {c.profile.cluster_id: c.profile for c in snapshot.clusters}
    total = sum(c.bandwidth_hz for c in plan.clusters)
    assert total <= snapshot.radio.bandwidth_hz * (1 + 1e-9)
    for cluster in plan.clusters:
        check_cluster_plan(cluster, blocks)
        profile = by_id[cluster.cluster_id]
        members = {d.device_id: d for d in (profile.control_unit, *profile.devices)}
        for powers in (cluster.tx_power_w, cluster.gradient_power_w):
            for name, power in powers.items():
                assert 0 < power <= members[name].tx_power_max_w * (1 + 1e-9)
        for name, need in cluster.memory_bytes.items():
            assert need <= (1 - options.memory_margin) * members[name].memory_bytes + 1
        batch = cluster.micro_batch_size * cluster.micro_batches
        assert cluster.local_steps == math.ceil(profile.examples / batch)
        assert math.isfinite(cluster.latency_s) and cluster.latency_s > 0


@examples(3, 12)
@given(
    st.integers(0, 10**6),
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(1, 6),
    st.sampled_from(["gpipe", "1f1b"]),
    st.booleans(),
)
def test_no_valid_snapshot_yields_an_invalid_plan(
    seed: int, clusters: int, devices: int, blocks: int, schedule: str, recompute: bool
) -> None:
    world, model = any_world(seed, clusters, devices, blocks)
    options = replace(FAST, schedule=schedule, recompute=recompute)
    snapshot = world.snapshot(1, model)
    plan, state = first_step(snapshot, options)
    check_plan(plan, snapshot, options)
    assert plan.fallback is None
    again = from_json(SchedulerState, to_json(state), "state")
    assert to_json(again) == to_json(state)


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_plans_validly_and_predicts_what_it_costs(name: str) -> None:
    world, model = draw_world(3)
    plans, outcomes, _ = run(make_scheduler(name, FAST), world, model, 2, FAST)
    for index, (plan, outcome) in enumerate(zip(plans, outcomes, strict=True), start=1):
        assert plan.policy == name
        check_plan(plan, world.snapshot(index, model), FAST)
        if name != "static":  # whose prediction is of its first round
            assert plan.latency_s == pytest.approx(outcome.latency_s, rel=1e-6)
            for predicted, real in zip(plan.clusters, outcome.clusters, strict=True):
                assert dict(predicted.energy_j) == pytest.approx(dict(real.energy_j), rel=1e-6)


def test_average_excess_energy_is_at_most_queue_over_rounds() -> None:
    """On every path: mean(e) - budget <= Q(T) / T for the budget that the queue aims at."""
    world, model = draw_world(5)
    for name in ("dssda", "throughput"):
        _, outcomes, state = run(make_scheduler(name, ONE), world, model, 10, ONE)
        for cluster, budgets in state.budget_j.items():
            for device, budget in budgets.items():
                spent = [
                    next(c for c in o.clusters if c.cluster_id == cluster).energy_j[device]
                    for o in outcomes
                ]
                aimed = (1 - ONE.budget_margin) * budget
                queue = state.energy_queue_j[cluster][device]
                assert np.mean(spent) - aimed <= queue / len(spent) + 1e-9


def test_budgets_hold_in_the_long_run_where_latency_alone_breaks_them() -> None:
    world, model = four_boards(0.5)

    def worst(name: str, rounds: int) -> float:
        _, outcomes, state = run(make_scheduler(name, ONE), world, model, rounds, ONE)
        budgets = state.budget_j["cluster-0"]
        spent = [o.clusters[0].energy_j for o in outcomes]
        return max(np.mean([e[d] for e in spent]) / b for d, b in budgets.items())

    assert worst("latency-only", 2) > 1.05  # whose rounds are all alike in a static channel
    assert worst("dssda", 12) <= 1.0  # past the rounds in which an advance is repaid


def test_larger_v_trades_queues_for_latency() -> None:
    """O(1/V) and O(V) in direction: latency falls with V and the queues grow."""
    world, model = four_boards(0.4)
    latency, queues = [], []
    for weight in (0.1, 1.0, 10.0):
        options = replace(
            ONE, penalty_weight=weight, hysteresis=0.0, bound=False, energy_advance=0.0
        )
        _, outcomes, state = run(QueuesAlone(options), world, model, 8, options)
        latency.append(np.mean([o.latency_s for o in outcomes]))
        budget = state.budget_j["cluster-0"]
        queue = state.energy_queue_j["cluster-0"]
        queues.append(max(queue[d] / budget[d] for d in budget))
    assert latency[-1] < latency[0]
    assert queues[-1] > queues[0]
    assert all(a >= b * 0.97 for a, b in pairwise(latency))
    assert queues[1] <= 8 * 1.0 + 5 and queues[2] <= 8 * 10.0 + 5  # O(V), not O(rounds V)


def test_unusable_snapshot_repeats_the_last_plan_and_says_so() -> None:
    world, model = draw_world(1)
    scheduler = make_scheduler("dssda", ONE)
    good = world.snapshot(1, model)
    plan, state = scheduler.step(scheduler.init(good), good)
    bad_device = replace(good.clusters[0].profile.devices[0], speed_flop_per_s=math.nan)
    profile = good.clusters[0].profile
    bad_profile = replace(profile, devices=(bad_device, *profile.devices[1:]))
    bad_cluster = replace(good.clusters[0], profile=bad_profile)
    bad = replace(good, round_index=2, clusters=(bad_cluster, *good.clusters[1:]))
    kept, after = scheduler.step(state, bad)
    assert kept.round_index == 2 and kept.clusters == plan.clusters
    assert kept.fallback is not None and "speed_flop_per_s" in kept.fallback
    recovered, _ = scheduler.step(after, replace(good, round_index=3))
    assert recovered.fallback is None


def test_a_radio_solver_that_fails_is_a_recorded_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs out of steps in round 2: the plan of round 1 stands in, and round 3 is its own."""
    world, model = draw_world(1)
    scheduler = make_scheduler("dssda", ONE)
    plan, state = scheduler.step(scheduler.init(world.snapshot(1, model)), world.snapshot(1, model))
    with monkeypatch.context() as broken:
        broken.setattr("collapipe_flwr.scheduler.radio.interior_point.MAX_STEPS", 1)
        kept, state = scheduler.step(state, world.snapshot(2, model))
        with pytest.raises(ScheduleError, match="radio solver stopped"):
            scheduler.step(scheduler.init(world.snapshot(2, model)), world.snapshot(2, model))
    assert kept.round_index == 2 and kept.clusters == plan.clusters
    assert kept.fallback is not None and "radio solver stopped" in kept.fallback
    recovered, _ = scheduler.step(state, world.snapshot(3, model))
    assert recovered.fallback is None


def test_first_snapshot_unusable_is_a_typed_error() -> None:
    world, model = draw_world(1)
    scheduler = make_scheduler("dssda", FAST)
    good = world.snapshot(1, model)
    state = scheduler.init(good)
    with pytest.raises(ScheduleError, match="bandwidth_hz must be finite and > 0, got 0"):
        scheduler.step(state, replace(good, radio=replace(good.radio, bandwidth_hz=0.0)))
    with pytest.raises(ScheduleError, match="no cluster"):
        scheduler.init(replace(good, clusters=()))


def test_clusters_and_devices_come_and_go() -> None:
    world, model = draw_world(2, clusters=3)
    scheduler = make_scheduler("dssda", ONE)
    state = scheduler.init(world.snapshot(1, model, present=["cluster-0", "cluster-2"]))
    presence = (["cluster-0", "cluster-2"], None, ["cluster-1"], None)
    for index, present in enumerate(presence, start=1):
        snapshot = world.snapshot(index, model, present=present)
        if index == 4:
            snapshot = without_device(snapshot, cluster=0, device=0)
        plan, state = scheduler.step(state, snapshot)
        check_plan(plan, snapshot, ONE)
        assert plan.fallback is None
        assert {c.cluster_id for c in plan.clusters} == {
            c.profile.cluster_id for c in snapshot.clusters
        }
        state = scheduler.observe(state, plan, outcome_of(plan, snapshot, ONE))


def test_a_run_goes_on_with_other_micro_batches() -> None:
    """In a world in which the last plan would stay if its micro-batches might."""
    setting = Setting(clusters=1, devices=3)
    few = replace(setting.settings, micro_batches=(1, 2, 4))
    model = setting.model.profile()
    world = setting.world(1, model)
    scheduler = make_scheduler("dssda", setting.settings)
    state = scheduler.init(world.snapshot(1, model))
    before, state = scheduler.step(state, world.snapshot(1, model))
    (kept,) = scheduler.step(state, world.snapshot(2, model))[0].clusters
    after, _ = make_scheduler("dssda", few).step(state, world.snapshot(2, model))
    assert kept.segments == before.clusters[0].segments and kept.micro_batches == 16
    assert {c.micro_batches for c in before.clusters} == {16}
    assert {c.micro_batches for c in after.clusters} <= {1, 2, 4}


def test_participation_floor_is_kept_on_average_and_stragglers_sit_out() -> None:
    model = equal_ends(4)
    world = make_world(
        cluster_devices=[
            ["raspberry-pi-5", "jetson-orin-nano", "jetson-orin-nano"],
            ["raspberry-pi-5", "jetson-orin-nano", "jetson-orin-nano"],
            ["raspberry-pi-4", "raspberry-pi-4", "raspberry-pi-4"],
        ],
        examples=[600, 600, 200],
    )
    options = replace(ONE, participation_floor=0.3, bound=False)
    rounds = 8
    plans, _, state = run(make_scheduler("dssda", options), world, model, rounds, options)
    share = np.mean([plan.find_cluster("cluster-2") is not None for plan in plans])
    assert share < 1.0
    assert share >= 0.3 - state.participation_queue["cluster-2"] / rounds - 1e-9
    assert state.participation_queue["cluster-2"] < 1


def test_hysteresis_keeps_segments_that_are_nearly_as_good() -> None:
    world, model = draw_world(8)

    def switches(hysteresis: float) -> int:
        options = replace(ONE, hysteresis=hysteresis)
        plans, _, _ = run(make_scheduler("dssda", options), world, model, 3, options)
        return sum(
            a.clusters[m].segments != b.clusters[m].segments
            for a, b in pairwise(plans)
            for m in range(2)
        )

    assert switches(0.5) < switches(0.0)


def test_names_and_settings_are_checked() -> None:
    with pytest.raises(ConfigError, match=r"dssda.*uniform"):
        make_scheduler("dsda")
    with pytest.raises(ScheduleError, match=r"penalty-weight must be at least 0, got -1"):
        SchedulerConfig(penalty_weight=-1)
    with pytest.raises(ScheduleError, match="micro-batches needs"):
        SchedulerConfig(micro_batches=())
    with pytest.raises(ScheduleError, match="schedule must be one of"):
        SchedulerConfig(schedule="zb")


def test_infeasible_memory_is_refused_at_once() -> None:
    world, model = draw_world(0)
    huge = equal_ends(6, 16384, 64)
    scheduler = make_scheduler("dssda", FAST)
    with pytest.raises(InfeasibleError, match="MiB"):
        scheduler.step(scheduler.init(world.snapshot(1, model)), world.snapshot(1, huge))


@pytest.mark.parametrize("holds", [(5,) * 8, (5.01, 1.9, 4.01, 2.9, 3.01, 3.9, 5.01, 1.9)])
def test_a_model_for_many_small_devices_has_a_reference_and_a_plan(holds: Sequence[float]) -> None:
    """No three devices hold it; all together do, at the least to the last block."""
    model = equal_ends(24, 512, 64)
    snapshot = first_round([["raspberry-pi-5"] * 9] * 30, model, 200)
    block = model.blocks[0]
    need = block.state_bytes + 2 * 2 * block.stash_bytes  # of the smallest batch in FAST
    room = [(h + 0.001) * need / (1 - FAST.memory_margin) for h in holds]
    poor = (
        with_devices(
            c,
            (replace(d, memory_bytes=int(r)) for d, r in zip(c.profile.devices, room, strict=True)),
        )
        for c in snapshot.clusters
    )
    tight = replace(snapshot, clusters=tuple(poor))
    scheduler = make_scheduler("dssda", FAST)
    state = scheduler.init(tight)
    assert state.reference is not None and math.isfinite(state.reference.latency_s)
    plan, _ = scheduler.step(state, tight)
    assert plan.fallback is None
    assert min(len(c.segments) for c in plan.clusters) >= 5
    check_plan(plan, tight, FAST)


@examples(1, 4)
@example(91, 12, 2, 2)  # full steps of the radio's solver went round in circles
@given(st.integers(0, 10**6), st.integers(5, 40), st.integers(2, 6), st.integers(2, 10))
def test_many_clusters_and_a_device_that_vanishes_still_get_valid_plans(
    seed: int, clusters: int, devices: int, blocks: int
) -> None:
    world, model = any_world(seed, clusters, devices, blocks)
    scheduler = make_scheduler("dssda", FAST)
    first = world.snapshot(1, model)
    plan, state = scheduler.step(scheduler.init(first), first)
    check_plan(plan, first, FAST)
    state = scheduler.observe(state, plan, outcome_of(plan, first, FAST))
    used = plan.clusters[seed % clusters].segments[0].device_id
    names = [d.device_id for d in first.clusters[seed % clusters].profile.devices]
    later = without_device(world.snapshot(2, model), seed % clusters, names.index(used))
    plan, _ = scheduler.step(state, later)
    check_plan(plan, later, FAST)
    assert plan.fallback is None and len(plan.clusters) == clusters


def test_an_oracle_of_the_benchmarks_is_no_policy() -> None:
    with pytest.raises(ConfigError, match="brute-force is an oracle of the benchmarks, not a pol"):
        make_scheduler("brute-force")


def test_noisier_gradients_get_larger_batches() -> None:
    world, model = draw_world(5, clusters=1)
    options = replace(FAST, micro_batch_sizes=(1, 4, 16), progress="noise-scale", bound=True)
    scheduler = make_scheduler("dssda", options)
    snapshot = world.snapshot(1, model)
    state = scheduler.init(snapshot)

    def batch(noise: float) -> float:
        learnt = LearningState(noise=noise, gradient_square=1.0)
        plan, _ = scheduler.step(replace(state, learning=learnt), snapshot)
        return sum(c.micro_batch_size * c.micro_batches for c in plan.clusters)

    assert batch(0.1) < batch(1e4)

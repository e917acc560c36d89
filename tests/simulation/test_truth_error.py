"""Devices that differ from what plans believe: plans find out, and keep budgets."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from collapipe_flwr.core.domain import DeviceProfile, Plan, Snapshot
from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.core.outcome import RoundOutcome
from collapipe_flwr.costs.price import price
from collapipe_flwr.scheduler.policies import make_scheduler
from collapipe_flwr.scheduler.protocol import SchedulerConfig, SchedulerState
from collapipe_flwr.simulation.devices import scaled
from collapipe_flwr.simulation.episode import run_episode
from collapipe_flwr.simulation.setting import ModelShape, Setting
from collapipe_flwr.simulation.simulate import simulate
from collapipe_flwr.simulation.world import EnergyBudget, World, make_world, mixed_devices
from tests.worlds import BOARDS, planned, simulated_outcome

MODEL = ModelShape(blocks=6, width=256, tokens=32).profile()
SETTINGS = SchedulerConfig(micro_batch_sizes=(4,), micro_batches=(2, 8))
Change = Callable[[int, DeviceProfile], DeviceProfile]
Lie = Callable[[int, RoundOutcome], RoundOutcome]


def first_of(seeds: int) -> list[Any]:
    """The first seed always, all others with the slow tests."""
    return [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, seeds))]


def a_world(
    seed: int, clusters: int = 1, *, truth_error: float = 0.0, share: float | None = None
) -> World:
    return make_world(
        cluster_devices=mixed_devices(clusters, 3, seed, BOARDS),
        examples=[500] * clusters,
        channel="static",
        seed=seed,
        truth_error=truth_error,
        budget=EnergyBudget(equal_shares=share),
        model=MODEL,
    )


def equal_boards(seed: int, share: float | None = None) -> World:
    boards = ["raspberry-pi-5", *["raspberry-pi-4"] * 3]
    return make_world(
        cluster_devices=[boards],
        examples=[500],
        channel="static",
        seed=seed,
        budget=EnergyBudget(equal_shares=share),
        model=MODEL,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    plan: Plan
    latency_s: float
    energy_j: dict[str, float]
    state: SchedulerState

    @property
    def error(self) -> float:
        return abs(math.log(self.plan.latency_s / self.latency_s))


def episode(
    world: World,
    rounds: int,
    *,
    really: Change = lambda _, device: device,
    told: Lie = lambda _, outcome: outcome,
    settings: SchedulerConfig = SETTINGS,
) -> list[Round]:
    """DSSDA where devices change from round to round, or outcomes lie."""
    scheduler = make_scheduler("dssda", settings)
    state, done = scheduler.init(world.snapshot(1, MODEL)), []
    for index in range(1, rounds + 1):
        seen = world.snapshot(index, MODEL)
        truth = changed(world.truth(seen), lambda device, now=index: really(now, device))
        plan, state = scheduler.step(state, seen)
        priced = price(plan, truth, settings)
        outcome = simulated_outcome(plan, priced, truth, seen, settings)
        state = scheduler.observe(state, plan, told(index, outcome))
        spent = {name: j for c in priced.clusters for name, j in c.energy_j.items()}
        done.append(Round(plan=plan, latency_s=priced.latency_s, energy_j=spent, state=state))
    return done


@cache
def honest(hysteresis: float = SETTINGS.hysteresis) -> list[Round]:
    """What all tests of sensors that lie compare with."""
    return episode(equal_boards(1), 12, settings=replace(SETTINGS, hysteresis=hysteresis))


def changed(snapshot: Snapshot, change: Callable[[DeviceProfile], DeviceProfile]) -> Snapshot:
    clusters = (replace(c, profile=c.profile.with_members(change)) for c in snapshot.clusters)
    return replace(snapshot, clusters=tuple(clusters))


def blocks_of(name: str, plan: Plan) -> int:
    segments = (s for c in plan.clusters for s in c.segments if s.device_id == name)
    return sum(s.stop_block - s.first_block for s in segments)


def busiest(plan: Plan) -> str:
    return max((s.device_id for s in plan.clusters[0].segments), key=lambda n: blocks_of(n, plan))


def test_the_truth_is_drawn_once_per_device_and_seed() -> None:
    factors = []
    for seed in range(40):
        world = a_world(seed, 2, truth_error=0.4)
        seen = world.snapshot(1, MODEL)
        assert world.truth(seen) == world.truth(seen)
        for believed, true in zip(seen.clusters, world.truth(seen).clusters, strict=True):
            for old, new in zip(believed.profile.members, true.profile.members, strict=True):
                speed = new.speed_flop_per_s / old.speed_flop_per_s
                factors.append((math.log(speed), math.log(power(new) / power(old))))
    spread, corr = np.std(factors, axis=0), np.corrcoef(np.transpose(factors))[0, 1]
    assert spread == pytest.approx([0.4, 0.4], rel=0.15) and abs(corr) < 0.2
    exact = a_world(0)
    seen = exact.snapshot(1, MODEL)
    assert exact.truth(seen) is seen


def test_true_stages_explain_rounds_of_clusters_that_share_an_edge() -> None:
    settings = replace(SETTINGS, edge_shared=True)
    world = a_world(0, 3)
    seen = world.snapshot(1, MODEL)
    slow = replace(
        seen, edge=replace(seen.edge, speed_flop_per_s=1e-2 * seen.edge.speed_flop_per_s)
    )
    plan = planned(slow, settings)
    outcome = simulated_outcome(plan, price(plan, slow, settings), slow, replace(slow), settings)
    for cluster in outcome.clusters:
        assert cluster.explained_s == pytest.approx(cluster.latency_s)


def power(device: DeviceProfile) -> float:
    return device.speed_flop_per_s * device.energy_per_flop_j


def test_predictions_are_within_a_tenth_after_three_rounds() -> None:
    episodes = [episode(a_world(seed, truth_error=0.6), 6) for seed in range(3)]
    assert np.median([rounds[0].error for rounds in episodes]) > 0.1
    for rounds in episodes:
        assert max(r.error for r in rounds[3:]) < 0.1


@pytest.mark.parametrize("seed", first_of(3))
def test_a_throttled_device_loses_blocks_within_three_rounds_and_gets_them_back(seed: int) -> None:
    world = equal_boards(seed)
    name = busiest(episode(world, 1)[0].plan)

    def throttled(index: int, device: DeviceProfile) -> DeviceProfile:
        slow = device.device_id == name and 5 <= index < 15
        return scaled(device, speed=0.25, power=1.0) if slow else device

    rounds = episode(world, 22, really=throttled)
    before, during = blocks_of(name, rounds[3].plan), blocks_of(name, rounds[6].plan)
    assert during < before  # round 7 is the third of the throttled ones
    assert max(r.error for r in rounds[6:14]) < 0.1
    assert blocks_of(name, rounds[-1].plan) == before  # idle ones are looked at after a while
    assert rounds[-1].latency_s == pytest.approx(rounds[3].latency_s, rel=0.01)


@pytest.mark.parametrize("seed", first_of(3))
def test_a_device_that_draws_twice_its_preset_keeps_its_budget(seed: int) -> None:
    world = a_world(seed, share=1.8)
    name = busiest(episode(world, 1)[0].plan)

    def thirsty(_: int, device: DeviceProfile) -> DeviceProfile:
        return scaled(device, speed=1.0, power=2.0) if device.device_id == name else device

    rounds = episode(world, 16, really=thirsty, settings=replace(SETTINGS, penalty_weight=1.0))
    budgets = {m.device_id: m.energy_budget_j for c in world.clusters for m in c.members}
    for device, budget in budgets.items():
        assert np.mean([r.energy_j.get(device, 0.0) for r in rounds]) <= budget, device


def lying(values: Sequence[float], *, joules: bool = False) -> Lie:
    """Seconds, watts and bytes of a device, or joules, are false by these factors from round 5."""

    def lie(index: int, outcome: RoundOutcome) -> RoundOutcome:
        if not 5 <= index < 5 + len(values):
            return outcome
        factor, cluster = values[index - 5], outcome.clusters[0]
        name = f"{cluster.cluster_id}/d1"
        stages = tuple(
            replace(
                s,
                busy_s=factor * s.busy_s,
                watt=factor * (s.watt or 0.0),
                peak_bytes=int(factor * s.peak_bytes) if math.isfinite(factor) else 0,
            )
            if s.device_id == name
            else s
            for s in cluster.stages
        )
        spent = {**cluster.energy_j, name: factor * cluster.energy_j[name]}
        lied = replace(cluster, energy_j=spent) if joules else replace(cluster, stages=stages)
        return replace(outcome, clusters=(lied, *outcome.clusters[1:]))

    return lie


@pytest.mark.parametrize(
    ("value", "joules"),
    [
        (math.nan, False),
        (0.0, True),
        pytest.param(0.0, False, marks=pytest.mark.slow),
        pytest.param(math.inf, False, marks=pytest.mark.slow),
        pytest.param(math.nan, True, marks=pytest.mark.slow),
        pytest.param(math.inf, True, marks=pytest.mark.slow),
    ],
)
def test_a_sensor_without_a_number_changes_no_plan(value: float, joules: bool) -> None:
    assert blocks_of("cluster-0/d1", honest()[0].plan)
    lied = episode(equal_boards(1), 12, told=lying([value] * 4, joules=joules))
    assert [r.plan for r in honest()] == [r.plan for r in lied]


@pytest.mark.parametrize("value", [1000.0, pytest.param(1e-3, marks=pytest.mark.slow)])
def test_a_jump_of_a_thousand_times_moves_plans_by_a_bounded_step(value: float) -> None:
    settings = replace(SETTINGS, hysteresis=0.0)
    lied = episode(equal_boards(1), 12, told=lying([value]), settings=settings)
    for one, other in zip(honest(0.0), lied, strict=True):
        assert other.plan.fallback is None
        moved = [
            abs(
                blocks_of(f"cluster-0/{name}", one.plan)
                - blocks_of(f"cluster-0/{name}", other.plan)
            )
            for name in ("d1", "d2", "d3")
        ]
        assert max(moved) <= 1


@pytest.mark.parametrize("value", [1000.0, pytest.param(1e-3, marks=pytest.mark.slow)])
def test_joules_that_jump_count_as_no_more_than_the_largest_step(value: float) -> None:
    world, name = equal_boards(1, share=1.8), "cluster-0/d1"
    rounds = episode(world, 12, told=lying([value], joules=True))
    planned = rounds[4].plan.clusters[0].energy_j[name]
    assert rounds[4].state.energy_queue_j["cluster-0"][name] <= 8 * planned
    assert all(r.plan.fallback is None for r in rounds)
    assert rounds[-1].latency_s == pytest.approx(rounds[3].latency_s, rel=0.05)


@pytest.mark.parametrize("policy", ["dssda", "throughput"])
def test_every_policy_learns_what_is_true(policy: str) -> None:
    world = a_world(2, truth_error=0.6)
    scheduler = make_scheduler(policy, SETTINGS)
    done = list(run_episode(world, scheduler, MODEL, 6, options=SETTINGS))
    errors = [abs(math.log(r.plan.latency_s / r.latency_s)) for r in done]
    assert errors[0] > 0.05 and max(errors[3:]) < 0.1


def test_a_simulation_scores_and_bounds_what_is_true(small: Setting) -> None:
    setting = replace(small, truth_error=0.6, rounds=6, policies=("dssda", "uniform"))
    believed, true = (simulate(s) for s in (small, setting))
    assert [b.latency_s for b in believed.bounds] != [b.latency_s for b in true.bounds]
    for found in (believed, true):
        for seed, bound in zip(found.setting.seeds, found.bounds, strict=True):
            for policy in found.policies:
                (score,) = (s for s in policy.scores if s.seed == seed)
                assert np.mean(score.latency_s) >= bound.latency_s * (1 - 1e-9)
    with pytest.raises(ConfigError, match="--truth-error"):
        replace(small, truth_error=-1.0)


@pytest.mark.parametrize("weight", [0.0, pytest.param(5.0, marks=pytest.mark.slow)])
@pytest.mark.parametrize("seed", first_of(4))
def test_devices_far_from_their_profiles_keep_their_budgets(seed: int, weight: float) -> None:
    """Whatever V: accounts pay for what was really spent, and limit what comes next."""
    world = a_world(seed, 2, truth_error=0.4, share=1.8)
    settings = replace(SETTINGS, penalty_weight=weight)
    scheduler = make_scheduler("dssda", settings)
    spent: dict[str, float] = {}
    for done in run_episode(world, scheduler, MODEL, 15, options=settings):
        for cluster in done.outcome.clusters:
            for device, joule in cluster.energy_j.items():
                spent[device] = spent.get(device, 0.0) + joule
    for cluster in world.clusters:
        for device in cluster.devices:
            assert spent.get(device.device_id, 0.0) <= 15 * device.energy_budget_j

"""Accounts keep every budget at any end of a run; queues start at learned prices."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from collapipe_flwr.core.domain import ModelProfile
from collapipe_flwr.scheduler.accounts import (
    GAIN,
    IN_HAND,
    open_accounts,
    settle_accounts,
    settle_placeholders,
)
from collapipe_flwr.scheduler.base import collect_budgets
from collapipe_flwr.scheduler.dssda import choose_spare
from collapipe_flwr.scheduler.multipliers import WEIGHTS, derive_weight
from collapipe_flwr.scheduler.policies import make_scheduler
from collapipe_flwr.scheduler.protocol import REPAID, SchedulerConfig
from collapipe_flwr.simulation.episode import EpisodeStep, run_episode
from collapipe_flwr.simulation.setting import Setting
from collapipe_flwr.simulation.world import World
from tests.thorough import few
from tests.worlds import four_boards, with_devices

SETTINGS = SchedulerConfig(micro_batch_sizes=(4,), micro_batches=(4,), bound=False)
ROUNDS = 12


@pytest.fixture(scope="module")
def world() -> tuple[World, ModelProfile]:
    return four_boards(0.4)


def episode(
    world: tuple[World, ModelProfile], settings: SchedulerConfig, rounds: int = ROUNDS
) -> list[EpisodeStep]:
    scheduler = make_scheduler("dssda", settings)
    return list(run_episode(world[0], scheduler, world[1], rounds, options=settings))


def used(world: World, done: list[EpisodeStep]) -> np.ndarray:
    """Mean energy up to every round over the budget, (T, devices); control units left out."""
    devices = [d for c in world.clusters for d in c.devices]
    joule = [{d: j for c in r.outcome.clusters for d, j in c.energy_j.items()} for r in done]
    spent = np.array([[e[d.device_id] / d.energy_budget_j for d in devices] for e in joule])
    return np.cumsum(spent, axis=0) / np.arange(1, len(done) + 1)[:, None]


@pytest.fixture(scope="module")
def usual(world: tuple[World, ModelProfile]) -> list[EpisodeStep]:
    return episode(world, SETTINGS)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=40), st.floats(0, 5))
def test_accounts_that_never_fall_below_zero_keep_the_average(
    parts: list[float], advance: float
) -> None:
    """Whoever spends within account and share keeps its budget at every end from REPAID on."""
    settings = replace(SETTINGS, energy_advance=advance)
    budgets, accounts, spent = (
        {"c": {"d": 2.0}},
        open_accounts({"c": {"d": 2.0}}, 0, settings),
        [],
    )
    for index, part in enumerate(parts, start=1):
        room = accounts["c"]["d"] + settings.aim_share(index) * 2.0
        spent.append(part * room)
        accounts = settle_accounts(accounts, budgets, {"c": {"d": spent[-1]}}, index, settings)
        assert accounts["c"]["d"] >= -1e-9
        if index >= REPAID or not advance:
            assert sum(spent) / index <= (1.0 - settings.budget_margin) * 2.0 + 1e-9


def test_prices_fall_while_accounts_are_full_and_rise_while_they_are_empty() -> None:
    def moved(held: float, before: float = 5.0) -> float:
        after = settle_placeholders({"c": {"d": before}}, {"c": {"d": held}}, {"c": {"d": 2.0}})
        return after["c"].get("d", 0.0)

    assert moved(IN_HAND * 2.0) == 5.0
    assert moved(2.0) < 5.0 < moved(0.0)
    assert moved(1e9) == 5.0 - GAIN * 2.0 and moved(-1e9) == 5.0 + GAIN * 2.0  # bounded steps
    assert moved(1e9, before=0.0) == 0.0


def test_devices_that_join_late_or_have_no_budget() -> None:
    late = settle_accounts({}, {"c": {"d": 2.0}}, {}, REPAID + 1, SETTINGS)
    assert late["c"]["d"] == pytest.approx(2.0 * (1.0 - SETTINGS.budget_margin))
    assert open_accounts({"c": {"d": math.inf}}, 0, SETTINGS) == {"c": {}}


@pytest.mark.parametrize("advance", few([0.0, 1.0], 1))
def test_every_budget_is_kept_at_any_end_of_a_run(
    world: tuple[World, ModelProfile], advance: float
) -> None:
    settings = replace(SETTINGS, energy_advance=advance, penalty_weight=50.0)
    shares = used(world[0], episode(world, settings))
    first = REPAID - 1 if advance else 0
    assert shares[first:].max() <= 1.0
    assert shares[-1].max() > 0.85  # and what is allowed is used, but for what accounts hold


def test_queues_start_at_prices_near_those_they_end_at(usual: list[EpisodeStep]) -> None:
    state = usual[-1].state
    started, later = (r.state.placeholder_j["cluster-0"] for r in (usual[0], usual[-1]))
    assert any(value > 0.0 for value in started.values())
    budget = state.budget_j["cluster-0"]
    for device, queue in state.energy_queue_j["cluster-0"].items():
        if device in started:  # no queue had to fill up first
            assert (
                abs(queue) + abs(later.get(device, 0.0) - started[device]) <= 2.0 * budget[device]
            )
            assert queue >= -later.get(device, 0.0) - 1e-9


def test_a_round_is_never_much_slower_than_one_that_keeps_its_own_budgets(
    usual: list[EpisodeStep],
) -> None:
    """The mean cost over a short run is within 1 % of the best plan that keeps every round."""
    spare = usual[-1].state.spare_plan
    assert spare is not None
    mean = np.mean([r.plan.rho * r.latency_s for r in usual])
    assert mean <= 1.01 * spare.rho * spare.latency_s


def test_a_spare_plan_is_kept_while_its_devices_are_there(
    world: tuple[World, ModelProfile], usual: list[EpisodeStep]
) -> None:
    state = usual[-1].state
    spare, snapshot = state.spare_plan, world[0].snapshot(1, world[1])
    assert spare is not None
    slower = replace(spare, latency_s=2.0 * spare.latency_s, policy="slower")
    gone, (cluster, *others) = spare.clusters[0].device_ids[0], snapshot.clusters
    without = with_devices(cluster, (d for d in cluster.profile.devices if d.device_id != gone))
    fewer = replace(snapshot, clusters=(without, *others))
    for here, plan, kept in (
        (snapshot, slower, spare),
        (fewer, slower, slower),
        (fewer, replace(slower, fallback="kept the plan of round 1"), spare),
    ):
        assert choose_spare(spare, plan, state.budget_j, SETTINGS, here) is kept


def test_a_device_that_is_away_keeps_its_budget(world: tuple[World, ModelProfile]) -> None:
    snapshot = world[0].snapshot(1, world[1])
    before = collect_budgets({}, snapshot)
    cluster, *others = snapshot.clusters
    away = cluster.profile.devices[0].device_id
    fewer = with_devices(cluster, cluster.profile.devices[1:])
    without = replace(snapshot, clusters=(fewer, *others))
    assert away not in collect_budgets({}, without)[cluster.profile.cluster_id]
    assert collect_budgets(before, without) == before


def test_weights_follow_the_budgets_slack() -> None:
    tight, loose = np.full((2, 3), 0.2), np.full((2, 3), 0.002)
    assert derive_weight(tight) < derive_weight(loose)
    assert derive_weight(np.full((1, 1), 1e3)) == WEIGHTS[0]


def test_an_account_that_is_nearly_empty_does_not_leave_the_search_with_a_far_slower_plan() -> None:
    settings = replace(Setting().settings, max_model_share=1.0, schedule="gpipe")
    setting = Setting(clusters=5, devices=4, settings=settings)
    profile = setting.model.profile()
    scheduler = make_scheduler("dssda", settings)
    done = run_episode(setting.world(61011, profile), scheduler, profile, 5, options=settings)
    costs = [each.plan.rho * each.latency_s for each in done]
    assert max(costs) < 1.05 * min(costs)

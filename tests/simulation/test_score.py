"""Scores: each number recomputed from first principles."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from collapipe_flwr.scheduler.policies import make_scheduler
from collapipe_flwr.simulation.episode import EpisodeStep, run_episode
from collapipe_flwr.simulation.score import Score, make_target, score
from collapipe_flwr.simulation.setting import Setting
from collapipe_flwr.simulation.world import EnergyBudget, World


def _episode(setting: Setting, policy: str) -> tuple[World, list[EpisodeStep], Score]:
    profile = setting.model.profile()
    world = setting.world(0, profile)
    scheduler = make_scheduler(policy, setting.settings)
    rounds = list(run_episode(world, scheduler, profile, setting.rounds))
    target = make_target(world, profile, setting.settings)
    return world, rounds, score(world, profile, 0, rounds, target)


def test_one_busy_device_is_as_efficient_as_its_busy_share(small: Setting) -> None:
    one = replace(small, clusters=1, channel="static")
    world, rounds, result = _episode(one, "fedavg")
    device = rounds[0].plan.clusters[0].segments[0].device_id
    speed = next(d.speed_flop_per_s for d in world.clusters[0].devices if d.device_id == device)
    flop = 3 * 4 * 32 * (24 * 128**2 + 4 * 32 * 128)  # forward and twice that backward, 4 blocks
    busy_s = one.examples * flop / speed
    assert result.busy_share == pytest.approx(busy_s / result.latency_s[0])
    everyone = sum(d.speed_flop_per_s for d in world.clusters[0].devices)
    assert result.compute_efficiency == pytest.approx(result.busy_share * speed / everyone)


def test_energy_is_the_worst_devices_average(small: Setting) -> None:
    world, rounds, result = _episode(small, "dssda")
    shares = []
    for m, cluster in enumerate(world.clusters):
        for device in (cluster.control_unit, *cluster.devices):
            spent = [r.outcome.clusters[m].energy_j[device.device_id] for r in rounds]
            shares.append(np.mean(spent) / device.energy_budget_j)
    assert result.energy_over_budget_max == pytest.approx(max(shares))


def test_average_energy_keeps_within_budget_plus_queue(small: Setting) -> None:
    tight = replace(small, rounds=6, budget=EnergyBudget(joule=1.0))
    _, rounds, result = _episode(tight, "fedavg")
    assert result.energy_over_budget_max > 1
    assert result.energy_over_budget_max <= 1 + result.queue_share[-1] / len(rounds) + 1e-9


def test_time_to_target_of_the_reference_batch_is_its_rounds_times_latency(small: Setting) -> None:
    still = replace(small, channel="static")
    world, _, result = _episode(still, "uniform")
    needed = make_target(world, still.model.profile(), still.settings).reference_rounds
    assert result.time_to_target_s == pytest.approx(needed * result.latency_s[0])


def test_peak_memory_is_the_largest_of_all_members(small: Setting) -> None:
    _, rounds, result = _episode(small, "uniform")
    sizes = [max(c.memory_bytes.values()) for r in rounds for c in r.plan.clusters]
    assert result.peak_device_memory_bytes == max(sizes)

"""Averages of noisy profiles: closer to the truth, quick to follow a real change."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from collapipe_flwr.core.domain import Snapshot
from collapipe_flwr.scheduler.smoothing import smoothed


def with_speed(snapshot: Snapshot, factor: float) -> Snapshot:
    cluster = snapshot.clusters[0]
    devices = tuple(
        replace(d, speed_flop_per_s=d.speed_flop_per_s * factor) for d in cluster.profile.devices
    )
    profile = replace(cluster.profile, devices=devices)
    return replace(snapshot, clusters=(replace(cluster, profile=profile), *snapshot.clusters[1:]))


def speed(snapshot: Snapshot) -> float:
    return snapshot.clusters[0].profile.devices[0].speed_flop_per_s


def test_noise_is_averaged_out(a_snapshot: Callable[..., Snapshot]) -> None:
    truth, averages = a_snapshot(0), {}
    rng, errors = np.random.default_rng(0), []
    for _ in range(60):
        noisy = with_speed(truth, float(rng.uniform(0.7, 1.3)))
        seen, averages = smoothed(noisy, averages, 0.8)
        errors.append(abs(math.log(speed(seen) / speed(truth))))
    assert np.mean(errors[10:]) < 0.09  # the measurements themselves are off by 0.15


def test_a_real_change_is_followed_at_once(a_snapshot: Callable[..., Snapshot]) -> None:
    truth = a_snapshot(0)
    _, averages = smoothed(truth, {}, 0.8)
    throttled = with_speed(truth, 0.3)
    seen, _ = smoothed(throttled, averages, 0.8)
    assert speed(seen) == pytest.approx(speed(throttled))


def test_exact_profiles_and_switched_off_smoothing_change_nothing(
    a_snapshot: Callable[..., Snapshot],
) -> None:
    truth = a_snapshot(0)
    _, averages = smoothed(truth, {}, 0.8)
    assert smoothed(truth, averages, 0.8)[0] == truth
    assert smoothed(with_speed(truth, 1.2), averages, 0.0)[0] == with_speed(truth, 1.2)


def test_unusable_numbers_pass_through(a_snapshot: Callable[..., Snapshot]) -> None:
    seen, averages = smoothed(with_speed(a_snapshot(0), math.nan), {}, 0.8)
    assert math.isnan(speed(seen))
    first = seen.clusters[0].profile.devices[0].device_id
    assert first not in averages["cluster-0"]

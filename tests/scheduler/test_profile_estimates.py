"""Averages of noisy profiles: closer to the truth, quick to follow a real change."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from collapipe_flwr.core.domain import ClusterOutcome, RoundOutcome, Snapshot
from collapipe_flwr.scheduler.estimates import ProfileEstimates, profiles_learned, with_profiles


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
    truth, known = a_snapshot(0), ProfileEstimates()
    rng, errors = np.random.default_rng(0), []
    for _ in range(60):
        noisy = with_speed(truth, float(rng.uniform(0.7, 1.3)))
        seen, known = with_profiles(noisy, known, 0.8)
        errors.append(abs(math.log(speed(seen) / speed(truth))))
    assert np.mean(errors[10:]) < 0.09  # the measurements themselves are off by 0.15


def test_a_real_change_is_followed_at_once(a_snapshot: Callable[..., Snapshot]) -> None:
    truth = a_snapshot(0)
    _, known = with_profiles(truth, ProfileEstimates(), 0.8)
    throttled = with_speed(truth, 0.3)
    seen, _ = with_profiles(throttled, known, 0.8)
    assert speed(seen) == pytest.approx(speed(throttled))


def test_exact_profiles_and_switched_off_smoothing_change_nothing(
    a_snapshot: Callable[..., Snapshot],
) -> None:
    truth = a_snapshot(0)
    _, known = with_profiles(truth, ProfileEstimates(), 0.8)
    assert with_profiles(truth, known, 0.8)[0] == truth
    assert with_profiles(with_speed(truth, 1.2), known, 0.0)[0] == with_speed(truth, 1.2)


def test_unusable_numbers_pass_through(a_snapshot: Callable[..., Snapshot]) -> None:
    seen, known = with_profiles(with_speed(a_snapshot(0), math.nan), ProfileEstimates(), 0.8)
    assert math.isnan(speed(seen))
    first = seen.clusters[0].profile.devices[0].device_id
    assert first not in known.claimed["cluster-0"]


def shown(snapshot: Snapshot, speed_flop_per_s: float) -> RoundOutcome:
    """A round in which the first device worked at that speed."""
    device = snapshot.clusters[0].profile.devices[0]
    name, joule = device.device_id, device.energy_per_flop_j
    cluster = ClusterOutcome(
        cluster_id="cluster-0",
        latency_s=1.0,
        energy_j={name: 1.0},
        speed_flop_per_s={name: speed_flop_per_s},
        energy_per_flop_j={name: joule},
    )
    return RoundOutcome(round_index=1, latency_s=1.0, clusters=(cluster,))


def test_work_done_corrects_a_profile_that_is_always_wrong(
    a_snapshot: Callable[..., Snapshot],
) -> None:
    truth = a_snapshot(0)
    wrong = with_speed(truth, 0.7)
    _, known = with_profiles(wrong, ProfileEstimates(), 0.8)
    known = profiles_learned(known, shown(truth, speed(truth)))
    seen, known = with_profiles(wrong, known, 0.8)
    assert speed(seen) == pytest.approx(speed(truth))
    others = [c.profile.devices[1].speed_flop_per_s for c in (seen.clusters[0], wrong.clusters[0])]
    assert others[0] == pytest.approx(others[1])  # who did not work is believed as before


def test_a_claim_that_changes_outdates_what_was_shown(a_snapshot: Callable[..., Snapshot]) -> None:
    truth = a_snapshot(0)
    _, known = with_profiles(truth, ProfileEstimates(), 0.8)
    known = profiles_learned(known, shown(truth, speed(truth)))
    seen, _ = with_profiles(with_speed(truth, 0.3), known, 0.8)
    assert speed(seen) == pytest.approx(0.3 * speed(truth))


def test_outcomes_without_measurements_or_with_unusable_ones_teach_nothing(
    a_snapshot: Callable[..., Snapshot],
) -> None:
    truth = a_snapshot(0)
    for value in (0.0, math.nan, math.inf):
        assert not profiles_learned(ProfileEstimates(), shown(truth, value)).shown["cluster-0"]
    silent = replace(shown(truth, 1.0).clusters[0], speed_flop_per_s=None)
    outcome = RoundOutcome(round_index=1, latency_s=1.0, clusters=(silent,))
    assert not profiles_learned(ProfileEstimates(), outcome).shown["cluster-0"]

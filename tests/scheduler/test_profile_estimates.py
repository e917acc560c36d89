"""Claims are averaged, and what devices show of themselves corrects them."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from collapipe_flwr.core.domain import DeviceProfile, Snapshot
from collapipe_flwr.core.json_codec import from_json, to_json
from collapipe_flwr.core.outcome import ClusterOutcome, RoundOutcome, StageSample
from collapipe_flwr.costs.measured import EDGE, compute_pass_s
from collapipe_flwr.scheduler.estimates import (
    PATIENCE,
    USUAL_OVERHEAD_S,
    USUAL_STARTS,
    ProfileEstimates,
    estimate_profiles,
    learn_profiles,
)
from collapipe_flwr.scheduler.policies import make_scheduler
from collapipe_flwr.scheduler.protocol import SchedulerConfig
from tests.worlds import draw_snapshot, with_devices


def with_speed(snapshot: Snapshot, factor: float) -> Snapshot:
    cluster = snapshot.clusters[0]
    devices = tuple(
        replace(d, speed_flop_per_s=d.speed_flop_per_s * factor) for d in cluster.profile.devices
    )
    profile = replace(cluster.profile, devices=devices)
    return replace(snapshot, clusters=(replace(cluster, profile=profile), *snapshot.clusters[1:]))


def speed(snapshot: Snapshot) -> float:
    return snapshot.clusters[0].profile.devices[0].speed_flop_per_s


def test_noise_is_averaged_out() -> None:
    truth, known = draw_snapshot(0), ProfileEstimates()
    rng, errors = np.random.default_rng(0), []
    for _ in range(60):
        noisy = with_speed(truth, float(rng.uniform(0.7, 1.3)))
        seen, known = estimate_profiles(noisy, known)
        errors.append(abs(math.log(speed(seen) / speed(truth))))
    assert np.mean(errors[10:]) < 0.09  # the measurements themselves are off by 0.15


def test_a_real_change_is_followed_at_once() -> None:
    truth = draw_snapshot(0)
    _, known = estimate_profiles(truth, ProfileEstimates())
    throttled = with_speed(truth, 0.3)
    seen, _ = estimate_profiles(throttled, known)
    assert speed(seen) == pytest.approx(speed(throttled))


def test_exact_profiles_change_nothing() -> None:
    truth = draw_snapshot(0)
    _, known = estimate_profiles(truth, ProfileEstimates())
    assert estimate_profiles(truth, known)[0] == truth


def test_unusable_numbers_pass_through() -> None:
    seen, known = estimate_profiles(with_speed(draw_snapshot(0), math.nan), ProfileEstimates())
    assert math.isnan(speed(seen))
    assert first(seen).device_id not in known.claimed["cluster-0"]


def first(snapshot: Snapshot) -> DeviceProfile:
    return snapshot.clusters[0].profile.devices[0]


def sample(device: DeviceProfile, *, slower: float = 1.0, size: int = 4) -> StageSample:
    """Two blocks on a device that is so many times slower than its profile."""
    parts = (2.0, 2e8 * size)
    watt = device.speed_flop_per_s * device.energy_per_flop_j
    return StageSample(
        device_id=device.device_id,
        passes=parts[0],
        flop=parts[1],
        busy_s=slower * compute_pass_s(device, *parts),
        watt=watt,
        planned_bytes=1000,
        peak_bytes=1000,
    )


def showing(*samples: StageSample, **measured: float) -> RoundOutcome:
    cluster = ClusterOutcome(cluster_id="cluster-0", latency_s=1.0, energy_j={}, stages=samples)
    return RoundOutcome(round_index=1, latency_s=1.0, clusters=(replace(cluster, **measured),))


def known(snapshot: Snapshot, *outcomes: RoundOutcome) -> ProfileEstimates:
    """After rounds that were planned with that snapshot."""
    estimates = ProfileEstimates()
    for outcome in (None, *outcomes):
        if outcome is not None:
            estimates = learn_profiles(estimates, outcome)
        _, estimates = estimate_profiles(snapshot, estimates)
    return estimates


def planned(snapshot: Snapshot, *outcomes: RoundOutcome) -> Snapshot:
    return estimate_profiles(snapshot, known(snapshot, *outcomes))[0]


def test_samples_that_agree_with_the_profile_leave_the_very_snapshot() -> None:
    truth = draw_snapshot(0)
    agreeing = showing(sample(first(truth)), sample(first(truth), slower=1.01))
    assert planned(truth, agreeing, agreeing) is truth


def test_work_done_corrects_a_profile_that_is_wrong() -> None:
    truth = draw_snapshot(0)
    seen = planned(truth, showing(sample(first(truth), slower=3.0)))
    work = (2.0, 8e8)
    assert compute_pass_s(first(seen), *work) == pytest.approx(
        3 * compute_pass_s(first(truth), *work), rel=0.03
    )
    others = [s.clusters[0].profile.devices[1] for s in (seen, truth)]
    assert others[0] == others[1]  # who did not work is believed as before


@pytest.mark.parametrize("slower", [0.3, 0.5, 2.0, 5.0])
def test_stages_of_microseconds_are_learnt_like_others(slower: float) -> None:
    truth, work = draw_snapshot(0), (2.0, 1e5)
    device = first(truth)
    tiny = replace(
        sample(device), passes=work[0], flop=work[1], busy_s=slower * compute_pass_s(device, *work)
    )
    seen = first(planned(truth, showing(tiny)))
    assert compute_pass_s(seen, *work) == pytest.approx(
        slower * compute_pass_s(device, *work), rel=0.05
    )


def test_a_slower_device_of_known_power_pays_more_per_operation() -> None:
    truth = draw_snapshot(0)
    seen = first(planned(truth, showing(sample(first(truth), slower=4.0))))
    watt = [d.speed_flop_per_s * d.energy_per_flop_j for d in (seen, first(truth))]
    assert watt[0] == pytest.approx(watt[1])
    thirsty = replace(sample(first(truth)), watt=2.0 * watt[1])
    seen = first(planned(truth, showing(thirsty)))
    assert seen.speed_flop_per_s * seen.energy_per_flop_j == pytest.approx(2 * watt[1], rel=0.02)


def test_more_memory_than_planned_leaves_less_to_plan_with() -> None:
    truth = draw_snapshot(0)
    good = sample(first(truth))
    for peak, share in ((1500, 1.5), (500, 1.0), (10**9, 2.0)):
        outcomes = [showing(replace(good, peak_bytes=peak))] * 6
        seen = first(planned(truth, *outcomes))
        assert seen.memory_bytes == pytest.approx(first(truth).memory_bytes / share, rel=0.02)


def test_the_edge_is_learnt_from_every_cluster() -> None:
    truth = draw_snapshot(0)
    flop = 1e9
    late = StageSample(device_id=EDGE, passes=1.0, flop=flop, busy_s=0.5)
    seen = planned(truth, showing(late))
    assert compute_pass_s(seen.edge, 1.0, flop) == pytest.approx(
        8 * compute_pass_s(truth.edge, 0.0, flop) + 8e-3, rel=0.5
    )  # one round moves nothing by more than a factor of 8
    assert compute_pass_s(planned(truth, *[showing(late)] * 4).edge, 1.0, flop) == pytest.approx(
        0.5, rel=0.05
    )


def test_a_claim_that_changes_outdates_what_was_shown() -> None:
    truth = draw_snapshot(0)
    estimates = known(truth, showing(sample(first(truth), slower=1.5)))
    throttled = with_speed(truth, 0.3)
    seen, _ = estimate_profiles(throttled, estimates)
    assert speed(seen) == pytest.approx(0.3 * speed(truth))


def test_who_does_not_work_is_tried_again_and_one_look_suffices() -> None:
    truth = draw_snapshot(0)
    slow, idle = showing(sample(first(truth), slower=4.0)), showing()
    work = (2.0, 8e8)

    def slower(*outcomes: RoundOutcome) -> float:
        return compute_pass_s(first(planned(truth, *outcomes)), *work) / compute_pass_s(
            first(truth), *work
        )

    rest = [idle] * PATIENCE
    assert slower(slow, *rest[1:]) == pytest.approx(4.0, rel=0.03)
    assert slower(slow, *rest) == 1.0
    assert slower(slow, *rest, slow) == pytest.approx(4.0, rel=0.05)
    assert slower(slow, *rest, slow, *rest) == pytest.approx(4.0, rel=0.05)
    assert slower(slow, *rest, slow, *rest, *rest) == 1.0
    recovered = showing(sample(first(truth)))
    assert slower(slow, *rest, recovered) == pytest.approx(1.0, rel=0.05)


@pytest.mark.parametrize("value", [0.0, math.nan, math.inf, -1.0])
def test_unusable_samples_teach_nothing(value: float) -> None:
    truth = draw_snapshot(0)
    bad = replace(sample(first(truth)), busy_s=value, watt=value)
    assert planned(truth, showing(bad), showing(bad)) is truth
    late = showing(latency_s=value, explained_s=1.0, measured=True)
    assert planned(truth, late).clusters[0].profile.overhead_s < 0.1


def test_what_a_round_takes_besides_is_learnt_from_machines_only() -> None:
    truth = machines(draw_snapshot(0))
    one = sample(first(truth))
    slow = showing(one, latency_s=60.0, explained_s=3.0, measured=True)
    late = showing(one, latency_s=3.5, explained_s=3.0, measured=True)
    seen = planned(truth, slow, late)  # what a first round took is no measure
    besides_s = seen.clusters[0].profile.overhead_s + first(seen).round_s
    assert 3.0 + besides_s == pytest.approx(3.5, rel=0.05)
    assert besides_s > 1.5 * (0.1 + 0.1)  # what is usual before
    simulated = showing(one, latency_s=3.5, explained_s=3.0)
    assert planned(truth, simulated, simulated) == planned(truth)


def test_before_any_round_machines_are_planned_with_its_usual_overheads() -> None:
    simulated = draw_snapshot(0)
    assert planned(simulated) is simulated
    truth = machines(simulated).clusters[0]
    claimed = truth.profile.with_members(
        lambda d: replace(d, overhead_s=0.0 if d is truth.profile.devices[0] else 0.02)
    )
    found = planned(replace(simulated, clusters=(replace(truth, profile=claimed),)))
    assert found.clusters[0].profile.overhead_s == pytest.approx(0.02 * USUAL_STARTS)
    unknown, known_s, *_ = (device.round_s for device in found.clusters[0].profile.devices)
    assert unknown == pytest.approx(USUAL_OVERHEAD_S * USUAL_STARTS)
    assert known_s == pytest.approx(0.02 * USUAL_STARTS)


def machines(snapshot: Snapshot) -> Snapshot:
    first, *others = snapshot.clusters
    real = replace(first, profile=replace(first.profile, real_links=True))
    return replace(snapshot, clusters=(real, *others))


def test_a_round_with_slower_devices_is_expected_to_take_longer_besides() -> None:
    truth = machines(draw_snapshot(0))
    slow, *_, last = truth.clusters[0].profile.devices
    slow, quick = replace(slow, overhead_s=0.06), replace(last, overhead_s=0.01)
    (cluster, *others), devices = truth.clusters, (slow, quick)
    unit = replace(cluster.profile.control_unit, overhead_s=0.02)
    cluster = replace(cluster, profile=replace(cluster.profile, control_unit=unit))
    truth = replace(truth, clusters=(with_devices(cluster, devices), *others))

    def round_s(*working: DeviceProfile) -> float:
        return 40 * 0.02 + 60 * max(device.overhead_s for device in working)

    def besides_s(seen: Snapshot, *names: str) -> float:
        found = seen.clusters[0].profile
        return found.overhead_s + max(d.round_s for d in found.devices if d.device_id in names)

    def shown(*working: DeviceProfile) -> RoundOutcome:
        took_s = 3.0 + round_s(*working)
        return showing(*map(sample, working), latency_s=took_s, explained_s=3.0, measured=True)

    rounds = [shown(quick), shown(quick), shown(slow, quick), shown(slow), shown(quick)]
    seen = planned(truth, *rounds)
    for device in (slow, quick):
        expected_s = round_s(device)
        # as a share of the round: what plans are judged by
        assert besides_s(seen, device.device_id) - expected_s == pytest.approx(
            0.0, abs=0.1 * (3.0 + expected_s)
        )
    assert besides_s(seen, slow.device_id) > 1.5 * besides_s(seen, quick.device_id)


def test_estimates_survive_a_checkpoint() -> None:
    truth = draw_snapshot(0)
    estimates = known(truth, showing(sample(first(truth), slower=3.0)))
    assert from_json(ProfileEstimates, to_json(estimates), "estimates") == estimates


@pytest.mark.parametrize("policy", ["dssda", "uniform"])
def test_memory_that_seems_too_small_for_any_plan_ends_no_run(policy: str) -> None:
    settings = SchedulerConfig(micro_batch_sizes=(4,), micro_batches=(4,))
    scheduler, truth = make_scheduler(policy, settings), draw_snapshot(0, clusters=1)
    state = scheduler.init(truth)
    plan, state = scheduler.step(state, truth)
    peak = max(plan.clusters[0].memory_bytes.values())
    tight = replace(
        truth.clusters[0],
        profile=truth.clusters[0].profile.with_members(
            lambda d: replace(d, memory_bytes=int(1.1 * peak / 0.95))
        ),
    )
    snapshot = replace(truth, clusters=(tight,))
    plan, state = scheduler.step(state, snapshot)
    samples = tuple(
        replace(sample(d), planned_bytes=1000, peak_bytes=10**9) for d in tight.profile.members
    )
    for _ in range(3):
        state = scheduler.observe(state, plan, showing(*samples))
        plan, state = scheduler.step(state, snapshot)
        assert plan.clusters

"""Channel measurements are trusted while they forecast well, doubted when not, trusted again."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice

import pytest

from collapipe_flwr.core.domain import ModelProfile
from collapipe_flwr.core.errors import ScheduleError
from collapipe_flwr.core.json_codec import from_json, to_json
from collapipe_flwr.core.outcome import ClusterOutcome, RoundOutcome
from collapipe_flwr.scheduler.gain_estimates import (
    CAUTION,
    RobustGains,
    average_gains,
    make_robust,
    measure_error,
)
from collapipe_flwr.scheduler.policies import make_scheduler
from collapipe_flwr.scheduler.protocol import Scheduler, SchedulerConfig, SchedulerState
from collapipe_flwr.simulation.world import World
from tests.worlds import draw_snapshot, draw_world, outcome_of

FAST = SchedulerConfig(micro_batch_sizes=(4,), micro_batches=(4,))


def outcome(latency_s: float, **others_s: float) -> RoundOutcome:
    """Of cluster a, and of others by name."""
    clusters = tuple(
        ClusterOutcome(cluster_id=name, latency_s=seconds, energy_j={})
        for name, seconds in {"a": latency_s, **others_s}.items()
    )
    longest_s = max(latency_s, *others_s.values()) if others_s else latency_s
    return RoundOutcome(round_index=1, latency_s=longest_s, clusters=clusters)


def follow(
    delays: Iterable[int], world: World, model: ModelProfile, policy: Scheduler
) -> Iterator[SchedulerState]:
    """The states after rounds whose snapshots were so many rounds old."""
    state = policy.init(world.snapshot(1, model))
    for index, delay in enumerate(delays, start=1):
        truth = world.snapshot(index, model)
        seen = replace(world.snapshot(max(index - delay, 1), model), round_index=index)
        plan, state = policy.step(state, seen)
        state = policy.observe(state, plan, outcome_of(plan, truth, FAST))
        yield state


def test_measurements_of_today_are_never_doubted() -> None:
    world, model = draw_world(1, clusters=1, radio="wifi")
    for state in follow([0] * 4, world, model, make_scheduler("dssda", FAST)):
        gains = state.doubt
        assert gains.error < 1e-6 and not gains.careful and not gains.average


def test_old_measurements_of_a_fading_channel_are_doubted_and_fresh_ones_trusted_again() -> None:
    world, model = draw_world(1, clusters=1, radio="5g")
    states = follow([1] * 8 + [0] * 20, world, model, make_scheduler("dssda", FAST))
    *_, late = islice(states, 8)
    assert late.doubt.careful and late.doubt.rounds >= 2
    again = from_json(SchedulerState, to_json(late), "state")
    assert to_json(again) == to_json(late)
    assert any(not fresh.doubt.careful and not fresh.doubt.average for fresh in states)


def test_plans_are_careful_from_far_off_until_well_forecast() -> None:
    snapshot, gains, story = draw_snapshot(0), RobustGains(), []
    for took_s in (1.0, 1.02, 1.06, 1.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0):
        gains = measure_error(
            replace(average_gains(gains, snapshot), forecast_s={"a": 1.0}), outcome(took_s)
        )
        story.append(average_gains(gains, snapshot).careful)
    assert story == [False, False, False, *[True] * 5, *[False] * 3]
    assert measure_error(RobustGains(error=0.2), outcome(1.0)).error == 0.2  # nothing was forecast


def test_clusters_that_failed_or_come_late_spoil_no_forecast() -> None:
    forecast = RobustGains(forecast_s={"a": 1.0, "failed": 4.0})
    assert measure_error(forecast, outcome(1.0)).error == 0.0
    assert measure_error(forecast, outcome(1.0, late=40.0)).error == 0.0
    assert measure_error(forecast, outcome(2.0, late=40.0)).error == pytest.approx(
        0.5 * math.log(2)
    )


def test_cautious_gains_are_a_share_of_the_average() -> None:
    snapshot = draw_snapshot(0)
    weak = replace(snapshot.clusters[0].channel, edge_gain=(0.0,) * 4)
    faded = replace(
        snapshot, clusters=(replace(snapshot.clusters[0], channel=weak), *snapshot.clusters[1:])
    )
    gains = average_gains(average_gains(RobustGains(error=1.0), snapshot), faded)
    assert gains.rounds == 2
    true, used = (s.clusters[0].channel for s in (snapshot, make_robust(gains, snapshot)))
    assert used.edge_gain == pytest.approx([0.5 * CAUTION * g for g in true.edge_gain])
    assert used.d2d_gain[0] == pytest.approx([CAUTION * g for g in true.d2d_gain[0]])


def test_unusable_gains_are_refused_before_they_spoil_the_average() -> None:
    snapshot = draw_snapshot(0)
    broken = replace(snapshot.clusters[0].channel, edge_gain=(math.nan,) * 4)
    bad = replace(snapshot, clusters=(replace(snapshot.clusters[0], channel=broken),))
    with pytest.raises(ScheduleError, match="gains to the edge"):
        average_gains(RobustGains(error=1.0), bad)

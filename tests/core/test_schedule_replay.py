"""The event simulator against the closed form, and what it says about 1F1B."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from collapipe_flwr.core.errors import ScheduleError
from collapipe_flwr.core.replay import StepTimes, replay
from collapipe_flwr.costs.makespan import compute_gpipe_makespan_s
from tests.thorough import examples


def random_times(seed: int, stages: int) -> StepTimes:
    rng = np.random.default_rng(seed)

    def draw(count: int) -> tuple[float, ...]:
        return tuple(rng.choice([0.01, 0.1, 1.0], count) * rng.uniform(0.1, 1.0, count))

    return StepTimes(
        stage_s=(draw(stages), draw(stages)),
        hop_s=(draw(stages - 1), draw(stages - 1)),
    )


def closed_form(times: StepTimes, count: int) -> float:
    return float(compute_gpipe_makespan_s(times.stage_s, times.hop_s, count))


@examples(40, 150)
@given(st.integers(0, 10**6), st.integers(2, 7), st.integers(1, 9))
def test_gpipe_closed_form_is_exact(seed: int, stages: int, count: int) -> None:
    times = random_times(seed, stages)
    assert replay(times, [count] * stages, count).makespan_s == pytest.approx(
        closed_form(times, count), rel=1e-12
    )


@examples(25, 80)
@given(st.integers(0, 10**6), st.integers(2, 6), st.integers(1, 8))
def test_no_schedule_beats_the_busiest_resource_or_one_round_trip(
    seed: int, stages: int, count: int
) -> None:
    times = random_times(seed, stages)
    trip = sum(sum(part) for part in (*times.stage_s, *times.hop_s))
    busiest = max(f + r for f, r in zip(*times.stage_s, strict=True))
    for depth in range(1, count + 1):
        makespan = replay(times, [depth] * stages, count).makespan_s
        assert makespan >= max(trip, count * busiest) * (1 - 1e-12)


def test_plain_1f1b_is_slower_than_gpipe_over_slow_links() -> None:
    """Its warm-up does not hide the links; twice as deep it does, and wins where links dominate."""
    even = StepTimes(stage_s=((1.0,) * 4, (1.0,) * 4), hop_s=((1.0,) * 3, (1.0,) * 3))
    assert replay(even, [4, 3, 2, 1], 8).makespan_s > 1.2 * closed_form(even, 8)
    slow = StepTimes(stage_s=((1.0,) * 4, (1.0,) * 4), hop_s=((2.0,) * 3, (2.0,) * 3))
    assert replay(slow, [8, 6, 4, 2], 8).makespan_s < 0.9 * closed_form(slow, 8)


def test_resources_do_one_thing_at_a_time() -> None:
    trace = replay(random_times(3, 4), [4, 3, 2, 1], 6)
    for name in {span.resource for span in trace.spans}:
        spans = sorted((s.start_s, s.end_s) for s in trace.spans if s.resource == name)
        assert all(a[1] <= b[0] + 1e-12 for a, b in pairwise(spans))


def test_depths_must_match_stages() -> None:
    with pytest.raises(ScheduleError, match="as many depths"):
        replay(random_times(0, 3), [1, 1], 2)

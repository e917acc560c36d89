"""Warm-up depths beside all that there are: as fast, and none in flight for nothing."""

from __future__ import annotations

import random
from itertools import product

import numpy as np
import pytest

from collapipe_flwr.core.replay import StepTimes, replay
from collapipe_flwr.costs.makespan import compute_gpipe_makespan_s, compute_step_makespan_s
from collapipe_flwr.costs.warm_up import AS_GOOD, choose_warm_up, compute_one_f_one_b_s
from collapipe_flwr.costs.work import PricingOptions


def times(stage_s: tuple[float, ...], hop_s: float = 0.0) -> StepTimes:
    """Backward passes take twice as long as ``stage_s``; every hop the same."""
    hops = (hop_s,) * (len(stage_s) - 1)
    return StepTimes(stage_s=(stage_s, tuple(2.0 * s for s in stage_s)), hop_s=(hops, hops))


def shortest_s(step: StepTimes, limit: list[int], micro_batches: int) -> float:
    """Of all depths that do not rise."""
    every = product(*(range(1, most + 1) for most in limit))
    falling = [depths for depths in every if list(depths) == sorted(depths, reverse=True)]
    return min(replay(step, depths, micro_batches).makespan_s for depths in falling)


def drawn(seed: int) -> tuple[StepTimes, list[int], int]:
    """A pipeline: with light ends or without, slow links or fast ones, short of memory or not."""
    rng = random.Random(seed)
    stages, micro_batches = rng.choice([2, 3, 4]), rng.choice([4, 6])
    stage_s = [rng.uniform(0.2, 1.0) for _ in range(stages)]
    if seed % 2:
        stage_s[0], stage_s[-1] = 0.02, 0.05
    limit = [micro_batches] * stages
    if seed % 3 == 0:
        limit = sorted((rng.randint(1, micro_batches) for _ in range(stages)), reverse=True)
    return times(tuple(stage_s), rng.choice([0.0, 0.05, 0.3, 1.0])), tuple(limit), micro_batches


def test_a_step_takes_about_as_long_as_with_the_best_depths() -> None:
    ratios = []
    for seed in range(100):
        step, limit, micro_batches = drawn(seed)
        found = choose_warm_up(step, limit, micro_batches)
        assert found.makespan_s == replay(step, found.depths, micro_batches).makespan_s
        assert all(depth <= most for depth, most in zip(found.depths, limit, strict=True))
        ratios.append(found.makespan_s / shortest_s(step, limit, micro_batches))
    assert max(ratios) < 1.0 + AS_GOOD


def test_no_depths_undercut_the_bound_and_the_best_come_near_it() -> None:
    """Far nearer than to what is known without memories and without how fast stages are fed."""
    plain, close = [], []
    for seed in range(90):
        step, limit, micro_batches = drawn(seed)
        least = shortest_s(step, list(limit), micro_batches)
        count, held = np.array(float(micro_batches)), np.array(limit, dtype=float)
        for found, most in ((plain, None), (close, held)):
            bound = compute_step_makespan_s(
                PricingOptions(), step.stage_s, step.hop_s, count, held=most
            )
            assert bound <= least * (1.0 + 1e-12), seed
            found.append(least / float(bound) - 1.0)
    assert np.mean(close) < 0.2 * np.mean(plain)
    assert np.median(close) < 1e-9


def test_more_in_flight_pays_where_no_stage_has_too_many() -> None:
    """On the third stage alone; with one more on all stages down to it a step takes longer."""
    limit, micro_batches = (7, 7, 6, 3), 8
    step = times((0.04, 0.16, 0.13, 0.08), 0.05)
    found = choose_warm_up(step, limit, micro_batches)
    assert found.depths == (7, 6, 3, 1)
    assert found.makespan_s == shortest_s(step, list(limit), micro_batches)


@pytest.mark.parametrize("seed", range(20))
def test_no_stage_has_more_in_flight_than_it_needs(seed: int) -> None:
    step, limit, micro_batches = drawn(seed)
    found = choose_warm_up(step, limit, micro_batches)
    for stage, depth in enumerate(found.depths[:-1]):
        if depth > found.depths[stage + 1]:
            fewer = (*found.depths[:stage], depth - 1, *found.depths[stage + 1 :])
            slower_s = replay(step, fewer, micro_batches).makespan_s
            assert slower_s > found.makespan_s


def test_waves_end_exactly_when_a_replay_does() -> None:
    rng = random.Random(7)
    for seed in range(300):
        step, limit, micro_batches = drawn(seed)
        depths = tuple(sorted((rng.randint(1, most + 1) for most in limit), reverse=True))
        replayed_s = replay(step, depths, micro_batches).makespan_s
        assert compute_one_f_one_b_s(step, depths, micro_batches) == replayed_s


def test_no_step_takes_longer_than_gpipe_where_that_fits() -> None:
    """Within the tolerance of the search: 1F1B with planned depths may be the default."""
    for seed in range(300):
        step, _, micro_batches = drawn(seed)
        found = choose_warm_up(step, (micro_batches,) * step.stages, micro_batches)
        gpipe_s = float(compute_gpipe_makespan_s(step.stage_s, step.hop_s, micro_batches))
        assert found.makespan_s <= gpipe_s * (1.0 + AS_GOOD)


def test_equal_stages_over_free_links_warm_up_as_the_textbook_says() -> None:
    assert choose_warm_up(times((1.0, 1.0, 1.0)), (8, 8, 8), 8).depths == (3, 2, 1)


def test_a_slower_first_stage_goes_on_while_its_first_gradient_is_made() -> None:
    """With 2 in flight it would wait: two forwards end at 4, the first gradient is there at 5."""
    step = times((2.0, 1.0))
    found = choose_warm_up(step, (8, 8), 8)
    assert found == ((3, 1), 8 * 6.0)
    assert replay(step, (2, 1), 8).makespan_s == found.makespan_s + 1.0


def test_slow_links_are_hidden_by_stages_ahead_of_them_alone() -> None:
    found = choose_warm_up(times((1.0, 1.0), hop_s=1.0), (8, 8), 8)
    assert found.depths[1] == 1
    assert found.makespan_s <= replay(times((1.0, 1.0), hop_s=1.0), (8, 8), 8).makespan_s

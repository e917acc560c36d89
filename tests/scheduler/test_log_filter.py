"""The filter behind all estimates of devices: it learns, follows, forgets and is hard to fool."""

from __future__ import annotations

import math

import numpy as np
import pytest

from collapipe_flwr.scheduler.log_filter import GATE, NOISE, STEP, LogFilter, Prior

STAGE = Prior(own=(1.5, 0.3), common=1.0)
CLAIM = LogFilter(mean=(math.log(1e-3), math.log(1e-10)))
OVERHEAD_S, PER_FLOP_S = 2e-3, 4e-11
BLOCKS = 3.0


def flop(size: int) -> float:
    return BLOCKS * size * 2e7


def seconds(size: int) -> float:
    return BLOCKS * OVERHEAD_S + flop(size) * PER_FLOP_S


def settled(noise: float = 0.0, rounds: int = 20) -> LogFilter:
    rng, known = np.random.default_rng(3), CLAIM
    for index in range(rounds):
        size = (1, 16)[index % 2]
        value = seconds(size) * math.exp(float(rng.normal(0.0, noise)))
        known = known.observe((BLOCKS, flop(size)), value, STAGE)
    return known


def test_overhead_and_speed_are_told_apart_by_two_sizes() -> None:
    overhead, per_flop = settled().values
    assert overhead == pytest.approx(OVERHEAD_S, rel=0.05)
    assert per_flop == pytest.approx(PER_FLOP_S, rel=0.05)
    for size in (2, 4, 8, 64):
        error = settled().compute_error((BLOCKS, flop(size)), seconds(size))
        assert abs(error) < 0.03


@pytest.mark.parametrize("seed", range(20))
def test_three_rounds_suffice_whatever_the_claim(seed: int) -> None:
    rng = np.random.default_rng(seed)
    truth = float(rng.uniform(1 / 60, 60.0)) * (CLAIM.expect(parts := (2.0, 5e8)))
    known = CLAIM
    for _ in range(2):
        known = known.observe(parts, truth * math.exp(float(rng.normal(0.0, 0.02))), STAGE)
    assert abs(known.compute_error(parts, truth)) < 0.1


@pytest.mark.parametrize("factor", [4.0, 1 / 4, 2.0, 1.3])
def test_a_change_is_believed_when_it_is_seen_twice(factor: float) -> None:
    parts = (BLOCKS, flop(16))
    known, now = settled(0.02), factor * seconds(16)
    for _ in range(2):
        known = known.observe(parts, now, STAGE)
    assert abs(known.compute_error(parts, now)) < 0.1
    for _ in range(2):
        known = known.observe(parts, seconds(16), STAGE)
    assert abs(known.compute_error(parts, seconds(16))) < 0.1


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_what_is_no_number_changes_nothing(value: float) -> None:
    known = settled(0.02)
    assert known.observe((BLOCKS, flop(16)), value, STAGE) is known


@pytest.mark.parametrize("jump", [1000.0, 1e-3, 10.0])
def test_one_false_reading_moves_an_estimate_by_less_than_the_gate(jump: float) -> None:
    parts, known = (BLOCKS, flop(16)), settled(0.02)
    before = known.expect(parts)
    spread = known._drift(STAGE)
    share = np.array(parts) * np.array(known.values) / before
    after = known.observe(parts, jump * seconds(16), STAGE)
    bound = GATE * math.sqrt(float(share @ spread @ share) + NOISE**2)
    assert abs(after.compute_error(parts, before)) < bound < 0.4
    for _ in range(2):
        after = after.observe(parts, seconds(16), STAGE)
    assert abs(after.compute_error(parts, seconds(16))) < 0.1


def test_a_sensor_that_is_wrong_for_ever_moves_by_a_bounded_step_per_round() -> None:
    parts, known = (BLOCKS, flop(16)), settled(0.02)
    for _ in range(8):
        before, known = known, known.observe(parts, 1000.0 * seconds(16), STAGE)
        assert abs(known.compute_error(parts, before.expect(parts))) <= STEP + 1e-9


def test_false_readings_now_and_then_are_outvoted() -> None:
    parts, known = (BLOCKS, flop(16)), settled(0.02)
    rng = np.random.default_rng(5)
    errors = []
    for index in range(60):
        false = 1000.0 if index % 4 == 0 else 1.0
        value = false * seconds(16) * math.exp(float(rng.normal(0.0, 0.02)))
        known = known.observe(parts, value, STAGE)
        errors.append(abs(known.compute_error(parts, seconds(16))))
    assert max(errors) < 0.4 and np.median(errors) < 0.05


def test_noise_is_averaged_out_and_never_freezes_the_estimate() -> None:
    parts = (BLOCKS, flop(16))
    rng, known, errors = np.random.default_rng(1), settled(0.05), []
    for index in range(200):
        truth = seconds(16) * (1.0 + 0.003 * index)  # a slow drift, as of warming hardware
        value = truth * math.exp(float(rng.normal(0.0, 0.05)))
        known = known.observe(parts, value, STAGE)
        errors.append(abs(known.compute_error(parts, truth)))
    assert np.mean(errors) < 0.05
    assert np.sqrt(np.diag(np.array(known.spread))).max() <= 1.9


def test_parts_that_are_certain_stay() -> None:
    """As the overhead of rounds: latency = explained + overhead."""
    certain = Prior(own=(0.0, 2.0))
    known = LogFilter(mean=(0.0, math.log(0.01)))
    for _ in range(6):
        known = known.observe((2.0, 1.0), 2.5, certain)
    assert known.values[0] == 1.0
    assert known.values[1] == pytest.approx(0.5, rel=0.05)

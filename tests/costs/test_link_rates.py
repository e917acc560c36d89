"""The rate of a wire is found from both ends' notes, whatever their clocks and the pace say."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from collapipe_flwr.core.links import Note
from collapipe_flwr.core.wire import measure_bit_per_s

RATE = 8e6  # bits per second
DELAY_S, AHEAD_S = 0.02, 5000.0
Jitter = Callable[[int], float]


def over_wire(
    frames: Sequence[tuple[float, int]],
    jitter: Jitter = lambda _: 0.0,
    *,
    stream: int = 1,
    ahead_s: float = AHEAD_S,
) -> tuple[list[Note], list[Note]]:
    """Notes of both ends; frames are (sent at, bytes), the receiver's clock is ahead."""
    free_s, sent, arrived = 0.0, [], []
    for index, (at_s, size) in enumerate(frames):
        free_s = max(at_s, free_s) + 8 * size / RATE + 0.0002
        sent.append((stream, index, at_s, size))
        arrived.append((stream, index, free_s + DELAY_S + ahead_s + jitter(index), size))
    return sent, arrived


def steps(gap_s: float, size: int = 100_000, count: int = 6) -> list[tuple[float, int]]:
    """Six steps of a small frame, large ones every ``gap_s``, and a small one a second later."""
    found = []
    for step in range(6):
        start_s = 10.0 * step
        found += [(start_s, 100), *((start_s + k * gap_s, size) for k in range(count))]
        found.append((start_s + 5.0, 100))
    return found


@pytest.mark.parametrize("gap_s", [0.0, 0.05, 0.3], ids=["burst", "queue", "idle"])
@pytest.mark.parametrize("size", [20_000, 100_000])
def test_bursts_queues_and_idle_wires_tell_the_same_rate(gap_s: float, size: int) -> None:
    assert measure_bit_per_s(*over_wire(steps(gap_s, size))) == pytest.approx(RATE, rel=0.02)


def test_frames_that_arrive_together_are_counted_together() -> None:
    sent, arrived = over_wire(steps(0.0))
    ends = {index // 8: at_s for _, index, at_s, size in arrived if size > 100}  # of each step
    late = [(s, i, ends[i // 8] if size > 100 else at, size) for s, i, at, size in arrived]
    assert measure_bit_per_s(sent, late) == pytest.approx(RATE, rel=0.02)


def test_the_first_frame_may_be_the_only_small_one() -> None:
    frames = steps(0.05)
    only = [frames[0], *(frame for frame in frames if frame[1] > 100)]
    assert measure_bit_per_s(*over_wire(only)) == pytest.approx(RATE, rel=0.02)


def test_frames_that_were_held_up_change_nothing() -> None:
    held = over_wire(steps(0.3), lambda index: 0.25 if index % 11 == 3 else 0.0)
    assert measure_bit_per_s(*held) == pytest.approx(RATE, rel=0.02)


def in_streams(drift_s: float = 0.0) -> tuple[list[Note], list[Note]]:
    """Every step in a stream of its own, while the clocks drift apart."""
    sent: list[Note] = []
    arrived: list[Note] = []
    frames = steps(0.05)
    for step in range(6):
        own = frames[8 * step : 8 * step + 8]
        here, there = over_wire(own, stream=step, ahead_s=AHEAD_S + step * drift_s)
        sent, arrived = sent + here, arrived + there
    return sent, arrived


@pytest.mark.parametrize("drift_s", [0.0, 0.3, -0.3])
def test_streams_one_after_the_other_tell_the_rate_of_one(drift_s: float) -> None:
    assert measure_bit_per_s(*in_streams(drift_s)) == pytest.approx(RATE, rel=0.02)


def test_a_stream_that_only_one_end_counts_changes_nothing() -> None:
    sent, arrived = in_streams()
    void, _ = over_wire(steps(0.01), stream=9)
    assert measure_bit_per_s([*void, *sent], arrived) == measure_bit_per_s(sent, arrived)
    assert measure_bit_per_s(arrived, [*void, *sent]) == measure_bit_per_s(arrived, sent)


def test_a_stream_that_lost_its_small_frames_is_left_out() -> None:
    sent, arrived = in_streams(0.3)
    late = [note for note in arrived if note[0] != 2 or note[-1] > 100]
    assert measure_bit_per_s(sent, late) == pytest.approx(RATE, rel=0.02)


def test_noise_of_schedulers_is_averaged_out() -> None:
    late = np.random.default_rng(0).exponential(0.002, 100)
    noisy = over_wire(steps(0.05), lambda index: float(late[index]))
    assert measure_bit_per_s(*noisy) == pytest.approx(RATE, rel=0.1)


def test_only_frames_that_both_ends_noted_count() -> None:
    sent, arrived = over_wire(steps(0.0))
    assert measure_bit_per_s(sent[7:], arrived[:-3]) == pytest.approx(RATE, rel=0.02)
    assert measure_bit_per_s(sent, []) is None
    assert measure_bit_per_s(sent[:3], arrived[:3]) is None


def test_without_small_frames_nobody_can_tell_delay_from_rate() -> None:
    sent, arrived = over_wire([(k * 1.0, 100_000) for k in range(20)])
    assert measure_bit_per_s(sent, arrived) is None


def test_where_messages_cost_more_than_the_wire_the_rate_is_a_lower_bound() -> None:
    late = np.random.default_rng(0).exponential(0.02, 100)
    busy = over_wire(steps(0.3, size=2_000), lambda index: float(late[index]))
    rate = measure_bit_per_s(*busy)
    assert rate is not None and 0.1 * RATE < rate < RATE

"""Bubbles of schedules that can be worked out by hand: their causes, and that nothing is lost."""

from __future__ import annotations

from collections.abc import Sequence
from math import fsum, isclose

import pytest

from benchmarks.rounds.bubbles import (
    BUBBLES,
    DRAINING,
    FILLING,
    FRAMES,
    GRADIENT,
    LINK,
    LOOP,
    PASSES,
    UPSTREAM,
    Member,
    split_pipeline,
)
from collapipe_flwr.core.measurements import Span


def span(work: str, step: int, micro_batch: int, start_s: float, stop_s: float) -> Span:
    return Span(work=work, step=step, micro_batch=micro_batch, start_s=start_s, stop_s=stop_s)


def gpipe(
    forward_s: Sequence[float],
    micro_batches: int,
    *,
    hop_s: float = 0.0,
    encode_s: float = 0.0,
    steps: int = 1,
) -> list[list[Member]]:
    """Stages that do all forward passes, then all backward passes, twice as long.

    A frame takes a stage ``encode_s`` and then arrives after ``hop_s``; orders are free.
    """
    last = len(forward_s) - 1
    spans: list[list[Span]] = [[] for _ in forward_s]
    now_s = [0.0] * len(forward_s)

    def do(stage: int, work: str, step: int, number: int, came_s: float) -> float:
        """The pass and its frame; returns when the frame arrives."""
        receives = stage if work == "forward" else last - stage
        start_s = max(now_s[stage], came_s) if receives else now_s[stage]
        if receives:
            spans[stage].append(span("receive", step, number, now_s[stage], start_s))
        stop_s = start_s + forward_s[stage] * (1 if work == "forward" else 2)
        spans[stage].append(span(work, step, number, start_s, stop_s))
        now_s[stage] = stop_s
        if last - stage if work == "forward" else stage:
            now_s[stage] += encode_s
            spans[stage].append(span("send", step, number, stop_s, now_s[stage]))
        return now_s[stage] + hop_s

    for step in range(steps):
        now_s[:] = [now_s[0], *(max(now, now_s[0]) for now in now_s[1:])]
        for work, order in (("forward", range(last + 1)), ("backward", range(last, -1, -1))):
            came_s = [0.0] * micro_batches
            for stage in order:
                for number in range(micro_batches):
                    came_s[number] = do(stage, work, step, number, came_s[number])
    return [
        [Member(name=f"stage {n}", spans=found, down_s=hop_s, up_s=hop_s)]
        for n, found in enumerate(spans)
    ]


def seconds(parts: dict[str, float]) -> dict[str, float]:
    return {part: round(value, 9) for part, value in parts.items() if value}


def test_three_even_stages_and_four_micro_batches() -> None:
    """Of 18 s each computes 12; the bubble is 6 everywhere, as theory says: (K - 1) (F + B)."""
    found = split_pipeline(gpipe([1.0, 1.0, 1.0], 4))
    assert [seconds(parts) for parts in found.values()] == [
        {PASSES: 12.0, GRADIENT: 6.0},
        {PASSES: 12.0, FILLING: 1.0, GRADIENT: 3.0, DRAINING: 2.0},
        {PASSES: 12.0, FILLING: 2.0, DRAINING: 4.0},
    ]


def test_a_slow_stage_holds_up_those_around_it_and_each_names_its_side() -> None:
    """The middle stage takes twice as long: the last waits a second for each activation.

    Forward passes of the middle end at 3, 5, 7 and 9, so those of the last end at 10; its backward
    passes end at 12, 14, 16, 18, those of the middle at 16, 20, 24 and 28, the first's at 30.
    """
    found = split_pipeline(gpipe([1.0, 2.0, 1.0], 4))
    assert [seconds(parts) for parts in found.values()] == [
        {PASSES: 12.0, GRADIENT: 18.0},
        {PASSES: 24.0, FILLING: 1.0, GRADIENT: 3.0, DRAINING: 2.0},
        {PASSES: 12.0, FILLING: 3.0, UPSTREAM: 3.0, DRAINING: 12.0},
    ]


def test_seconds_in_flight_are_those_of_the_link_and_of_frames() -> None:
    """A hop of half a second, a quarter to encode, one micro-batch.

    The last stage computes from 1.75 to 4.75, so the gradient arrives at 5.5 and all ends at 7.5.
    """
    found = split_pipeline(gpipe([1.0, 1.0], 1, hop_s=0.5, encode_s=0.25))
    assert [seconds(parts) for parts in found.values()] == [
        {PASSES: 3.0, FRAMES: 0.5, GRADIENT: 3.5, LINK: 0.5},
        {PASSES: 3.0, FRAMES: 0.5, FILLING: 1.0, LINK: 0.5, DRAINING: 2.5},
    ]


def test_frames_queue_for_the_same_wire() -> None:
    """Two frames of a second leave at 1 and 2: with 1.5 s on the wire the second arrives at 4."""
    ahead = Member(
        name="a",
        spans=[
            span("forward", 0, 0, 0.0, 1.0),
            span("send", 0, 0, 1.0, 1.0),
            span("forward", 0, 1, 1.0, 2.0),
            span("send", 0, 1, 2.0, 2.0),
            span("receive", 0, 1, 2.0, 6.0),
        ],
        down_s=1.5,
    )
    behind = Member(
        name="b",
        spans=[
            span("receive", 0, 0, 0.0, 2.5),
            span("forward", 0, 0, 2.5, 3.0),
            span("receive", 0, 1, 3.0, 4.25),
            span("forward", 0, 1, 4.25, 4.75),
        ],
    )
    parts = split_pipeline([[ahead], [behind]])["b"]
    assert (parts[LINK], parts[FRAMES]) == (1.5 + 1.0, 0.25)
    assert (parts[FILLING], parts[UPSTREAM], parts[DRAINING]) == (1.0, 0.0, 1.25)


@pytest.mark.parametrize("stages", [[1.0], [1.0, 3.0], [2.0, 1.0, 0.5, 1.5]])
@pytest.mark.parametrize("steps", [1, 3])
def test_causes_sum_to_the_waiting_and_all_parts_to_the_pipeline(stages, steps) -> None:
    chain = gpipe(stages, 4, hop_s=0.3, encode_s=0.1, steps=steps)
    driver = chain[0][0].spans
    whole_s = driver[-1].stop_s - driver[0].start_s
    for (member,), parts in zip(chain, split_pipeline(chain).values(), strict=True):
        work_s = fsum(s.stop_s - s.start_s for s in member.spans if s.work != "receive")
        in_flight_s = parts[FRAMES] - fsum(
            s.stop_s - s.start_s for s in member.spans if s.work == "send"
        )
        waiting_s = fsum(parts[cause] for cause in BUBBLES) + in_flight_s + parts[LOOP]
        assert min(parts.values()) >= 0
        assert isclose(fsum(parts.values()), whole_s)
        assert isclose(waiting_s, whole_s - work_s, abs_tol=1e-9)


def test_replicas_wait_for_what_is_theirs() -> None:
    """Two replicas take turns: each waits for the activation of its own micro-batch."""
    ahead = Member(
        name="a",
        spans=[
            span("forward", 0, 0, 0.0, 1.0),
            span("send", 0, 0, 1.0, 1.0),
            span("forward", 0, 1, 1.0, 4.0),
            span("send", 0, 1, 4.0, 4.0),
        ],
    )
    replicas = [
        Member(name=f"b{n}", spans=[span("receive", 0, n, 0.0, s), span("forward", 0, n, s, 5.0)])
        for n, s in enumerate((1.0, 4.0))
    ]
    found = split_pipeline([[ahead], replicas])
    assert [found[name][FILLING] for name in ("b0", "b1")] == [1.0, 4.0]

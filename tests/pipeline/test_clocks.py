"""Spans on clocks that differ come back in an order that a pipeline allows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from collapipe_flwr.core.measurements import Span
from collapipe_flwr.pipeline.meter import align_clocks


def span(work: str, micro_batch: int, start_s: float, late_s: float = 0.0) -> Span:
    return Span(
        work=work,
        step=0,
        micro_batch=micro_batch,
        start_s=start_s + late_s,
        stop_s=start_s + late_s + 1.0,
    )


def pipeline(late_s: float) -> dict[str, list[Span]]:
    """Two stages, a hop of half a second each way; the second's clock is late or early."""
    first = [span("forward", 0, 0.0), span("forward", 1, 1.0), span("backward", 0, 4.0)]
    second = [
        span("forward", 0, 1.5, late_s),
        span("forward", 1, 3.5, late_s),
        span("backward", 0, 2.5, late_s),
    ]
    return {"control unit": first, "edge": second}


def replicated(*late_s: float) -> dict[str, list[Span]]:
    """Two devices share a stage, a micro-batch each; hops take half a second each way."""
    first, second, last = late_s
    return {
        "control unit": [
            *(span("forward", 0, 0.0), span("forward", 1, 1.0)),
            *(span("backward", 0, 8.0), span("backward", 1, 9.0)),
        ],
        "first": [span("forward", 0, 1.5, first), span("backward", 0, 6.5, first)],
        "second": [span("forward", 1, 2.5, second), span("backward", 1, 7.5, second)],
        "edge": [
            *(span("forward", 0, 3.0, last), span("forward", 1, 4.0, last)),
            *(span("backward", 0, 5.0, last), span("backward", 1, 6.0, last)),
        ],
    }


@pytest.mark.parametrize("late_s", [-3600.0, -2.0, 0.7, 1e6])
def test_a_wrong_clock_is_shifted_back(late_s):
    true, found = pipeline(0.0), align_clocks(pipeline(late_s))
    assert found["control unit"] == tuple(true["control unit"])
    for a, b in zip(found["edge"], true["edge"], strict=True):
        assert (a.start_s, a.stop_s) == pytest.approx((b.start_s, b.stop_s), abs=1e-6)


@pytest.mark.parametrize("late_s", [(-3600.0, 1e6, 7.0), (0.0, -50.0, 0.0), (0.0, 0.0, 1e5)])
def test_replicas_and_what_is_behind_them_are_shifted_back(late_s):
    true, found = replicated(0.0, 0.0, 0.0), align_clocks(replicated(*late_s))
    for name, spans in true.items():
        starts = [span.start_s for span in spans]
        assert [span.start_s for span in found[name]] == pytest.approx(starts, abs=1e-6)


def test_clocks_that_contradict_nothing_are_left_alone():
    stages = pipeline(0.3)  # not the truth, but possible
    assert align_clocks(stages) == {name: tuple(spans) for name, spans in stages.items()}


def test_stages_without_passes_are_left_alone():
    only = {"a": [span("receive", 0, 5.0)], "b": [replace(span("send", 0, 1.0), step=3)]}
    assert align_clocks(only) == {name: tuple(spans) for name, spans in only.items()}

"""What a run's rounds tell of the next one."""

from __future__ import annotations

import pytest

from collapipe_flwr.reporting.events import RoundEvent
from collapipe_flwr.reporting.run_data import RunStory


def one_round(index: int, wall_s: float, *, measured: bool = True) -> RoundEvent:
    """A round of a plan of 8 s whose slowest cluster took 10 s, and whose evaluation took one."""
    return RoundEvent(
        round_index=index,
        metrics={},
        wall_s=wall_s,
        evaluation_s=1.0,
        predicted_latency_s=8.0,
        latency_s=10.0,
        clusters={"c": {"measured": measured}},
    )


def test_a_round_takes_its_plan_and_what_the_last_ones_took_besides() -> None:
    story = RunStory(metric_name="accuracy", energy_budget_j={})
    assert story.expected_wall_s(one_round(1, 12.0)) == 8.0  # nothing is known yet
    for index, wall_s in enumerate((90.0, 12.0, 12.0, 13.0, 14.0, 20.0), start=1):
        story.add(one_round(index, wall_s))
    # The last five took 1, 1, 2, 3 and 9 s besides the slowest cluster and the evaluation.
    assert story.expected_wall_s(one_round(7, 0.0)) == pytest.approx(8.0 + 2.0)


def test_no_clock_is_expected_of_simulated_machines() -> None:
    story = RunStory(metric_name="accuracy", energy_budget_j={})
    assert story.expected_wall_s(one_round(1, 12.0, measured=False)) is None

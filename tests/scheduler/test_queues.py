"""Virtual queues: the drift inequality and the bound on the average, on every path."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from collapipe_flwr.scheduler.protocol import advance, advance_energy

energies = st.lists(st.floats(0, 100), min_size=1, max_size=30)


@given(energies, st.floats(0.1, 50))
def test_average_excess_is_bounded_by_the_queue(spent: list[float], budget: float) -> None:
    queue = 0.0
    for energy in spent:
        queue = advance(queue, energy, budget)
    assert sum(spent) / len(spent) - budget <= queue / len(spent) + 1e-9


@given(st.floats(0, 1e3), st.floats(0, 100), st.floats(0.1, 100))
def test_drift_inequality(queue: float, spent: float, budget: float) -> None:
    """Q'^2/2 - Q^2/2 <= (e - budget)^2 / 2 + Q (e - budget)."""
    after = advance(queue, spent, budget)
    drift = after**2 / 2 - queue**2 / 2
    assert drift <= (spent - budget) ** 2 / 2 + queue * (spent - budget) + 1e-6


def test_unlimited_budgets_never_queue() -> None:
    assert advance(0.0, 1e9, math.inf) == 0.0


def test_members_that_rest_recover() -> None:
    before = {"a": {"d": 5.0}}
    after = advance_energy(before, {"a": {"d": 2.0}}, {}, share=1.0)
    assert after == {"a": {"d": 3.0}}

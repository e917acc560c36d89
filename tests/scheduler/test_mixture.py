"""The multipliers of the cheapest mix, against a linear program."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import linprog

from collapipe_flwr.scheduler.multipliers import MOST, solve_mixture


@pytest.mark.parametrize("seed", range(40))
def test_multipliers_are_those_of_the_linear_program(seed: int) -> None:
    """Whether or not any mix keeps the budgets, and where many devices are never over theirs."""
    rng = np.random.default_rng(seed)
    plans, devices = int(rng.integers(1, 40)), int(rng.integers(1, 60))
    cost = rng.uniform(0.2, 1.0, plans)
    excess = rng.uniform(-1.0, 1.5, (plans, devices))
    excess *= rng.random((plans, devices)) < rng.uniform(0.1, 1.0)
    if seed % 2:
        excess[0] = -0.1 * rng.random(devices)
    value, theta = solve_mixture(cost, excess)
    found = linprog(
        np.append(np.zeros(devices), -1.0),
        A_ub=np.column_stack([-excess, np.ones(plans)]),
        b_ub=cost,
        bounds=[(0.0, MOST)] * devices + [(None, None)],
    )
    assert (theta >= 0.0).all() and (theta <= MOST).all()
    assert value == pytest.approx(-found.fun, rel=1e-4)
    assert value == pytest.approx(float((cost + excess @ theta).min()))


def test_without_excess_budgets_are_worth_nothing() -> None:
    value, theta = solve_mixture(np.array([2.0, 1.0]), np.array([[0.0, -1.0], [-0.5, 0.0]]))
    assert value == 1.0 and not theta.any()

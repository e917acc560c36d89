"""The cheapest mix of plans that keeps all budgets on average, and what a budget is worth in it.

    min c x    such that  G x <= 0,  sum x = 1,  x >= 0

with the cost ``c`` of every plan and its energies over budgets less 1, ``G``. The multipliers of
the budgets are where the least of the planes ``c_p + theta G_p`` is highest: what Kelley's (1960)
cutting planes climb. A primal-dual interior point with Mehrotra's (1992) predictor and corrector
solves it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from collapipe_flwr.costs.arrays import Array

MOST = 10.0  # reference latencies that a budget is worth at most
ITERATIONS = 40
ENOUGH = 1e-9  # relative complementarity
REFINEMENTS = 2
SHORT = 0.995  # of the way to the boundary


def solve_mixture(cost_p: Array, excess_pd: Array) -> tuple[float, Array]:
    """Return the cost of the best mix and the worth of every budget, (D,), at most ``MOST``."""
    relevant = np.flatnonzero((excess_pd > 0.0).any(0))
    worth = _solve_program(excess_pd[:, relevant].T, cost_p)
    theta = np.zeros(excess_pd.shape[1])
    theta[relevant] = np.clip(-worth[:-1], 0.0, MOST)
    return float((cost_p + excess_pd @ theta).min()), theta


def _solve_program(rows: Array, cost_p: Array) -> Array:
    """Solve for the multipliers of ``rows x - short + left = 0`` and ``sum x = 1`` at least cost.

    Overspending a budget costs `MOST` per budget, and what is left of it costs nothing.
    """
    count, plans = rows.shape
    goal = np.concatenate([cost_p, np.full(count, MOST), np.zeros(count)])
    wide = len(goal)

    def apply_rows(x: Array) -> Array:
        """Return the left sides of all constraints."""
        short, left = x[plans : plans + count], x[plans + count :]
        return np.append(rows @ x[:plans] - short + left, x[:plans].sum())

    def apply_columns(worth: Array) -> Array:
        """Return the price of every variable at the multipliers of all constraints."""
        return np.concatenate([worth[:-1] @ rows + worth[-1], -worth[:-1], worth[:-1]])

    right = np.append(np.zeros(count), 1.0)
    x, worth, slack = np.ones(wide), np.zeros(count + 1), np.ones(wide) * (1.0 + abs(goal).max())
    for _ in range(ITERATIONS):
        primal, dual = right - apply_rows(x), goal - apply_columns(worth) - slack
        middle = float(x @ slack) / wide
        if middle < ENOUGH and abs(primal).max() < ENOUGH and abs(dual).max() < ENOUGH:
            break
        ratio = x / slack
        solve = _factor_normal(rows, ratio)
        aim = np.zeros(wide)
        for step in ("predictor", "corrector"):
            centre = aim / slack - x
            d_worth = solve(primal - apply_rows(centre - ratio * dual))
            d_slack = dual - apply_columns(d_worth)
            d_x = centre - ratio * d_slack
            reach_x, reach_s = _measure_reach(x, d_x), _measure_reach(slack, d_slack)
            if step == "predictor":
                left = float((x + reach_x * d_x) @ (slack + reach_s * d_slack)) / wide
                aim = (left / middle) ** 3 * middle - d_x * d_slack
        x = x + SHORT * reach_x * d_x
        worth, slack = worth + SHORT * reach_s * d_worth, slack + SHORT * reach_s * d_slack
    return worth


def _factor_normal(rows: Array, ratio: Array) -> Callable[[Array], Array]:
    """Factor the normal equations: diagonal except for the few plans, which are solved densely."""
    count, plans = rows.shape
    of_plan, own = ratio[:plans], ratio[plans : plans + count] + ratio[plans + count :]
    least = 1e-12 * (own.sum() + of_plan @ (1.0 + (rows * rows).sum(0)))
    own = own + least
    scaled = rows / own[:, None]
    small = np.ones((plans + 1, plans + 1))
    small[:plans, :plans] = rows.T @ scaled + np.diag(1.0 / of_plan)
    small[plans, plans] = -least

    def solve_once(right: Array) -> Array:
        found = np.linalg.solve(small, np.append(right[:-1] @ scaled, right[-1]))
        return np.append(right[:-1] / own - scaled @ found[:-1], -found[-1])

    def solve(right: Array) -> Array:
        found = solve_once(right)
        for _ in range(REFINEMENTS):  # large quotients cancel
            plan = of_plan * (found[:-1] @ rows + found[-1])
            said = np.append(own * found[:-1] + rows @ plan, plan.sum() + least * found[-1])
            found = found + solve_once(right - said)
        return found

    return solve


def _measure_reach(values: Array, change: Array) -> float:
    """Return how far, at most 1, one may go before a value is 0."""
    falling = change < 0.0
    return min(1.0, float((-values[falling] / change[falling]).min(initial=np.inf)))

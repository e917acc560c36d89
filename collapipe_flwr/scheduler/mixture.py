"""The cheapest mix of plans that keeps all budgets on average, and what a budget is worth in it.

    min c x    such that  G x <= 0,  sum x = 1,  x >= 0

with the cost ``c`` of every plan and its energies over budgets less 1, ``G``. The multipliers of
the budgets are where the least of the planes ``c_p + theta G_p`` is highest: what Kelley's (1960)
cutting planes climb. A primal-dual interior point with Mehrotra's (1992) predictor and corrector
solves it.
"""

from __future__ import annotations

import numpy as np

from collapipe_flwr.costs.arrays import Array

MOST = 10.0  # reference latencies that a budget is worth at most
ITERATIONS = 40
ENOUGH = 1e-9  # relative complementarity
SHORT = 0.995  # of the way to the boundary


def multipliers(cost_p: Array, excess_pd: Array) -> tuple[float, Array]:
    """Cost of the best mix and the worth of every budget, (D,), at most ``MOST``."""
    relevant = np.flatnonzero((excess_pd > 0.0).any(0))
    rows = excess_pd[:, relevant].T
    count, plans = rows.shape
    # Shares of the plans, what a budget falls short of at a price of MOST, and what is left of it.
    matrix = np.block(
        [
            [rows, -np.eye(count), np.eye(count)],
            [np.ones((1, plans)), np.zeros((1, 2 * count))],
        ]
    )
    goal = np.concatenate([cost_p, np.full(count, MOST), np.zeros(count)])
    worth = _solved(matrix, np.append(np.zeros(count), 1.0), goal)
    theta = np.zeros(excess_pd.shape[1])
    theta[relevant] = np.clip(-worth[:-1], 0.0, MOST)
    return float((cost_p + excess_pd @ theta).min()), theta


def _solved(matrix: Array, right: Array, goal: Array) -> Array:
    """Multipliers of ``matrix @ x = right`` where ``goal @ x`` is least, x >= 0."""
    wide = goal.shape[0]
    x, worth, slack = np.ones(wide), np.zeros(len(right)), np.ones(wide) * (1.0 + abs(goal).max())
    for _ in range(ITERATIONS):
        primal, dual = right - matrix @ x, goal - matrix.T @ worth - slack
        middle = float(x @ slack) / wide
        if middle < ENOUGH and abs(primal).max() < ENOUGH and abs(dual).max() < ENOUGH:
            break
        ratio = x / slack
        normal = (matrix * ratio) @ matrix.T
        normal[np.diag_indices_from(normal)] += 1e-12 * normal.trace()
        aim = np.zeros(wide)
        for step in ("predictor", "corrector"):
            centre = aim / slack - x
            d_worth = np.linalg.solve(normal, primal - matrix @ (centre - ratio * dual))
            d_slack = dual - matrix.T @ d_worth
            d_x = centre - ratio * d_slack
            reach_x, reach_s = _reach(x, d_x), _reach(slack, d_slack)
            if step == "predictor":
                left = float((x + reach_x * d_x) @ (slack + reach_s * d_slack)) / wide
                aim = (left / middle) ** 3 * middle - d_x * d_slack
        x = x + SHORT * reach_x * d_x
        worth, slack = worth + SHORT * reach_s * d_worth, slack + SHORT * reach_s * d_slack
    return worth


def _reach(values: Array, change: Array) -> float:
    """How far, at most 1, one may go before a value is 0."""
    falling = change < 0.0
    return min(1.0, float((-values[falling] / change[falling]).min(initial=np.inf)))

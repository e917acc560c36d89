"""First energy prices, and V, from the dual of a round whose snapshot would never change.

With one multiplier per device, in reference latencies per budget,

    g(theta) = min over plans of  rho T / T_ref + sum theta (e / budget - 1)

lies below the cost of every mix of plans that keeps all budgets on average. Cutting planes find
where it is highest: a plan that is best at some multipliers is a plane above g, `solve_mixture`
says where the least of all planes is highest, and the next multipliers are part of the way there
(Ben-Ameur and Neto 2007, in-out). Queues then start at ``V theta`` instead of 0, as place-holder
backlog (Huang and Neely 2011), and need not fill up first.

The cheapest mix of plans that keeps all budgets on average is

    min c x    such that  G x <= 0,  sum x = 1,  x >= 0

with the cost ``c`` of every plan and its energies over budgets less 1, ``G``. The multipliers of
the budgets are where the least of the planes ``c_p + theta G_p`` is highest: what Kelley's (1960)
cutting planes climb. A primal-dual interior point with Mehrotra's (1992) predictor and corrector
solves it.

V is the length of a queue that is worth the whole of a latency, so one budget more in a queue
changes its multiplier by 1/V. That is a tenth of what multipliers are, on average: where budgets
have slack, multipliers are small and V large. Of many clusters none is learned. What a second costs
all of them together is then spread over all their devices, so V grows with their number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from collapipe_flwr.costs.arrays import Array, Mask
from collapipe_flwr.scheduler.base import USUAL_WEIGHT
from collapipe_flwr.scheduler.planner import PlanSolver, Solution

STEPS = 25  # cutting planes at most
INWARD = 0.4  # part of the way from the best point to where planes are highest
ENOUGH = 2e-3  # relative distance from the best multipliers
WORK = 12_000  # clusters x devices x blocks that all of their searches may come to
SEARCHES = 500  # of single clusters, where there are too many to search them thoroughly
FEWEST = 5  # where time allows fewer steps, queues start empty
FEWEST_OF_MANY = 10  # the same with more clusters than are searched thoroughly
PART = 0.1  # of the mean multiplier, by which one budget changes a multiplier
WEIGHTS = (1.0, 1000.0)  # V is within these
ALWAYS = 1e-6  # price of energy where its multiplier is 0, so that nothing is wasted
MOST = 10.0  # reference latencies that a budget is worth at most
ITERATIONS = 40
COMPLEMENTARY = 1e-9  # relative: where the interior point is at its end
REFINEMENTS = 2
SHORT = 0.995  # of the way to the boundary


@dataclass(slots=True)
class Dual:
    """The dual of a snapshot's problem, in reference latencies and budgets, and the plans seen."""

    planner: PlanSolver
    solutions: list[Solution] = field(default_factory=list)

    @property
    def limited(self) -> Mask:
        """Devices with a budget, (M, I)."""
        members = self.planner.tables.members
        mask = members.present_mi & np.isfinite(members.budget_mi)
        mask[:, 0] = False
        return mask

    def make_solver(self, theta_mi: Array, room_mi: Array | None = None) -> PlanSolver:
        """Make the planner of a round at these multipliers."""
        budget = np.where(self.limited, self.planner.tables.members.budget_mi, 1.0)
        return replace(
            self.planner,
            price_mi=np.where(self.limited, (theta_mi + ALWAYS) / budget, 0.0),
            room_mi=np.full_like(budget, np.inf) if room_mi is None else room_mi,
        )

    def compute_excess(self, solution: Solution) -> Array:
        """Compute energy over budget, less 1, (M, I); 0 where there is no budget."""
        budget = self.planner.tables.members.budget_mi
        spent = solution.tabulate_spent(budget.shape)
        return np.where(self.limited, spent / budget - 1.0, 0.0)

    def compute_value(self, solution: Solution, theta_mi: Array) -> float:
        """Compute the Lagrangian of a plan."""
        late = self.planner.latency_price * solution.rho * float(solution.priced.latency_s.max())
        return late + float((theta_mi * self.compute_excess(solution)).sum())

    def respond(self, theta_mi: Array) -> Solution:
        """Search for the best plan at these multipliers."""
        near = min(self.solutions, key=lambda s: self.compute_value(s, theta_mi))
        found = self.make_solver(theta_mi)
        self.solutions.append(found.improve(found.optimize_radio(near.rows)))
        return min(self.solutions, key=lambda s: self.compute_value(s, theta_mi))

    @property
    def learns(self) -> bool:
        """Whether time allows steps enough to learn multipliers."""
        many = not self.planner.tables.few
        return self._steps >= (FEWEST_OF_MANY if many else FEWEST)

    @property
    def broken(self) -> bool:
        """Whether the quickest plan breaks a budget, and time allows steps to learn its price."""
        if not self.learns or not self.limited.any():
            return False
        self.solutions.append(self.make_solver(np.zeros_like(self.planner.price_mi)).solve())
        return bool((self.compute_excess(self.solutions[-1]) > 0.0).any())

    @property
    def _steps(self) -> int:
        clusters, blocks = self.planner.tables.num_clusters, self.planner.tables.num_blocks
        if not self.planner.tables.few:
            return SEARCHES // clusters
        devices = len(self.planner.price_mi[0]) - 1
        return min(STEPS, WORK // (clusters * devices * blocks))

    def find_multipliers(self, kept: Solution) -> Array:
        """Find the multipliers at which the least Lagrangian of all plans is highest, (M, I).

        ``kept`` is a plan that keeps all budgets, without which no mix may.
        """
        best = np.zeros_like(self.planner.price_mi)
        value = self.compute_value(self.solutions[0], best)
        self.solutions.append(kept)
        for _ in range(self._steps):
            upper, goal = self._maximize()
            if upper - value <= ENOUGH * upper:
                break
            theta = best + INWARD * (goal - best)
            if (found := self.compute_value(self.respond(theta), theta)) > value:
                best, value = theta, found
        return best

    def _maximize(self) -> tuple[float, Array]:
        """Maximise over multipliers the least Lagrangian of all plans seen so far."""
        nothing = np.zeros_like(self.planner.price_mi)
        cost = np.array([self.compute_value(s, nothing) for s in self.solutions])
        excess = np.array([self.compute_excess(s).ravel() for s in self.solutions])
        value, theta = solve_mixture(cost, excess)
        return value, theta.reshape(nothing.shape)


def guess_weight(devices: int) -> float:
    """Guess V where time allows no steps: all multipliers then sum to about one latency."""
    return max(devices / PART, USUAL_WEIGHT)


def derive_weight(theta_mi: Array) -> float:
    """Choose V for multipliers of this size."""
    active = theta_mi[theta_mi > 1e-4]
    if not len(active):
        return USUAL_WEIGHT
    return float(np.clip(1.0 / (PART * active.mean()), *WEIGHTS))


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
        if max(middle, abs(primal).max(), abs(dual).max()) < COMPLEMENTARY:
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

"""Where energy prices start, and V: the dual of a round whose snapshot would never change.

With one multiplier per device, in reference latencies per budget,

    g(theta) = min over plans of  rho T / T_ref + sum theta (e / budget - 1)

lies below the cost of every mix of plans that keeps all budgets on average. Cutting planes find
where it is highest: a plan that is best at some multipliers is a plane above g, `mixture` says
where the least of all planes is highest, and the next multipliers are part of the way there
(Ben-Ameur and Neto 2007, in-out). Queues then start at ``V theta`` instead of 0, as place-holder
backlog (Huang and Neely 2011), and need not fill up first.

V is the length of a queue that is worth the whole of a latency, so one budget more in a queue
changes its multiplier by 1/V. That is a tenth of what multipliers are, on average: where budgets
have slack, multipliers are small and V large. Of many clusters none is learned. What a second costs
all of them together is then spread over all their devices, so V grows with their number.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from collapipe_flwr.costs.arrays import Array, Mask
from collapipe_flwr.scheduler.base import USUAL_WEIGHT
from collapipe_flwr.scheduler.mixture import solve_mixture
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

    def at(self, theta_mi: Array, room_mi: Array | None = None) -> PlanSolver:
        """Make the planner of a round at these multipliers."""
        budget = np.where(self.limited, self.planner.tables.members.budget_mi, 1.0)
        return replace(
            self.planner,
            price_mi=np.where(self.limited, (theta_mi + ALWAYS) / budget, 0.0),
            room_mi=np.full_like(budget, np.inf) if room_mi is None else room_mi,
        )

    def excess(self, solution: Solution) -> Array:
        """Compute energy over budget, less 1, (M, I); 0 where there is no budget."""
        budget = self.planner.tables.members.budget_mi
        spent = solution.spent_mi(budget.shape)
        return np.where(self.limited, spent / budget - 1.0, 0.0)

    def value(self, solution: Solution, theta_mi: Array) -> float:
        """Compute the Lagrangian of a plan."""
        late = self.planner.latency_price * solution.rho * float(solution.priced.latency_s.max())
        return late + float((theta_mi * self.excess(solution)).sum())

    def respond(self, theta_mi: Array) -> Solution:
        """Search for the best plan at these multipliers."""
        near = min(self.solutions, key=lambda s: self.value(s, theta_mi))
        found = self.at(theta_mi)
        self.solutions.append(found.improve(found.radio(near.rows)))
        return min(self.solutions, key=lambda s: self.value(s, theta_mi))

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
        self.solutions.append(self.at(np.zeros_like(self.planner.price_mi)).solve())
        return bool((self.excess(self.solutions[-1]) > 0.0).any())

    @property
    def _steps(self) -> int:
        clusters, blocks = self.planner.tables.num_clusters, self.planner.tables.num_blocks
        if not self.planner.tables.few:
            return SEARCHES // clusters
        devices = len(self.planner.price_mi[0]) - 1
        return min(STEPS, WORK // (clusters * devices * blocks))

    def multipliers(self, kept: Solution) -> Array:
        """Find the multipliers at which the least Lagrangian of all plans is highest, (M, I).

        ``kept`` is a plan that keeps all budgets, without which no mix may.
        """
        best = np.zeros_like(self.planner.price_mi)
        value = self.value(self.solutions[0], best)
        self.solutions.append(kept)
        for _ in range(self._steps):
            upper, goal = self._maximize()
            if upper - value <= ENOUGH * upper:
                break
            theta = best + INWARD * (goal - best)
            if (found := self.value(self.respond(theta), theta)) > value:
                best, value = theta, found
        return best

    def _maximize(self) -> tuple[float, Array]:
        """Maximise over multipliers the least Lagrangian of all plans seen so far."""
        nothing = np.zeros_like(self.planner.price_mi)
        cost = np.array([self.value(s, nothing) for s in self.solutions])
        excess = np.array([self.excess(s).ravel() for s in self.solutions])
        value, theta = solve_mixture(cost, excess)
        return value, theta.reshape(nothing.shape)


def unlearned_weight(devices: int) -> float:
    """Guess V where time allows no steps: all multipliers then sum to about one latency."""
    return max(devices / PART, USUAL_WEIGHT)


def weight_for(theta_mi: Array) -> float:
    """Choose V for multipliers of this size."""
    active = theta_mi[theta_mi > 1e-4]
    if not len(active):
        return USUAL_WEIGHT
    return float(np.clip(1.0 / (PART * active.mean()), *WEIGHTS))

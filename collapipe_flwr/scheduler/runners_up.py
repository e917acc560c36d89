"""Plans near the one in place, by what they cost as 1F1B is played while bandwidth stays.

Every row is played at full power over its cluster's present bandwidth. That is a feasible radio
decision, so a plan that costs less in this way is better, whatever the radio program finds for it.
A round lasts as long as its slowest cluster. Where several are about as slow, changing one of them
does not shorten the round, so rows of all clusters are also chosen jointly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from collapipe_flwr.costs.arrays import Array, Ints, Mask
from collapipe_flwr.costs.chain import (
    Chain,
    RowPrices,
    compute_full_power_times,
    make_chain,
    price_rows,
    replay_rows,
    solve_powers,
)
from collapipe_flwr.costs.convergence import find_others_max
from collapipe_flwr.costs.layouts import Layouts, make_keys, replace_rows, stack_layouts
from collapipe_flwr.scheduler.pool import PlanSelector, Pool
from collapipe_flwr.scheduler.problem import Estimates, PlanningProblem, join_estimates

WIDTH = 16  # rows of a cluster that a beam goes on from
AT_A_TIME = 8  # rows of a cluster that are played before others are looked at again
PATIENCE = 2  # moves in vain


@dataclass(frozen=True, slots=True)
class Incumbent:
    """A plan, over whose bandwidth other rows of its clusters are priced at full power."""

    problem: PlanningProblem
    rows: Layouts  # one per cluster
    costs: Estimates  # of these rows
    hz_m: Array

    def bound_rows(self, near: Layouts) -> CandidateRows:
        """Price all rows of ``near`` by the lower bound."""
        chain, _, priced = self._bound(near)
        return CandidateRows(self, near, self.problem.estimate(chain, priced))

    def play_rows(self, near: Layouts, *, joint: bool = False) -> CandidateRows:
        """Play the steps of the rows of ``near`` that matter.

        Those that may be among the best `WIDTH` of their clusters alone. For a ``joint`` choice
        also those that none with the same micro-batches beats in latency as well as in energy. The
        lower bound of a row's latency is enough to leave it out.
        """
        chain, times, priced = self._bound(near)
        every = CandidateRows(self, near, self.problem.estimate(chain, priced))
        pair_r, done = self.problem.find_pairs(near), np.zeros(len(near), bool)
        while len(more := self._choose_next(every, pair_r, done, joint=joint)):
            priced = replay_rows(chain, times, priced, more)
            every = replace(every, costs=self.problem.estimate(chain, priced))
            done[more] = True
        return every.take(np.flatnonzero(done))

    def _bound(self, rows: Layouts) -> tuple[Chain, Array, RowPrices]:
        """Bound the costs of rows from below, with their shortest hops over these bandwidths."""
        hz = self.hz_m[rows.cluster_r]
        chain = make_chain(self.problem.tables, rows, self.problem.settings)
        times = compute_full_power_times(chain, hz)
        return chain, times, price_rows(chain, times, solve_powers(chain, hz, times))

    def _choose_next(self, every: CandidateRows, pair_r: Ints, done: Mask, *, joint: bool) -> Ints:
        """Choose the most promising rows of every cluster that may matter and are not ``done``."""
        values, owner, costs = every.value_alone(), every.near.cluster_r, every.costs
        own_pair = self.problem.find_pairs(self.rows)
        chosen = [np.zeros(0, np.int64)]
        for m in np.unique(owner[~done]):
            here = owner == m
            known, open_r = np.flatnonzero(done & here), np.flatnonzero(~done & here)
            least = np.sort(values[known])[WIDTH - 1] if len(known) >= WIDTH else np.inf
            matters = values[open_r] < least
            if joint:
                late_s = np.append(costs.latency[known], self.costs.latency[m])
                worth = np.append(costs.worth[known], self.costs.worth[m])
                pairs = np.append(pair_r[known], own_pair[m])
                beaten = late_s <= costs.latency[open_r, None]
                beaten &= worth <= costs.worth[open_r, None]
                matters |= ~(beaten & (pairs == pair_r[open_r, None])).any(1)
            open_r = open_r[matters]
            chosen.append(open_r[np.argsort(values[open_r], kind="stable")[:AT_A_TIME]])
        return np.concatenate(chosen)


@dataclass(frozen=True, slots=True)
class CandidateRows:
    """Rows, each of which may replace its cluster's row of a plan."""

    plan: Incumbent
    near: Layouts
    costs: Estimates  # of these rows

    def take(self, rows: Ints) -> CandidateRows:
        """Take the chosen rows."""
        return CandidateRows(self.plan, self.near.take(rows), self.costs.take(rows))

    def value_alone(self) -> Array:
        """Compute the objective with each row in the plan, less the plan's priced energy, (R,)."""
        plan, problem, owner = self.plan, self.plan.problem, self.near.cluster_r
        late_s = problem.learning.compute_row_rhos(problem.tables, self.near, plan.rows)
        late_s *= np.maximum(self.costs.latency, find_others_max(plan.costs.latency)[owner])
        more = self.costs.worth - plan.costs.worth[owner]
        return np.asarray(problem.latency_price * late_s + more)

    def keep_first(self, width: int) -> CandidateRows:
        """Keep the ``width`` rows of every cluster that cost least in the plan, best first."""
        order = np.argsort(self.value_alone(), kind="stable")
        owner = self.near.cluster_r[order]
        return self.take(np.concatenate([order[owner == m][:width] for m in np.unique(owner)]))

    def combine(self) -> Layouts:
        """Find the best plan with new rows in any number of clusters, perhaps the plan itself."""
        plan, rows = self.plan, stack_layouts([self.plan.rows, self.near])
        costs = join_estimates([plan.costs, self.costs])
        pool = Pool(rows, costs, plan.problem.find_pairs(rows))
        chosen = rows.take(PlanSelector(plan.problem, pool).best()[1])
        return replace_rows(chosen, chosen.cluster_r, chosen)  # no wider than needed

    def grow(
        self, start: Layouts, price: Callable[[Layouts], CandidateRows], width: int = WIDTH
    ) -> CandidateRows:
        """Add the best rows of every cluster that a beam search from ``start`` finds.

        The ``width`` best rows one move away, then those one move from these, until the best of all
        has not become better for `PATIENCE` moves.
        """
        parts, seen, best, vain = [self], set(make_keys(start)), np.inf, 0
        while vain < PATIENCE:
            moved = self.plan.problem.keep_fitting(self.plan.problem.list_neighbours(start))
            new = {key: row for row, key in enumerate(make_keys(moved)) if key not in seen}
            if not new:
                break
            seen |= new.keys()
            found = price(moved.take(np.array(list(new.values())))).keep_first(width)
            least = found.value_alone().min()
            vain = 0 if least < best else vain + 1
            best, start = min(best, least), found.near
            parts.append(found)
        near = stack_layouts([part.near for part in parts])
        return CandidateRows(self.plan, near, join_estimates([part.costs for part in parts]))

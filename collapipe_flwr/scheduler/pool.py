"""Layouts of single clusters worth knowing, and the best plan that can be put together from them.

What a layout is worth depends on the others': a round lasts as long as its slowest cluster, and the
rounds to the target depend on every batch. So the search keeps, for every cluster and pair of
micro-batches, the layouts that no other one beats in both latency and priced energy, and picks one
per cluster for all clusters together.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from collapipe_flwr.costs.arrays import Array, Ints, Mask
from collapipe_flwr.costs.convergence import others_max
from collapipe_flwr.costs.layouts import Layouts, stack
from collapipe_flwr.scheduler.problem import RoundProblem
from collapipe_flwr.scheduler.scorer import Estimates, Scorer

CHANGES = 60  # of single clusters that a pick tries after that
SAME = 1e-9  # relative differences below this count as none


@dataclass(frozen=True, slots=True)
class Pool:
    """Rows of many clusters and what each costs at one set of dual prices."""

    rows: Layouts
    costs: Estimates
    pair_r: Ints  # place of the row's micro-batches in the grid

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, index: Ints | Mask) -> Pool:
        """The chosen rows."""
        return Pool(self.rows.take(index), self.costs.take(index), self.pair_r[index])

    def joined(self, more: Pool) -> Pool:
        """These rows, then ``more``."""
        return Pool(
            stack([self.rows, more.rows]),
            self.costs.joined(more.costs),
            np.concatenate([self.pair_r, more.pair_r]),
        )


def pool_of(problem: RoundProblem, scorer: Scorer, rows: Layouts) -> Pool:
    """The rows that fit their memories and have micro-batches of the grid."""
    pair = problem.pair_of(rows)
    costs = scorer.estimates(rows)
    return Pool(rows, costs, pair).take((pair >= 0) & np.isfinite(costs.worth))


def front(pool: Pool, pairs: int, least: float) -> Mask:
    """Rows that no other of their cluster and pair beats; gains up to ``least`` do not count.

    By latency as it is and by the soft one: where several stages are the slowest, taking blocks
    from one of them shows in the second alone.
    """
    group, keep = pool.rows.cluster_r * pairs + pool.pair_r, np.zeros(len(pool), bool)
    for seconds in (pool.costs.latency, pool.costs.soft):
        order = np.lexsort((pool.costs.worth, seconds, group))
        first, gain = _gains(group[order], pool.costs.worth[order], least)
        keep[order[first | (gain > least)]] = True
    return keep


def _gains(group: Ints, worth: Array, most: float = 0.0) -> tuple[Mask, Array]:
    """Which rows are the first of their group, and by how much others undercut all before them."""
    first = np.diff(group, prepend=-1) != 0
    # Later groups lie below earlier ones, so that one running minimum serves all.
    place = np.cumsum(first) * (2.0 * float(worth.max(initial=0.0)) + 2.0 * most + 1.0)
    least = np.minimum.accumulate(worth - place)
    gain = np.concatenate([[0.0], least[:-1] - least[1:]])
    return first, np.where(first, 0.0, gain)


@dataclass(frozen=True, slots=True)
class Picking:
    """Puts plans together from a pool that has at least one row of every cluster."""

    problem: RoundProblem
    pool: Pool

    def best(self) -> tuple[float, Ints]:
        """The least objective found, and the row of every cluster."""
        starts = [self.common(int(pair)) for pair in np.unique(self.pool.pair_r)]
        return self._changed(min(starts, key=lambda start: start[0])[1])

    def value(self, choice: Ints) -> float:
        """The objective of one row per cluster."""
        costs, problem = self.pool.costs.take(choice), self.problem
        rho = problem.learning.rho(problem.tables, self.pool.rows.take(choice))
        return problem.latency_price * rho * float(costs.latency.max()) + float(costs.worth.sum())

    def common(self, pair: int) -> tuple[float, Ints]:
        """The best where every cluster that can takes one pair, the others what is quickest."""
        pool, clusters = self.pool, np.arange(self.problem.tables.num_clusters)
        away = pool.pair_r != pair
        order = np.lexsort((pool.costs.latency, away, pool.rows.cluster_r))
        stays = ~away[order]
        stays[np.searchsorted(pool.rows.cluster_r[order], clusters)] = True
        order = order[stays]
        owner, costs = pool.rows.cluster_r[order], pool.costs.take(order)
        first, gain = _gains(owner, costs.worth)
        quickest = order[first]
        rho = self.problem.learning.rho(self.problem.tables, pool.rows.take(quickest))
        # As the ceiling rises, one cluster after another may take a row that needs less energy.
        rising = np.argsort(costs.latency, kind="stable")
        ceilings = costs.latency[rising]
        energy = costs.worth[first].sum() - np.cumsum(gain[rising])
        values = self.problem.latency_price * rho * ceilings + energy
        values[ceilings < costs.latency[first].max()] = np.inf
        best = int(np.argmin(values))
        within = np.where(costs.latency <= ceilings[best], costs.worth, np.inf)
        cheapest = np.lexsort((within, owner))
        return float(values[best]), order[cheapest[np.flatnonzero(first)]]

    def _changed(self, choice: Ints) -> tuple[float, Ints]:
        """Change one cluster's row at a time while that gains."""
        pool, problem, owner = self.pool, self.problem, self.pool.rows.cluster_r
        now = self.value(choice)
        for _ in range(CHANGES):
            rho = problem.learning.rho_rows(problem.tables, pool.rows, pool.rows.take(choice))
            others = others_max(pool.costs.latency[choice])[owner]
            late = problem.latency_price * rho * np.maximum(pool.costs.latency, others)
            rest = pool.costs.worth[choice].sum() - pool.costs.worth[choice]
            values = late + pool.costs.worth + rest[owner]
            best = int(np.argmin(values))
            if not values[best] < now - SAME * abs(now):
                break
            choice, now = choice.copy(), float(values[best])
            choice[owner[best]] = best
        return now, choice

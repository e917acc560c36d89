"""Layouts of single clusters worth knowing, and the best plan that can be put together from them.

What a layout is worth depends on the others': a round lasts as long as its slowest cluster, and the
rounds to the target depend on every batch. So the search keeps, for every cluster and pair of
micro-batches, the layouts that no other one beats in both latency and priced energy, and picks one
per cluster for all clusters together.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from collapipe_flwr.costs.arrays import Array, Ints, Mask
from collapipe_flwr.costs.convergence import find_others_max
from collapipe_flwr.costs.layouts import Layouts, stack_layouts
from collapipe_flwr.costs.work import count_steps
from collapipe_flwr.scheduler.problem import Estimates, PlanningProblem, join_estimates
from collapipe_flwr.scheduler.scorer import Scorer

CHANGES = 60  # of single clusters that a pick tries after that
SWEPT_CLUSTERS = 20  # up to here time allows picks for many lengths of a round
SWEEPS = 3  # of them at most, each from what the one before found
LENGTHS = 60
CLOSE = 1.03  # picks for other lengths that cost up to this factor of the least are worth a look
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
        """Take the chosen rows."""
        return Pool(self.rows.take(index), self.costs.take(index), self.pair_r[index])

    def join(self, more: Pool) -> Pool:
        """Append ``more`` rows."""
        return Pool(
            stack_layouts([self.rows, more.rows]),
            join_estimates([self.costs, more.costs]),
            np.concatenate([self.pair_r, more.pair_r]),
        )


def pool_of(problem: PlanningProblem, scorer: Scorer, rows: Layouts) -> Pool:
    """Make a pool of those rows that fit into memory and whose micro-batches are in the grid."""
    pair = problem.find_pairs(rows)
    costs = scorer.estimate(rows)
    return Pool(rows, costs, pair).take((pair >= 0) & np.isfinite(costs.worth))


def select_front(pool: Pool, pairs: int, least: float) -> Mask:
    """Select rows that no other of their cluster and pair beats by more than ``least``.

    By latency as it is and by the soft one: where several stages are the slowest, taking blocks
    from one of them shows in the second alone.
    """
    group, keep = pool.rows.cluster_r * pairs + pool.pair_r, np.zeros(len(pool), bool)
    for seconds in (pool.costs.latency, pool.costs.soft):
        order = np.lexsort((pool.costs.worth, seconds, group))
        first, gain = _measure_gains(group[order], pool.costs.worth[order], least)
        keep[order[first | (gain > least)]] = True
    return keep


def _measure_gains(group: Ints, worth: Array, most: float = 0.0) -> tuple[Mask, Array]:
    """Tell which rows are the first of their group, and how far others undercut those before."""
    first = np.diff(group, prepend=-1) != 0
    # Later groups lie below earlier ones, so that one running minimum serves all.
    place = np.cumsum(first) * (2.0 * float(worth.max(initial=0.0)) + 2.0 * most + 1.0)
    least = np.minimum.accumulate(worth - place)
    gain = np.concatenate([[0.0], least[:-1] - least[1:]])
    return first, np.where(first, 0.0, gain)


class PlanSelector:
    """Puts plans together from a pool that has at least one row of every cluster."""

    def __init__(self, problem: PlanningProblem, pool: Pool) -> None:
        self.problem, self.pool = problem, pool
        self._steps, self._batches = count_steps(problem.tables, pool.rows), pool.rows.batch_r
        # By cluster, and the quickest first; rounds to the target differ by cluster and pair alone.
        self._order = np.lexsort((pool.costs.latency, pool.rows.cluster_r))
        owner = pool.rows.cluster_r[self._order]
        self._first = np.diff(owner, prepend=-1) != 0
        kinds = pool.rows.cluster_r * (int(pool.pair_r.max()) + 2) + pool.pair_r
        _, which, self._kind_r = np.unique(kinds, return_index=True, return_inverse=True)
        self._kinds = pool.rows.take(which)

    def best(self) -> tuple[float, Ints]:
        """Find the least objective, and the row of every cluster."""
        best = self._improve(self.pick_common()[1])
        if self.problem.tables.num_clusters > SWEPT_CLUSTERS:
            return best
        for _ in range(SWEEPS):
            swept = self.pick_by_length(best[1])
            found = self._improve(min(swept, key=lambda pick: pick[0])[1])
            if not found[0] < best[0] - SAME * abs(best[0]):
                break
            best = found
        return best

    def pick_elsewhere(self) -> list[Ints]:
        """Pick choices that cost little more, for rounds of other lengths; best first."""
        swept = self.pick_by_length(self.best()[1])
        values = np.array([value for value, _ in swept])
        before, behind = np.append(np.inf, values[:-1]), np.append(values[1:], np.inf)
        least = (values < before) & (values <= behind) & (values < CLOSE * values.min())
        dips = np.flatnonzero(least)
        return [swept[k][1] for k in dips[np.argsort(values[dips], kind="stable")]]

    def pick_by_length(self, near: Ints) -> list[tuple[float, Ints]]:
        """Pick for many lengths of a round the best rows that are no slower, with the objective.

        Micro-batches may differ between clusters: seen from the rows ``near``, rounds to the target
        are the sum of what every cluster's choice adds to them.
        """
        problem, owner, worth = self.problem, self._kinds.cluster_r, self.pool.costs.worth
        now, length = self.pool.rows.take(near), self._lengths
        rho = problem.learning.compute_row_rhos(problem.tables, self._kinds, now)
        added = problem.latency_price * (rho - problem.learning.compute_rho(problem.tables, now))
        starts = np.searchsorted(owner, np.arange(problem.tables.num_clusters))
        rows = self._within.rows(length)
        values = np.where(rows >= 0, length[:, None] * added + worth[rows], np.inf)
        least = values == np.minimum.reduceat(values, starts, axis=1)[:, owner]
        choices = np.minimum.reduceat(np.where(least, rows, len(worth)), starts, axis=1)
        return list(zip(self._values(choices).tolist(), choices, strict=True))

    @cached_property
    def _lengths(self) -> Array:
        """Lengths of a round worth a look, at which every cluster has a row."""
        latency = self.pool.costs.latency
        shortest = latency[self._order[self._first]].max()
        lengths = np.unique(latency[latency >= shortest])
        return np.asarray(lengths[np.unique(np.linspace(0, len(lengths) - 1, LENGTHS).astype(int))])

    @cached_property
    def _within(self) -> Within:
        return Within(self.pool, self._kind_r)

    def value(self, choice: Ints) -> float:
        """Compute the objective of one row per cluster."""
        return float(self._values(choice))

    def _values(self, choices: Ints) -> Array:
        """Compute `value` of each choice, clusters on the last axis."""
        problem, latency, worth = self.problem, self.pool.costs.latency, self.pool.costs.worth
        rho = problem.learning.compute_rhos(
            problem.tables, self._steps[choices], self._batches[choices]
        )
        slowest = latency[choices].max(-1)
        return np.asarray(problem.latency_price * rho * slowest + worth[choices].sum(-1))

    def pick_common(self) -> tuple[float, Ints]:
        """Pick the best where all clusters that can take one batch, and others the quickest row."""
        best = min(self.commons.values(), key=lambda one: one.value)
        return best.value, best.choice()

    @cached_property
    def commons(self) -> dict[int, Common]:
        """What is best by the batch that clusters have in common, however each cuts it."""
        batches: list[int] = np.unique(self.pool.rows.batch_r).tolist()
        return {b: Common(self.problem, self.pool, self._with_batch(b)) for b in batches}

    def _with_batch(self, batch: int) -> Ints:
        """Order rows with a batch by cluster and latency; other clusters give their quickest."""
        owner, same = self.pool.rows.cluster_r, self.pool.rows.batch_r == batch
        without = np.ones(self.problem.tables.num_clusters, bool)
        without[owner[same]] = False
        order = self._order
        return np.asarray(order[same[order] | (self._first & without[owner[order]])])

    def _improve(self, choice: Ints) -> tuple[float, Ints]:
        """Change one cluster's row at a time while that gains."""
        now, owner = self.value(choice), self.pool.rows.cluster_r
        for _ in range(CHANGES):
            values = self.price_exchanges(choice)
            best = int(np.argmin(values))
            if not values[best] < now - SAME * abs(now):
                break
            choice, now = choice.copy(), float(values[best])
            choice[owner[best]] = best
        return now, choice

    def price_exchanges(self, choice: Ints) -> Array:
        """Compute the objective with each row in place of its cluster's in ``choice``, (R,)."""
        pool, problem, owner = self.pool, self.problem, self.pool.rows.cluster_r
        rho = self._rho(pool.rows.take(choice))
        others = find_others_max(pool.costs.latency[choice])[owner]
        late = problem.latency_price * rho * np.maximum(pool.costs.latency, others)
        rest = pool.costs.worth[choice].sum() - pool.costs.worth[choice]
        return np.asarray(late + pool.costs.worth + rest[owner])

    def _rho(self, now: Layouts) -> Array:
        """Compute `Learning.compute_row_rhos` of the pool."""
        rho = self.problem.learning.compute_row_rhos(self.problem.tables, self._kinds, now)
        return np.asarray(rho[self._kind_r])


class Within:
    """The row of least priced energy of every kind, (K,), among those that are quick enough."""

    def __init__(self, pool: Pool, kind_r: Ints) -> None:
        thrifty = np.argsort(pool.costs.worth, kind="stable")
        rank = np.empty_like(thrifty)
        rank[thrifty] = np.arange(len(rank))
        order = np.lexsort((pool.costs.latency, kind_r))
        starts = np.flatnonzero(np.diff(kind_r[order], prepend=-1))
        self._bound_seconds = np.split(pool.costs.latency[order], starts[1:])
        # Later kinds lie below earlier ones, so that one running minimum serves all.
        lower = kind_r[order] * len(rank)
        self._thriftiest = thrifty[np.minimum.accumulate(rank[order] - lower) + lower]
        self._before = starts - 1

    def rows(self, seconds_l: Array) -> Ints:
        """Return the row of every kind within every length of a round, (L, K); -1 without one."""
        quick = [np.searchsorted(s, seconds_l, side="right") for s in self._bound_seconds]
        number = np.stack(quick, axis=1)
        return np.where(number > 0, self._thriftiest[self._before + number], -1)


class Common:
    """The best choice of one row per cluster of ``order``, by cluster and latency, at one rho."""

    def __init__(self, problem: PlanningProblem, pool: Pool, order: Ints) -> None:
        self._order, self._costs = order, pool.costs.take(order)
        owner, latency = pool.rows.cluster_r[order], self._costs.latency
        first, gain = _measure_gains(owner, self._costs.worth)
        self._starts = np.flatnonzero(first)
        rho = problem.learning.compute_rho(problem.tables, pool.rows.take(order[first]))
        # As the ceiling rises, one cluster after another may take a row that needs less energy.
        rising = np.argsort(latency, kind="stable")
        ceilings = latency[rising]
        energy = self._costs.worth[first].sum() - np.cumsum(gain[rising])
        values = problem.latency_price * rho * ceilings + energy
        values[ceilings < latency[first].max()] = np.inf
        best = int(np.argmin(values))
        self.value, self._ceiling = float(values[best]), float(ceilings[best])

    def choice(self) -> Ints:
        """Return the row of every cluster."""
        latency, worth = self._costs.latency, self._costs.worth
        within = np.where(latency <= self._ceiling, worth, np.inf)
        least = np.minimum.reduceat(within, self._starts)
        owner = np.repeat(np.arange(len(least)), np.diff(self._starts, append=len(within)))
        cheapest = np.flatnonzero(within == least[owner])
        return self._order[cheapest[np.searchsorted(owner[cheapest], np.arange(len(least)))]]

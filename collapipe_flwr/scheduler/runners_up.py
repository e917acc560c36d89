"""Plans near the one in place, by what they cost as 1F1B is played while bandwidth stays.

Every row is played at full power over its cluster's present bandwidth. That is a feasible radio
decision, so a plan that costs less in this way is better, whatever the radio program finds for it.
A round lasts as long as its slowest cluster. Where several are about as slow, changing one of them
does not shorten the round, so rows of all clusters are also chosen jointly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from collapipe_flwr.costs.arrays import Array, Ints, Mask
from collapipe_flwr.costs.chain import (
    Chain,
    RowPrices,
    chain_of,
    full_power_times,
    played,
    powers_for,
    price_rows,
)
from collapipe_flwr.costs.convergence import others_max
from collapipe_flwr.costs.layouts import Layouts, keys_of, replaced, stack
from collapipe_flwr.scheduler.pool import Picking, Pool
from collapipe_flwr.scheduler.problem import RoundProblem
from collapipe_flwr.scheduler.scorer import Estimates

WIDTH = 16  # rows of a cluster that a beam goes on from
AT_A_TIME = 8  # rows of a cluster that are played before others are looked at again
PATIENCE = 2  # moves in vain


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnersUp:
    """Rows, each of which may replace its cluster's row of a plan."""

    problem: RoundProblem
    now: Layouts  # the plan: one row per cluster
    own: Estimates  # what its rows cost
    near: Layouts
    costs: Estimates  # what those cost

    def take(self, rows: Ints) -> RunnersUp:
        """The chosen rows."""
        return replace(self, near=self.near.take(rows), costs=self.costs.take(rows))

    def joined(self, more: RunnersUp) -> RunnersUp:
        """These rows, then those of ``more``."""
        costs = self.costs.joined(more.costs)
        return replace(self, near=stack([self.near, more.near]), costs=costs)

    def alone(self) -> Array:
        """The objective with each row in the plan, less the plan's own priced energy, (R,)."""
        problem, owner = self.problem, self.near.cluster_r
        late_s = problem.learning.rho_rows(problem.tables, self.near, self.now)
        late_s *= np.maximum(self.costs.latency, others_max(self.own.latency)[owner])
        more = self.costs.worth - self.own.worth[owner]
        return np.asarray(problem.latency_price * late_s + more)

    def first(self, width: int) -> RunnersUp:
        """The ``width`` rows of every cluster that cost least in the plan, best first."""
        order = np.argsort(self.alone(), kind="stable")
        owner = self.near.cluster_r[order]
        return self.take(np.concatenate([order[owner == m][:width] for m in np.unique(owner)]))

    def together(self) -> Layouts:
        """The best plan found with new rows in any number of clusters, perhaps the plan itself."""
        rows = stack([self.now, self.near])
        pool = Pool(rows, self.own.joined(self.costs), self.problem.pair_of(rows))
        chosen = rows.take(Picking(self.problem, pool).best()[1])
        return replaced(chosen, chosen.cluster_r, chosen)  # no wider than needed


def runners_up(
    problem: RoundProblem,
    now: Layouts,
    own: Estimates,
    edge_hz_m: Array,
    near: Layouts,
    *,
    joint: bool = True,
) -> RunnersUp:
    """The rows of ``near`` that matter, played over the bandwidth of their clusters.

    Those that may be among the best `WIDTH` of their clusters alone. For a ``joint`` choice also
    those that none with the same micro-batches beats in latency as well as in energy. The lower
    bound of a row's latency is enough to leave it out.
    """
    chain, times, priced = _bounded(problem, near, edge_hz_m)
    costs, pair_r = problem.estimates(chain, priced), problem.pair_of(near)
    every = RunnersUp(problem=problem, now=now, own=own, near=near, costs=costs)
    done = np.zeros(len(near), bool)
    while True:
        more = _next(every, pair_r, done, joint=joint)
        if not len(more):
            return every.take(np.flatnonzero(done))
        priced = played(chain, times, priced, more)
        every = replace(every, costs=problem.estimates(chain, priced))
        done[more] = True


def bounded(
    problem: RoundProblem, now: Layouts, own: Estimates, edge_hz_m: Array, near: Layouts
) -> RunnersUp:
    """All rows of ``near`` by the lower bound."""
    chain, _, priced = _bounded(problem, near, edge_hz_m)
    costs = problem.estimates(chain, priced)
    return RunnersUp(problem=problem, now=now, own=own, near=near, costs=costs)


def _bounded(
    problem: RoundProblem, rows: Layouts, edge_hz_m: Array
) -> tuple[Chain, Array, RowPrices]:
    """Rows with their shortest hops over these bandwidths, and what they cost at least."""
    hz = edge_hz_m[rows.cluster_r]
    chain = chain_of(problem.tables, rows, problem.settings)
    times = full_power_times(chain, hz)
    return chain, times, price_rows(chain, times, powers_for(chain, hz, times))


def _next(every: RunnersUp, pair_r: Ints, done: Mask, *, joint: bool) -> Ints:
    """The most promising rows of every cluster that may matter and are not ``done``."""
    values, owner, costs = every.alone(), every.near.cluster_r, every.costs
    own_pair = every.problem.pair_of(every.now)
    chosen = []
    for m in np.unique(owner[~done]):
        known, open_r = np.flatnonzero(done & (owner == m)), np.flatnonzero(~done & (owner == m))
        least = np.sort(values[known])[WIDTH - 1] if len(known) >= WIDTH else np.inf
        matters = values[open_r] < least
        if joint:
            latency = np.append(costs.latency[known], every.own.latency[m])
            worth = np.append(costs.worth[known], every.own.worth[m])
            pairs = np.append(pair_r[known], own_pair[m])
            beaten = (latency <= costs.latency[open_r, None]) & (worth <= costs.worth[open_r, None])
            matters |= ~(beaten & (pairs == pair_r[open_r, None])).any(1)
        open_r = open_r[matters]
        chosen.append(open_r[np.argsort(values[open_r], kind="stable")[:AT_A_TIME]])
    return np.concatenate(chosen) if chosen else np.zeros(0, np.int64)


def beam(
    start: Layouts,
    neighbours: Callable[[Layouts], Layouts],
    price: Callable[[Layouts], RunnersUp],
    width: int = WIDTH,
) -> Iterator[RunnersUp]:
    """The ``width`` best rows of every cluster one move from ``start``, then one move from those.

    Ends when the best row of all has not become better for `PATIENCE` moves.
    """
    seen, best, vain = set(keys_of(start)), np.inf, 0
    while vain < PATIENCE:
        moved = neighbours(start)
        new = {key: row for row, key in enumerate(keys_of(moved)) if key not in seen}
        if not new:
            return
        seen |= new.keys()
        found = price(moved.take(np.array(list(new.values())))).first(width)
        least = found.alone().min()
        vain = 0 if least < best else vain + 1
        best, start = min(best, least), found.near
        yield found

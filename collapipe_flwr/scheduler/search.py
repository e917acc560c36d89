"""The segment half of a decision: one layout and batch per cluster at dual prices.

A Pareto local search (Paquete, Chiarandini and Stuetzle 2004): a pool of layouts in which none of a
cluster's beats another in both latency and priced energy grows by the neighbours of its rows until
none of them enters. One row per cluster is picked for all clusters together; near that pick's
length of a round, where a difference matters, rows are told apart finely. Clusters with few layouts
are enumerated.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from collapipe_flwr.costs.arrays import Array, Ints, Mask
from collapipe_flwr.costs.layouts import Layouts, make_keys, replace_rows, stack_layouts
from collapipe_flwr.scheduler.cheapest_rows import cheapest_rows
from collapipe_flwr.scheduler.dual_prices import DualPrices
from collapipe_flwr.scheduler.initial_layouts import (
    all_layouts,
    count_layouts,
    first_rows,
    rows_for,
)
from collapipe_flwr.scheduler.local_search import Moves, pair_batches
from collapipe_flwr.scheduler.pool import PlanSelector, Pool, pool_of, select_front
from collapipe_flwr.scheduler.problem import Estimates, PlanningProblem
from collapipe_flwr.scheduler.scorer import Scorer

ENUMERATED_ROWS = 20_000  # clusters with fewer candidates than this are searched completely
ENUMERATED_IN_ALL = 60_000  # as long as all clusters together have fewer than this
SPARES = 3  # devices without a segment that moves try where time is short, cheapest first
ENOUGH = 2e-3  # of the objective: what all gains that are let go come to at most
ROUNDS = 12  # of growth at most
ROUNDS_AGAIN = 4  # the same where time is short
FAR_CLUSTERS = 8  # up to here time allows looking two moves away
NO_LIMIT = 10**9
TRIED = (20_000, 0.2)  # rows whose neighbours a decision from scratch tries: in all, per cluster
TRIED_AGAIN = 1000  # the same with rows in place
HASTY_CLUSTERS = 50  # with more, and rows in place, so many are tried, all at once
TRIED_HASTILY = 50
LENGTHS = (  # of a round, over that with rows in place
    *(0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 1.0, 1.05, 1.1, 1.2, 1.35, 1.5, 2.0),
)
NEAR = 4.0  # times the batches in place, or one of so many: those tried where time is short
SAMPLE = 200  # clusters that choose the pairs of more than twice as many
PARTS = 3  # of what may be tried at one set of prices, so much at a time
PRESSING = 0.9  # of the round's length: clusters that take longer are what it waits for
PROMISING = 2.0  # pairs whose first plan costs up to this factor of the best one's are grown
PROMISING_MANY = 1.2  # the same with more than a few clusters
BAND = 1.3  # rows whose latency is worth within this factor of the pick's are told apart
ELSEWHERE = 4  # plans for other lengths of a round at most
COARSE = 1.12  # factor by which latencies out of the band must differ


class Search:
    """Searches of one decision under successive dual prices."""

    def __init__(self, problem: PlanningProblem, spare: Layouts | None = None) -> None:
        """Search ``problem``; ``spare`` rows are known besides those in place."""
        self.problem, self.spare = problem, spare
        self.clusters = np.arange(problem.tables.num_clusters)
        self.few = problem.tables.few  # with more, what is tried is limited
        self.pool: Pool | None = None
        self.left, self.thorough, self.hasty = NO_LIMIT, True, False

    def choose(self, prices: DualPrices, now: Layouts | None) -> Layouts:
        """Choose the best rows for all clusters together; raises InfeasibleError without any.

        The first choice of a search without rows in place starts from scratch, later ones from what
        is known by then.
        """
        self.scorer = Scorer(self.problem, prices)
        self.cost_mi = self._device_cost()
        if self.pool is None and not (self.few and now is None):
            self.thorough = now is None
            self.hasty = not self.thorough and len(self.clusters) > HASTY_CLUSTERS
            if self.thorough:
                self.left = TRIED[0] + int(TRIED[1] * len(self.clusters))
            else:
                self.left = TRIED_HASTILY if self.hasty else TRIED_AGAIN
        if self.pool is None and now is None:
            pool = self._start_pool()
            fresh = np.ones(len(pool), bool)
        else:
            known = [] if self.pool is None else [self.pool.rows]
            new = (
                []
                if now is None
                else self._collect_around(now)
                if self.thorough
                else self._collect_in_time(now)
            )
            pool = self._pool_of(stack_layouts(known + new))
            fresh = np.arange(len(pool)) >= sum(len(rows) for rows in known)
        keep = self._find_promising(pool)
        self.pool, choice = self._grow(pool.take(keep), fresh[keep])
        rows = self.pool.rows.take(choice)
        return replace_rows(rows, self.clusters, rows)  # no wider than needed

    def pick_elsewhere(self) -> Iterator[Layouts]:
        """Pick other plans from the last pool that cost little more, best first.

        Their rounds are shorter or longer, so that no single move leads from one to another.
        """
        assert self.pool is not None  # of the last choice
        for choice in PlanSelector(self.problem, self.pool).pick_elsewhere()[:ELSEWHERE]:
            rows = self.pool.rows.take(choice)
            yield replace_rows(rows, self.clusters, rows)

    # -- where a search starts --------------------------------------------------------------

    def _pool_of(self, rows: Layouts) -> Pool:
        return pool_of(self.problem, self.scorer, rows)

    def _start_pool(self) -> Pool:
        """Collect all rows of small clusters, simple ones of others with the best pairs."""
        problem, counts = self.problem, self.problem.count_devices()
        tables, batches = problem.tables, problem.list_batches()
        small = self._find_enumerable(counts)
        parts = [
            rows_for(int(m), *all_layouts(int(counts[m]), tables.num_blocks), batches)
            for m in np.flatnonzero(small)
        ]
        if len(large := np.flatnonzero(~small)):
            parts += [first_rows(problem, large, pair) for pair in self._sample_pairs(large)]
        pool = self._pool_of(stack_layouts(parts))
        if (missing := np.setdiff1d(self.clusters, pool.rows.cluster_r)).size:
            problem.refuse(missing)
        return pool.take(select_front(pool, len(batches), 0.0))

    def _find_enumerable(self, counts: Ints) -> Mask:
        grid, blocks = len(self.problem.list_batches()), self.problem.tables.num_blocks
        most = min(ENUMERATED_ROWS, ENUMERATED_IN_ALL // len(counts))
        rows = {int(n): count_layouts(int(n), blocks) for n in set(counts.tolist())}
        return np.array([rows[int(n)] * grid <= most for n in counts])

    def _find_widest_pairs(self) -> list[tuple[int, int]]:
        """Find for every batch of the grid the pair with the most micro-batches."""
        widest: dict[int, tuple[int, int]] = {}
        for size, count in sorted(self.problem.list_batches().tolist()):
            widest.setdefault(size * count, (size, count))
        return list(widest.values())

    def _sample_pairs(self, large: Ints) -> list[tuple[int, int]]:
        """Return the widest pairs; of many clusters those with which some of them are quick."""
        pairs, some = self._find_widest_pairs(), large[:: max(len(large) // SAMPLE, 1)]
        if len(large) <= 2 * SAMPLE:
            return pairs
        late = []
        for pair in pairs:
            pool = self._pool_of(first_rows(self.problem, some, pair))
            quickest = np.full(len(self.clusters), np.inf)
            np.minimum.at(quickest, pool.rows.cluster_r, pool.costs.latency)
            late.append(self._common_rho(*pair) * float(quickest[some].max()))
        most = PROMISING_MANY * min(late)
        good = [pair for pair, value in zip(pairs, late, strict=True) if value <= most]
        return good if np.isfinite(most) else pairs

    def _common_rho(self, size: int, count: int) -> float:
        """Return relative rounds to the target where all clusters have these micro-batches."""
        tables, one = self.problem.tables, np.ones((len(self.clusters), 1), np.int64)
        stops = tables.num_blocks * one
        rows = Layouts(
            cluster_r=self.clusters,
            member_rs=one,
            stop_rs=stops,
            micro_batch_size_r=size * one[:, 0],
            micro_batches_r=count * one[:, 0],
        )
        return self.problem.learning.compute_rho(tables, rows)

    def _find_promising(self, pool: Pool) -> Mask:
        """Find rows with batches whose first plan is not far from the best one."""
        picking = PlanSelector(self.problem, pool)
        least, choice = picking.pick_common()
        most = (PROMISING if self.few else PROMISING_MANY) * least
        good = [batch for batch, best in picking.commons.items() if best.value <= most]
        keep = np.isin(pool.rows.batch_r, good)
        # A pair that is bad for all of them may be good for the one that the others wait for.
        own = pool.rows.cluster_r * len(self.problem.list_batches()) + pool.pair_r
        keep |= np.isin(own, own[picking.price_exchanges(choice) < least])
        served = np.isin(pool.rows.cluster_r, pool.rows.cluster_r[keep])
        return np.asarray(keep | ~served)

    def _collect_around(self, now: Layouts) -> list[Layouts]:
        """Collect rows in place with other micro-batches, and simple ones at these prices.

        The latter for all clusters where nothing else is known, else for those that matter most.
        """
        which, batches = self.clusters, self.problem.list_batches()
        if self.pool is not None:
            in_place = self._pool_of(now)
            value = PlanSelector(self.problem, in_place).value(self.clusters)
            which = np.flatnonzero(self._find_pressing(in_place.costs, value))
        simple = [first_rows(self.problem, which, pair) for pair in _pairs_of(now)]
        return [pair_batches(now, batches)[1], *simple]

    def _collect_in_time(self, now: Layouts) -> list[Layouts]:
        """Collect, where time is short, the cheapest rows for rounds of lengths near today's.

        Also rows in place with other micro-batches, and those of a spare plan.
        """
        least, most = now.batch_r.min() / NEAR, now.batch_r.max() * NEAR
        widest = [pair for pair in self._find_widest_pairs() if least <= pair[0] * pair[1] <= most]
        pairs = np.unique(np.array(_pairs_of(now) + widest), axis=0)
        known = [pair_batches(now, pairs)[1]]
        known += [] if self.spare is None else [self.spare]
        late_t = self.scorer.estimate(now).latency.max() * np.array(LENGTHS)
        return [*known, cheapest_rows(self.scorer, now, late_t)]

    # -- growth -----------------------------------------------------------------------------

    def _grow(self, pool: Pool, fresh: Mask) -> tuple[Pool, Ints]:
        """Grow the pool by rows worth knowing near ``fresh`` ones, and pick a row per cluster.

        Half of what may still be tried in a decision from scratch is left for other prices.
        """
        tried = self.left // 2 if self.thorough else self.left
        spares = self.cost_mi.shape[1] if self.thorough else SPARES
        value, choice = PlanSelector(self.problem, pool).best()
        jumped: set[bytes] = set()
        for _ in range(ROUNDS if self.thorough else ROUNDS_AGAIN):
            keep = self._select_known(pool, value, choice)
            choice = (np.cumsum(keep) - 1)[choice]
            pool, fresh = pool.take(keep), fresh[keep]
            most = tried if self.hasty else -(-tried // PARTS)
            moving = self._order_moves(pool, choice, np.flatnonzero(fresh))[:most]
            tried, self.left = tried - len(moving), self.left - len(moving)
            if len(moving):
                near = Moves(pool.rows.take(moving), self.cost_mi, spares).all()
            else:
                near = self._jump_far(pool.rows.take(choice), jumped)
            if not len(near):
                break
            known = len(pool)
            pool = pool.join(self._pool_of(near))
            fresh = np.arange(len(pool)) >= known
            value, choice = PlanSelector(self.problem, pool).best()
            if self.hasty:  # all that may be tried has been
                break
        return pool, choice

    def _jump_far(self, picked: Layouts, jumped: set[bytes]) -> Layouts:
        """Return rows two moves away from those for which this is new; for few clusters."""
        none = picked.take(np.zeros(0, np.int64))
        if len(self.clusters) > FAR_CLUSTERS:
            return none
        keys = make_keys(picked)
        new = [r for r, key in enumerate(keys) if key not in jumped]
        jumped |= set(keys)
        if not new:
            return none
        most = self.cost_mi.shape[1]
        near = Moves(picked.take(np.array(new)), self.cost_mi, most).all()
        return Moves(near, self.cost_mi, most).all() if len(near) else none

    def _order_moves(self, pool: Pool, choice: Ints, rows: Ints) -> Ints:
        """Order ``rows``: slowest clusters first, then by priced energy, highest first."""
        owner, latency = pool.rows.cluster_r[rows], pool.costs.latency[choice]
        slow = latency > PRESSING * latency.max()
        return rows[np.lexsort((-pool.costs.worth[choice][owner], ~slow[owner]))]

    def _select_known(self, pool: Pool, value: float, choice: Ints) -> Mask:
        """Select rows that no other beats, seen from a pick of that ``value``, and the pick's."""
        problem, costs, owner = self.problem, pool.costs, pool.rows.cluster_r
        price_r = self._price_second(pool)
        rho = problem.learning.compute_rho(problem.tables, pool.rows.take(choice))
        late = problem.latency_price * rho * float(costs.latency[choice].max())
        near_r = self._find_pressing(costs.take(choice), value)[owner]
        scaled = [_coarsen(price_r * s / late, near_r) for s in (costs.latency, costs.soft)]
        seen = replace(pool, costs=Estimates(scaled[0], scaled[1], costs.worth))
        keep = select_front(seen, len(problem.list_batches()), ENOUGH * value / len(self.clusters))
        keep &= near_r | (price_r * costs.latency <= BAND * late)
        keep[choice] = True
        return keep

    def _find_pressing(self, costs: Estimates, value: float) -> Mask:
        """Find clusters that make the round long or dear, (M,); all where there are few."""
        slow = costs.latency > PRESSING * costs.latency.max()
        return np.asarray(slow | (costs.worth > ENOUGH * value) | self.few)

    def _price_second(self, pool: Pool) -> Array:
        """Price a second of the round where all clusters have the row's micro-batches, (R,)."""
        batches = self.problem.list_batches()
        price = np.zeros(len(batches))
        for pair in np.unique(pool.pair_r):
            rho = self._common_rho(*batches[pair].tolist())
            price[pair] = self.problem.latency_price * rho
        return price[pool.pair_r]

    def _device_cost(self) -> Array:
        """Price an operation on every member, infinite where none can work, (M, I)."""
        members, price_mi = self.problem.tables.members, self.problem.price_mi
        second = self.scorer.slope_m[:, None] / members.speed_mi
        cost = second + price_mi * members.energy_per_flop_mi
        cost[~members.present_mi] = np.inf
        cost[:, 0] = np.inf
        return cost


def _coarsen(late_r: Array, near_r: Mask) -> Array:
    """Coarsen latency over the pick's outside the band around 1, where differences matter less."""
    coarse = COARSE ** np.ceil(np.log(late_r) / np.log(COARSE))
    coarse = np.where((late_r > 1.0 / BAND) & (late_r < BAND), late_r, coarse)
    return np.where(near_r, coarse, np.maximum(late_r, 1.0 / BAND))


def _pairs_of(rows: Layouts) -> list[tuple[int, int]]:
    """Return the pairs of micro-batches that rows have."""
    pairs = np.stack([rows.micro_batch_size_r, rows.micro_batches_r], axis=1)
    return [(size, count) for size, count in np.unique(pairs, axis=0).tolist()]

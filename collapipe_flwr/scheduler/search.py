"""The segment half of a decision: for every cluster the best layout and batch at dual prices.

Small clusters are enumerated. Larger ones descend over single moves from where they are; those
whose latency matters also from fresh starts, and, when clusters are few, exact shortest paths at
the descent's batch try to do better still.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from collapipe_flwr.core.errors import InfeasibleError
from collapipe_flwr.costs.arrays import Array, Ints, Mask
from collapipe_flwr.costs.layouts import Layouts, replaced, stack
from collapipe_flwr.scheduler.dual_prices import LEAST_SLOPE, DualPrices, best_of
from collapipe_flwr.scheduler.initial_layouts import (
    all_layouts,
    count_layouts,
    filling_rows,
    rows_for,
    starting_rows,
)
from collapipe_flwr.scheduler.local_search import Candidates, Neighbourhood, descend, every_batch
from collapipe_flwr.scheduler.problem import RoundProblem
from collapipe_flwr.scheduler.segment_dp import any_order, best_path
from collapipe_flwr.scheduler.segment_problem import Terms, segment_problem

Score = Callable[[Layouts], Array]

ENUMERATED_ROWS = 20_000  # clusters with fewer candidates than this are searched completely
ENUMERATED_IN_ALL = 60_000  # as long as all clusters together have fewer than this
SPARES = 2  # devices without a segment that the descent tries, cheapest first
ENOUGH = 1e-4  # share of the objective per cluster: smaller gains do not matter
SWEEPS = 30  # of one descent at most
CHUNK = 400  # clusters searched at a time: keeps candidates within tens of megabytes
FRESH_CLUSTERS = 2  # so many of the clusters whose latency matters most start afresh, too
FRESH_STARTS = 6  # each of them from so many simple layouts
EXACT_CLUSTERS = 3  # shortest paths cost up to seconds: for so many clusters at most


class Search:
    """Searches of one decision under successive dual prices."""

    def __init__(self, problem: RoundProblem) -> None:
        self.problem = problem
        self.counts, self.batches = problem.device_counts(), problem.batches()
        self.small = self._enumerable()
        self.place_of_batch = np.full(self.batches.max(0) + 1, -1)  # -1: no plan may choose it
        self.place_of_batch[*self.batches.T] = np.arange(len(self.batches))

    def choose(self, prices: DualPrices, now: Layouts | None) -> Layouts:
        """The best row found for every cluster, never worse than ``now``'s."""
        self.prices = prices
        start = rows = now if now is not None else self._plain()
        for m in np.flatnonzero(self.small):
            rows = replaced(rows, np.array([m]), self._enumerate(int(m), start))
        large = np.flatnonzero(~self.small)
        if not len(large):
            return rows
        fresh = large if now is None else self._pressing(large)
        for chunk in self._chunks(start, large):
            found = self._walk(start, chunk, np.intersect1d(chunk, fresh), now is None)
            rows = replaced(rows, chunk, found)
        if len(large) <= EXACT_CLUSTERS:
            for m in large:
                rows = self._exact(rows, int(m))
        return rows

    def _chunks(self, rows: Layouts, clusters: Ints) -> list[Ints]:
        """Clusters of similar depth together, each part in order."""
        by_depth = clusters[np.argsort(rows.depth_r[clusters], kind="stable")]
        return [np.sort(part) for part in np.array_split(by_depth, -(-len(clusters) // CHUNK))]

    def _score(self, clusters: Ints, now: Layouts) -> Score:
        """The objective of rows of ``clusters`` while other clusters stay as in ``now``."""
        scorer = self.problem.scorer(self.prices, clusters)
        every = every_batch(now.take(clusters), self.batches)[1]
        rho = self.problem.learning.rho_rows(self.problem.tables, every, now)
        first_m = np.zeros(len(self.counts), np.int64)
        first_m[clusters] = len(self.batches) * np.arange(len(clusters))

        def score(rows: Layouts) -> Array:
            place = self.place_of_batch[rows.micro_batch_size_r, rows.micro_batches_r]
            found = scorer.values(rows, rho.take(first_m[rows.cluster_r] + place))
            return np.where(place < 0, np.inf, found)

        return score

    # -- small clusters ---------------------------------------------------------------------

    def _enumerable(self) -> Mask:
        grid, blocks = len(self.batches), self.problem.tables.num_blocks
        most = min(ENUMERATED_ROWS, ENUMERATED_IN_ALL // len(self.counts))
        counts = {int(n): count_layouts(int(n), blocks) for n in set(self.counts.tolist())}
        return np.array([counts[int(n)] * grid <= most for n in self.counts])

    def _enumerate(self, m: int, now: Layouts) -> Layouts:
        blocks = self.problem.tables.num_blocks
        rows = rows_for(m, *all_layouts(int(self.counts[m]), blocks), self.batches)
        values = self._score(np.array([m]), now)(rows)
        best = int(np.argmin(values))
        if not np.isfinite(values[best]):
            self.problem.refuse(m)
        return rows.take(np.array([best]))

    # -- larger clusters --------------------------------------------------------------------

    def _plain(self) -> Layouts:
        """Everything on the first device: only a frame that better rows replace."""
        reference = self.problem.learning.reference
        size, count = reference.micro_batch_size, reference.micro_batches
        clusters = len(self.counts)
        return Layouts(
            cluster_r=np.arange(clusters),
            member_rs=np.ones((clusters, 1), np.int64),
            stop_rs=np.full((clusters, 1), self.problem.tables.num_blocks),
            micro_batch_size_r=np.full(clusters, size),
            micro_batches_r=np.full(clusters, count),
        )

    def _pressing(self, clusters: Ints) -> Ints:
        """Those whose latency matters most."""
        order = np.argsort(-self.prices.slack_price_m[clusters], kind="stable")
        return np.asarray(clusters[order[:FRESH_CLUSTERS]])

    def _least(self) -> Array:
        """The gain of every cluster that is worth a step; any where latency matters most."""
        clusters = len(self.counts)
        least = np.full(clusters, ENOUGH * self.problem.settings.penalty_weight / clusters)
        least[self._pressing(np.arange(clusters))] = 0.0
        return least

    def _walk(self, now: Layouts, clusters: Ints, fresh: Ints, only_fresh: bool) -> Layouts:
        """Descend from where ``clusters`` are and from simple layouts of ``fresh``."""
        score, starts = self._score(clusters, now), []
        if not only_fresh:
            starts.append(now.take(clusters))
        if len(fresh):
            starts.append(self._starts(fresh, score, 1 if only_fresh else FRESH_STARTS))
        rows = stack(starts)
        candidates = Candidates(rows, score(rows), self._least()[rows.cluster_r])
        descend(candidates, score, self._neighbourhood(), SWEEPS)
        place = np.searchsorted(clusters, candidates.rows.cluster_r)
        return candidates.rows.take(best_of(candidates.values, place, len(clusters)))

    def _neighbourhood(self) -> Neighbourhood:
        """What the descent tries; the cost of a device is that of an operation on it."""
        members, prices = self.problem.tables.members, self.prices
        slope = np.maximum(prices.slack_price_m, LEAST_SLOPE * prices.latency_price)
        cost = slope[:, None] / members.speed_mi + prices.price_mi * members.energy_per_flop_mi
        cost[~members.present_mi] = np.inf
        cost[:, 0] = np.inf
        return Neighbourhood(
            cost_mi=cost,
            spares=SPARES,
            sizes=np.unique(self.batches[:, 0]),
            counts=np.unique(self.batches[:, 1]),
        )

    def _starts(self, clusters: Ints, score: Score, each: int) -> Layouts:
        """The best simple layouts of each of ``clusters``; raises InfeasibleError without any."""
        reference = self.problem.learning.reference
        batches = np.array(
            [
                [reference.micro_batch_size, reference.micro_batches],
                min(self.batches, key=lambda pair: (pair[0] * pair[1], pair[0])),
            ]
        )
        tables, options = self.problem.tables, self.problem.settings
        rows = stack(
            [
                starting_rows(tables, clusters, self.counts, batches),
                filling_rows(tables, options, clusters, batches),
            ]
        )
        values = score(rows)
        order = np.lexsort((values, rows.cluster_r))
        first = np.searchsorted(rows.cluster_r[order], clusters)
        for m in clusters[~np.isfinite(values[order[first]])]:
            self.problem.refuse(int(m))
        rank = np.arange(len(order)) - np.repeat(first, len(rows) // len(clusters))
        return rows.take(order[(rank < each) & np.isfinite(values[order])])

    def _better(self, rows: Layouts, rival: Layouts) -> Layouts:
        """``rows`` with ``rival`` where it scores better."""
        score = self._score(rival.cluster_r, rows)
        wins = score(rival) < score(rows.take(rival.cluster_r))
        return replaced(rows, rival.cluster_r[wins], rival.take(wins)) if wins.any() else rows

    # -- exact paths ------------------------------------------------------------------------

    def _exact(self, rows: Layouts, m: int) -> Layouts:
        """The shortest path at the present batch, for both slopes of the objective."""
        problem, prices = self.problem, self.prices
        if int(self.counts[m]) > problem.settings.exact_devices:
            return rows
        slopes = {prices.latency_price, float(prices.slack_price_m[m])}
        for slope in sorted(s for s in slopes if s > 0):
            terms = Terms(
                cluster=m,
                micro_batch_size=int(rows.micro_batch_size_r[m]),
                micro_batches=int(rows.micro_batches_r[m]),
                slope=slope,
                price_i=prices.price_mi[m],
                room_i=prices.room_mi[m],
                edge_hz=float(prices.edge_hz_m[m]),
            )
            try:
                path = best_path(
                    segment_problem(problem.tables, problem.settings, terms), any_order
                )
            except InfeasibleError:  # this batch fits nowhere; the descent's row stands
                continue
            members = np.array([[device + 1 for device in path.devices]])
            stops = np.array([path.stops])
            rival = replace(rows.take(np.array([m])), member_rs=members, stop_rs=stops)
            rows = self._better(rows, rival)
        return rows

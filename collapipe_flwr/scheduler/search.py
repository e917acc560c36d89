"""The segment half of a decision: for every cluster the best layout and batch under a market.

Small clusters are enumerated. Larger ones descend over single moves from where they are; those
whose latency matters also from fresh starts, and, when clusters are few, exact shortest paths at
the descent's batch try to do better still.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from collapipe_flwr.core.errors import InfeasibleError
from collapipe_flwr.costs.layouts import UNUSED, Layouts, replaced, stack
from collapipe_flwr.scheduler.layout_search import Moves, all_layouts, count_layouts, rows_for
from collapipe_flwr.scheduler.market import Market, segment_choice
from collapipe_flwr.scheduler.segment_dp import Path, any_order, best_path
from collapipe_flwr.scheduler.segments import Terms, segment_problem
from collapipe_flwr.scheduler.starts import starting_rows

if TYPE_CHECKING:
    from collapipe_flwr.scheduler.planner import Planner

Array = NDArray[np.float64]
Ints = NDArray[np.int64]

ENUMERATED_ROWS = 20_000  # clusters with fewer candidates than this are searched completely
DESCENT_SWEEPS = 40
MANY = 20  # more clusters than this, already planned once, go on for a few sweeps per round
WARM_SWEEPS = 6
CHUNK = 400  # clusters searched at a time: keeps candidates within tens of megabytes
FRESH_CLUSTERS = 8  # so many of the clusters whose latency matters most start afresh, too
EXACT_CLUSTERS = 3  # shortest paths cost up to seconds: for so many clusters at most
SAME = 1e-9


class Search:
    """One search under one market."""

    def __init__(self, planner: Planner, market: Market) -> None:
        self.planner, self.market = planner, market
        self.scorer = planner.scorer(market)
        self.counts, self.batches = planner.device_counts(), planner.batches()
        self.clusters = np.arange(planner.tables.num_clusters)

    def choose(self, now: Layouts | None) -> Layouts:
        """The best row found for every cluster, never worse than ``now``'s."""
        small = self._enumerable()
        rows = now if now is not None else self._plain()
        for m in self.clusters[small]:
            rows = replaced(rows, np.array([m]), self._enumerate(int(m), rows))
        large = self.clusters[~small]
        if not len(large):
            return rows
        for chunk in np.array_split(large, -(-len(large) // CHUNK)):
            if now is None:
                rows = replaced(rows, chunk, self._starts(rows, chunk))
            sweeps = WARM_SWEEPS if now is not None and len(large) > MANY else DESCENT_SWEEPS
            rows = self._descend(rows, chunk, sweeps)
        if now is not None:
            rows = self._afresh(rows, large)
        if len(large) <= EXACT_CLUSTERS:
            for m in large:
                rows = self._exact(rows, int(m))
        return rows

    def score(self, rows: Layouts, now: Layouts) -> Array:
        """The objective of rows while other clusters stay as in ``now``."""
        return self.planner.score(self.scorer, rows, now)

    # -- small clusters ---------------------------------------------------------------------

    def _enumerable(self) -> NDArray[np.bool_]:
        grid, blocks = len(self.batches), self.planner.tables.num_blocks
        counts = {int(n): count_layouts(int(n), blocks) for n in set(self.counts.tolist())}
        return np.array([counts[int(n)] * grid <= ENUMERATED_ROWS for n in self.counts])

    def _enumerate(self, m: int, now: Layouts) -> Layouts:
        blocks = self.planner.tables.num_blocks
        rows = rows_for(m, *all_layouts(int(self.counts[m]), blocks), self.batches)
        values = self.score(rows, now)
        best = int(np.argmin(values))
        if not np.isfinite(values[best]):
            self.planner.refuse(m)
        return rows.take(np.array([best]))

    # -- larger clusters --------------------------------------------------------------------

    def _plain(self) -> Layouts:
        """Everything on the first device: only a frame that better rows replace."""
        reference = self.planner.learning.reference
        size, count = reference.micro_batch_size, reference.micro_batches
        clusters = len(self.clusters)
        return Layouts(
            cluster_r=self.clusters.copy(),
            member_rs=np.ones((clusters, 1), np.int64),
            stop_rs=np.full((clusters, 1), self.planner.tables.num_blocks),
            micro_batch_size_r=np.full(clusters, size),
            micro_batches_r=np.full(clusters, count),
        )

    def _starts(self, now: Layouts, clusters: Ints) -> Layouts:
        """The best simple layout of each of ``clusters``; raises InfeasibleError without any."""
        reference = self.planner.learning.reference
        batches = np.array(
            [
                [reference.micro_batch_size, reference.micro_batches],
                [self.batches[:, 0].min(), self.batches[:, 1].min()],
            ]
        )
        rows = starting_rows(self.planner.tables, clusters, self.counts, batches)
        values = self.score(rows, now)
        best = segment_choice(values, rows.cluster_r, clusters)
        for m in clusters[~np.isfinite(values[best])]:
            self.planner.refuse(int(m))
        return rows.take(best)

    def _descend(self, rows: Layouts, moving: Ints, sweeps: int = DESCENT_SWEEPS) -> Layouts:
        """Steepest descent over single moves, all clusters in step until each stands still."""
        for _ in range(sweeps):
            here = rows.take(moving)
            moves = Moves(here, self.counts[here.cluster_r]).all()
            tried = stack([here, self.planner.rebatched(here), moves])
            values = self.score(tried, rows)
            values[: len(here)] -= SAME * np.abs(values[: len(here)])
            best = segment_choice(values, tried.cluster_r, here.cluster_r)
            better = best >= len(here)
            if not better.any():
                break
            rows = replaced(rows, moving[better], tried.take(best[better]))
            moving = moving[better]
        return rows

    def _afresh(self, rows: Layouts, large: Ints) -> Layouts:
        """Descend from simple layouts where latency matters most; keep what is better."""
        order = np.argsort(-self.market.slack_price_m[large], kind="stable")
        clusters = np.sort(large[order[:FRESH_CLUSTERS]])
        fresh = replaced(rows, clusters, self._starts(rows, clusters))
        fresh = self._descend(fresh, clusters)
        return self._better(rows, fresh.take(clusters))

    def _better(self, rows: Layouts, rivals: Layouts) -> Layouts:
        """``rows`` with those rivals, one per cluster, that score better."""
        clusters = rivals.cluster_r
        old, new = self.score(rows.take(clusters), rows), self.score(rivals, rows)
        wins = new < old
        return replaced(rows, clusters[wins], rivals.take(wins)) if wins.any() else rows

    # -- exact paths ------------------------------------------------------------------------

    def _exact(self, rows: Layouts, m: int) -> Layouts:
        """The shortest path at the present batch, for both slopes of the objective."""
        if int(self.counts[m]) > self.planner.settings.exact_devices:
            return rows
        slopes = {self.market.latency_price, float(self.market.slack_price_m[m])}
        for slope in sorted(s for s in slopes if s > 0):
            path = self._path(rows, m, slope)
            if path is not None:
                rows = self._better(rows, self._row(rows, m, path))
        return rows

    def _path(self, rows: Layouts, m: int, slope: float) -> Path | None:
        terms = Terms(
            cluster=m,
            micro_batch_size=int(rows.micro_batch_size_r[m]),
            micro_batches=int(rows.micro_batches_r[m]),
            slope=slope,
            price_i=self.market.price_mi[m],
            edge_hz=float(self.market.edge_hz_m[m]),
        )
        planner = self.planner
        try:
            return best_path(
                segment_problem(planner.tables, planner.settings.options, terms), any_order
            )
        except InfeasibleError:  # this batch fits nowhere; the descent's row stands
            return None

    def _row(self, rows: Layouts, m: int, path: Path) -> Layouts:
        one = rows.take(np.array([m]))
        return Layouts(
            cluster_r=one.cluster_r,
            member_rs=np.array([[device + 1 for device in path.devices] or [UNUSED]]),
            stop_rs=np.array([path.stops]),
            micro_batch_size_r=one.micro_batch_size_r,
            micro_batches_r=one.micro_batches_r,
        )

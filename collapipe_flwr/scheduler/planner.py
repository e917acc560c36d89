"""One round's decision: segments and batches, then radio, alternately, never getting worse.

``multistart`` also searches from where clusters only get together. Rounds to the target depend on
the most local steps of any cluster, so a larger batch may pay only when every cluster takes it:
here everybody is planned with one pair, for the few pairs that need the fewest rounds. Likewise a
round is as slow as its slowest cluster, so one start makes latency cheap for all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from collapipe_flwr.core.errors import InfeasibleError
from collapipe_flwr.costs.arrays import Array
from collapipe_flwr.costs.chain import Chain, RowPrices, chain_of, powers_for, price_rows
from collapipe_flwr.costs.convergence import others_max
from collapipe_flwr.costs.layouts import Layouts, by_member, key_of, of_members, replaced, stack
from collapipe_flwr.scheduler.dual_prices import DualPrices, overdrawn
from collapipe_flwr.scheduler.local_search import Moves, every_batch
from collapipe_flwr.scheduler.problem import RoundProblem
from collapipe_flwr.scheduler.radio.interior_point import Allocation, allocate
from collapipe_flwr.scheduler.search import Search

FEW_CLUSTERS = 4  # up to here time allows planning from scratch and trying runners-up
SEARCHES = 300  # searches of single clusters that alternating may cost
OVERHEAD = 30  # what an alternation costs besides, in searches of single clusters
LEAST_ROUNDS = 2  # alternations whatever they cost
POLISH_SOLVES = 16  # radio solves spent on runners-up
POLISH_RIVALS = 8  # of them at a time
WORTH_A_TRY = 0.15  # share of the objective by which a runner-up may seem worse
SAME = 1e-9  # relative differences below this count as none
MOST_CLUSTERS = 20  # above, time allows no second search
RELAXED = 0.05  # what a second costs in a relaxed start, as a share of its price
OPENINGS = 4  # pairs that are searched from scratch


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """A priced decision: one row per cluster."""

    chain: Chain
    allocation: Allocation
    powers: Array
    priced: RowPrices
    rho: float
    objective: float

    @property
    def rows(self) -> Layouts:
        """The layouts."""
        return self.chain.rows

    def spent_mi(self, shape: tuple[int, ...]) -> Array:
        """Joules of every member, (M, I)."""
        return by_member(self.priced.energy_j, self.rows, shape)

    def radio_mi(self, shape: tuple[int, ...]) -> Array:
        """What of them is radio."""
        return by_member(self.priced.energy_j - self.chain.computing_j, self.rows, shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Planner(RoundProblem):
    """Solves the problem of one round."""

    def solve(self, stay: Solution | None = None) -> Solution:
        """The best plan found, from scratch or also from ``stay``; raises InfeasibleError.

        Openings are the rows in place, every cluster as if it alone were the slowest and, without
        rows in place, every cluster with its equal part of the latency's price. Many clusters
        leave time for one improvement only.
        """
        clusters = self.tables.num_clusters
        if stay is not None and clusters > FEW_CLUSTERS:
            return self.improve(self.switched(stay))
        starts = [] if stay is None else [stay]
        shares = (1.0, 1.0 / clusters) if 1 < clusters <= FEW_CLUSTERS and not starts else (1.0,)
        starts += [self.radio(self.choose(self.opening_prices(s), None)) for s in shares]
        best = min((self.improve(s) for s in starts), key=lambda s: s.objective)
        return self.polished(self.together(best))

    def together(self, best: Solution) -> Solution:
        """Improve also from where all clusters take the same micro-batches, if that promises more.

        Rounds to the target depend on all of them: no cluster alone may gain by a change.
        """
        rows = self._same_batches(best)
        if rows is None:
            return best
        return min(best, self.improve(self.radio(rows)), key=lambda s: s.objective)

    def switched(self, best: Solution) -> Solution:
        """``best`` with the same micro-batches everywhere, if that is better as it is."""
        rows = self._same_batches(best)
        return best if rows is None else min(best, self.radio(rows), key=lambda s: s.objective)

    def _same_batches(self, best: Solution) -> Layouts | None:
        """The layouts of ``best`` with the most promising common micro-batches, if any is."""
        clusters = np.arange(self.tables.num_clusters)
        scorer = self.scorer(self.dual_prices(best), clusters)
        promises = []
        for size, count in self.batches():
            rows = best.rows.with_batches(size, count)
            latency, energy = scorer.estimates(rows)
            rho = self.learning.rho(self.tables, rows)
            value = self.latency_price * rho * float(latency.max()) + float(energy.sum())
            promises.append((value, size, count, rows))
        value, _, _, rows = min(promises, key=lambda p: p[:3])
        promising = value < best.objective and key_of(rows) != key_of(best.rows)
        return rows if promising else None

    def polished(self, best: Solution) -> Solution:
        """Try the runners-up of every cluster with the radio re-optimised, while time allows.

        Dual prices value a cluster's alternatives at the bandwidth it has now; the radio solver
        knows what each is really worth.
        """
        tries = POLISH_SOLVES if self.tables.num_clusters <= FEW_CLUSTERS else 0
        tried: set[bytes] = set()
        while tries > 0:
            rivals = [r for r in self._rivals(best) if key_of(r) not in tried][:tries]
            tried |= {key_of(r) for r in rivals}
            tries -= len(rivals)
            solutions = [self.radio(rows) for rows in rivals]
            better = min(solutions, key=lambda s: s.objective, default=best)
            if not better.objective < best.objective * (1.0 - SAME):
                break
            best = better
        return best

    def _rivals(self, best: Solution) -> list[Layouts]:
        """Plans that differ from ``best`` in one cluster, the most promising first."""
        scorer = self.scorer(self.dual_prices(best), np.arange(self.tables.num_clusters))
        now = best.rows
        near = stack([self.neighbours(now), every_batch(now, self.batches())[1]])
        values = self.score(scorer, near, now) - self.score(scorer, now, now)[near.cluster_r]
        order = np.argsort(values, kind="stable")
        order = order[values[order] < WORTH_A_TRY * best.objective][:POLISH_RIVALS]
        return [replaced(now, near.cluster_r[[r]], near.take(np.array([r]))) for r in order]

    def improve(self, best: Solution) -> Solution:
        """Alternate segments and radio from ``best`` on while the objective falls."""
        affordable = max(SEARCHES // (self.tables.num_clusters + OVERHEAD), LEAST_ROUNDS)
        search = Search(self)
        for _ in range(min(self.settings.rounds_of_search, affordable)):
            rows = search.choose(self.dual_prices(best), best.rows)
            if key_of(rows) == key_of(best.rows):
                break
            trial = self.radio(rows)
            if not trial.objective < best.objective * (1.0 - SAME):
                break
            best = trial
        return best

    def radio(self, rows: Layouts) -> Solution:
        """The best bandwidth and powers for one row per cluster."""
        chain = chain_of(self.tables, rows, self.settings)
        rho = self.learning.rho(self.tables, rows)
        allocation = allocate(
            chain,
            of_members(self.price_mi, rows),
            latency_price=self.latency_price * rho,
            bandwidth_hz=self.tables.snapshot.radio.bandwidth_hz,
        )
        return self.priced(chain, allocation, rho)

    def priced(self, chain: Chain, allocation: Allocation, rho: float) -> Solution:
        """Latency, energy and objective of a decision."""
        powers = powers_for(chain, allocation.edge_hz_r, allocation.times)
        priced = price_rows(chain, allocation.times, powers)
        energy = (of_members(self.price_mi, chain.rows) * priced.energy_j).sum()
        energy += self.latency_price * float((self.overdrawn(chain) * priced.latency_s).sum())
        return Solution(
            chain=chain,
            allocation=allocation,
            powers=powers,
            priced=priced,
            rho=rho,
            objective=self.latency_price * rho * float(priced.latency_s.max()) + float(energy),
        )

    def overdrawn(self, chain: Chain) -> Array:
        """The surcharge of every row's computing, in latencies of its cluster."""
        room = of_members(self.room_mi, chain.rows, padding=np.inf)[:, 1:]
        budget = of_members(self.tables.members.budget_mi, chain.rows, padding=1.0)[:, 1:]
        return np.asarray(overdrawn(chain.computing_j[:, 1:], room, budget).sum(1))

    def opening_prices(self, share: float = 1.0) -> DualPrices:
        """Equal bandwidth; every second of a cluster costs ``share`` of a second of the round."""
        clusters = self.tables.num_clusters
        return DualPrices(
            latency_price=self.latency_price * share,
            price_mi=self.price_mi,
            room_mi=self.room_mi,
            ceiling_m=np.zeros(clusters),
            slack_price_m=np.full(clusters, self.latency_price * share),
            edge_hz_m=np.full(clusters, self.tables.snapshot.radio.bandwidth_hz / clusters),
        )

    def dual_prices(self, now: Solution) -> DualPrices:
        """Prices that ``now`` implies."""
        return DualPrices(
            latency_price=self.latency_price,
            price_mi=self.price_mi,
            room_mi=self.room_mi,
            ceiling_m=others_max(now.priced.latency_s),
            slack_price_m=now.allocation.latency_price_r,
            edge_hz_m=now.allocation.edge_hz_r,
        )

    def choose(self, prices: DualPrices, now: Layouts | None) -> Layouts:
        """The best row of every cluster at ``prices``; raises InfeasibleError."""
        return Search(self).choose(prices, now)

    def neighbours(self, rows: Layouts) -> Layouts:
        """Every single move from every row, any device of its cluster coming in."""
        cost = np.where(self.tables.members.present_mi, 1.0, np.inf)
        cost[:, 0] = np.inf
        return Moves(rows, cost, cost.shape[1]).all()


def multistart(planner: Planner) -> Solution:
    """The best plan found from all openings; raises InfeasibleError."""
    best = planner.solve()
    if not 1 < planner.tables.num_clusters <= MOST_CLUSTERS:
        return best
    best = min(best, _relaxed(planner), key=lambda s: s.objective)
    if planner.learning.constants is None:
        return best
    rival = min(_openings(planner, best), key=lambda s: s.objective, default=best)
    return min(best, rival, planner.improve(rival), key=lambda s: s.objective)


def _relaxed(planner: Planner) -> Solution:
    """From where latency is cheap for all: one cluster alone gains nothing by slowing down."""
    relaxed = planner.opening_prices(RELAXED)
    return planner.polished(planner.improve(planner.radio(planner.choose(relaxed, None))))


def _openings(planner: Planner, best: Solution) -> Iterator[Solution]:
    """A search for each of the pairs with the fewest rounds."""
    pairs = _widest_pairs(planner)
    rounds = [planner.learning.rho(planner.tables, best.rows.with_batches(*pair)) for pair in pairs]
    for k in np.argsort(rounds, kind="stable")[:OPENINGS]:
        bound = _bound_to(planner, pairs[int(k)])
        try:
            yield bound.radio(bound.choose(bound.opening_prices(), None))
        except InfeasibleError:  # such micro-batches fit nowhere
            continue


def _widest_pairs(planner: Planner) -> list[tuple[int, int]]:
    """For every batch of the grid the pair with the most micro-batches: the least idle time."""
    widest: dict[int, tuple[int, int]] = {}
    for size, count in sorted(planner.batches().tolist()):
        widest.setdefault(size * count, (size, count))
    return list(widest.values())


def _bound_to(planner: Planner, pair: tuple[int, int]) -> Planner:
    """The same planner with one pair in its grid."""
    size, count = pair
    learning = planner.learning
    reference = replace(learning.reference, micro_batch_size=size, micro_batches=count)
    settings = replace(planner.settings, micro_batch_sizes=(size,), micro_batches=(count,))
    return replace(planner, settings=settings, learning=replace(learning, reference=reference))

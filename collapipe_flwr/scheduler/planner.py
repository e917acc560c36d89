"""Plans one round: alternate between segments with batches and radio while the objective falls."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from collapipe_flwr.costs.arrays import Array, Ints
from collapipe_flwr.costs.chain import (
    Chain,
    RowPrices,
    chain_of,
    full_power_times,
    latency_of,
    played,
    powers_for,
    price_rows,
)
from collapipe_flwr.costs.convergence import others_max
from collapipe_flwr.costs.layouts import (
    Layouts,
    by_member,
    key_of,
    of_members,
    stack,
)
from collapipe_flwr.scheduler.dual_prices import DualPrices
from collapipe_flwr.scheduler.local_search import pair_batches, recut_batches
from collapipe_flwr.scheduler.problem import PlanningProblem
from collapipe_flwr.scheduler.radio.equal_ends import levelled_hz
from collapipe_flwr.scheduler.radio.interior_point import Allocation, allocate
from collapipe_flwr.scheduler.runners_up import Incumbent
from collapipe_flwr.scheduler.scorer import Estimates
from collapipe_flwr.scheduler.search import Search

HASTENED_CLUSTERS = 1000  # up to here time allows looking further from scratch
REFINED_CLUSTERS = 10  # the slowest as played, which try other rows
PLAYED = 16  # of such a cluster's rows, those that are best by their bounds
NEAR = 2e-3  # a plan that costs so little more than by its bound is not refined
SLOW = 0.98  # of a round's length: for clusters that take longer, rows far away are tried
AMPLE = 8.0  # times its bandwidth: what a cluster is slow with is not the bandwidth's fault
LATE_CLUSTERS = 10  # of those that are searched further at a time
LATE_ROWS = 32  # rows of such a cluster that a beam goes on from
WORTH_A_TRY = 0.15  # share of the objective by which a runner-up may seem worse
ENOUGH = 1e-4  # relative gain of an alternation that is worth another
WORTHWHILE = 1e-3  # relative gain of a refinement that is worth another


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
        return self.chain.rows

    def spent_mi(self, shape: tuple[int, ...]) -> Array:
        """Return the joules of every member, (M, I)."""
        return by_member(self.priced.energy_j, self.rows, shape)

    def radio_mi(self, shape: tuple[int, ...]) -> Array:
        """Return the part of `spent_mi` that transmissions take."""
        return by_member(self.priced.energy_j - self.chain.computing_j, self.rows, shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSolver(PlanningProblem):
    """Solve the problem of one round: search by bounds, then play and mend what was found."""

    def solve(self, stay: Solution | None = None, spare: Layouts | None = None) -> Solution:
        """Search the best plan by its bound, from scratch or around ``stay`` and ``spare`` rows.

        Raises InfeasibleError where nothing fits. What is in place leaves little to look for, so
        only a search from scratch alternates and looks further (docs/theory.md, 8).
        """
        search = Search(self, spare)
        best = self.radio(search.choose(self.opening_prices(), None if stay is None else stay.rows))
        if stay is not None:
            return min(stay, best, key=lambda s: s.objective)
        best = self.improve(best, search)
        return self._improve_all(best) if len(best.rows) <= HASTENED_CLUSTERS else best

    def refine(self, solution: Solution, *, far: bool = False) -> Solution:
        """Play the steps of ``solution``, and mend what its bound promised too much of.

        Bandwidth moves until clusters end together as played, then clusters that end later than
        the round would by its bound try other rows, all of them together. ``far``: until nothing
        helps, in any cluster, the last time with rows several moves away.
        """
        far &= len(solution.rows) <= HASTENED_CLUSTERS
        best, bound_s = self.play(solution), float(solution.priced.latency_s.max())
        if not far and best.objective <= solution.objective * (1.0 + NEAR):
            return best
        if self.settings.schedule != "1f1b":  # its bound is exact, and its links have their prices
            return best
        best = self.equalize_played(best)
        while True:
            before, late_s = best, best.priced.latency_s
            slowest = np.argsort(-late_s, kind="stable")[:REFINED_CLUSTERS]
            which = np.sort(slowest if far else slowest[late_s[slowest] > (1.0 + NEAR) * bound_s])
            for rows in self._propose_played(best, which, far=far):
                best = min(best, self.take_rows(rows, best), key=lambda s: s.objective)
                if best is not before:
                    break
            if not far or not best.objective < before.objective * (1.0 - WORTHWHILE):
                return best

    def _propose_played(self, best: Solution, which: Ints, *, far: bool) -> Iterator[Layouts]:
        """Propose other rows of ``which`` that cost less as played over today's bandwidth."""
        if not len(which):
            return
        now = self.in_place(best)
        near = now.bound_rows(self.fitting(self._find_promising(best, which)))
        found = now.play_rows(near.keep_first(PLAYED).near, joint=True)
        yield found.combine()
        if far:
            yield found.grow(best.rows.take(which), now.play_rows).combine()

    def take_rows(self, rows: Layouts, now: Solution) -> Solution:
        """Play these rows at full power, at first over the bandwidths of ``now``."""
        chain, hz_m = chain_of(self.tables, rows, self.settings), now.allocation.edge_hz_r
        allocation = replace(now.allocation, times=full_power_times(chain, hz_m))
        rho = self.learning.rho(self.tables, rows)
        return self.equalize_played(self.play(self.priced(chain, allocation, rho)))

    def in_place(self, now: Solution) -> Incumbent:
        """Make ``now`` the plan whose rows may be replaced."""
        costs = self.estimates(now.chain, now.priced)
        return Incumbent(self, now.rows, costs, now.allocation.edge_hz_r)

    def _find_promising(self, best: Solution, which: Ints) -> Layouts:
        """Find rows of ``which`` a move away that by dual prices cost little more."""
        scorer, now, rows = self.scorer(self.dual_prices(best)), best.rows, best.rows.take(which)
        near = stack([self.neighbours(rows), pair_batches(rows, self.batches())[1]])
        values = self.score(scorer, near, now) - self.score(scorer, now, now)[near.cluster_r]
        return near.take(values < WORTH_A_TRY * best.objective)

    def _improve_all(self, best: Solution) -> Solution:
        """Improve ``best`` by plans near it until none helps."""
        while True:
            before = best
            for rows in self._propose_moves(best):
                trial = self.radio(rows)
                best = min(best, trial, key=lambda s: s.objective)
            if not best.objective < before.objective * (1.0 - WORTHWHILE):
                return best

    def _propose_moves(self, best: Solution) -> Iterator[Layouts]:
        """Propose plans near ``best`` of many clusters.

        First with the best rows a move away, then with rows further away for clusters that end late
        whatever their bandwidth.
        """
        near = self._find_promising(best, np.arange(len(best.rows)))
        yield self.in_place(best).bound_rows(near).combine()
        chain, hz_m = best.chain, AMPLE * best.allocation.edge_hz_r
        times = full_power_times(chain, hz_m)
        ample = self.estimates(chain, price_rows(chain, times, powers_for(chain, hz_m, times)))
        late = np.argsort(-ample.latency, kind="stable")[:LATE_CLUSTERS]
        late = np.sort(late[ample.latency[late] > SLOW * best.priced.latency_s.max()])
        if not len(late):
            return
        start = self.fitting(recut_batches(best.rows.take(late), self.batches()))
        # Seen from the others, which end together, no row of one of them shortens a round.
        nothing = np.zeros(len(best.rows))
        alone = Incumbent(self, best.rows, Estimates(nothing, nothing, nothing), hz_m)
        found = alone.bound_rows(start).grow(start, alone.bound_rows, LATE_ROWS)
        yield replace(alone, costs=ample).bound_rows(found.near).combine()

    def improve(self, best: Solution, search: Search | None = None) -> Solution:
        """Alternate segments and radio from ``best`` on while the objective falls."""
        search = search or Search(self)
        for _ in range(self.settings.rounds_of_search):
            rows = search.choose(self.dual_prices(best), best.rows)
            if key_of(rows) == key_of(best.rows):
                break
            trial = self.radio(rows)
            gain = best.objective - trial.objective
            best = min(best, trial, key=lambda s: s.objective)
            if not gain > ENOUGH * best.objective:
                break
        return best

    def radio(self, rows: Layouts) -> Solution:
        """Optimise bandwidth and powers for one row per cluster (docs/theory.md, 6).

        For 1F1B the program's formula is not exact: it takes links for hidden that memory is too
        short to hide, and others for seen that are hidden. So full power is tried as well, over
        bandwidths with which the clusters end together.
        """
        chain = chain_of(self.tables, rows, self.settings)
        rho = self.learning.rho(self.tables, rows)
        allocation = allocate(
            chain,
            of_members(self.price_mi, chain.rows),
            latency_price=self.latency_price * rho,
            bandwidth_hz=self.tables.snapshot.radio.bandwidth_hz,
        )
        best = self.priced(chain, allocation, rho)
        return best if self.settings.schedule != "1f1b" else self.equalize_finish_times(best)

    def stayed(self, rows: Layouts, hz_m: Array) -> Solution:
        """Optimise the radio of rows in place, starting from the bandwidths in place, ``hz_m``.

        Under 1F1B full power suits many clusters, so that no program has to be solved for them.
        """
        if self.settings.schedule != "1f1b":
            return self.radio(rows)
        chain = chain_of(self.tables, rows, self.settings)
        rho = self.learning.rho(self.tables, rows)
        price = np.full(len(rows), self.latency_price * rho / len(rows))
        now = Allocation(edge_hz_r=hz_m, times=full_power_times(chain, hz_m), latency_price_r=price)
        return self.equalize_finish_times(self.priced(chain, now, rho))

    def play(self, solution: Solution) -> Solution:
        """Play the steps of a decision, whose latencies are bounds as long as it is searched."""
        if self.settings.schedule != "1f1b":
            return solution
        priced = played(solution.chain, solution.allocation.times, solution.priced)
        objective = self._objective(solution.chain, priced, solution.rho)
        return replace(solution, priced=priced, objective=objective)

    def equalize_finish_times(self, best: Solution) -> Solution:
        """Give clusters at full power the bandwidths to end together, if that is better."""
        trial = self._at_level(best, best.chain)
        return min(best, trial, key=lambda s: s.objective)

    def equalize_played(self, best: Solution) -> Solution:
        """Equalize finish times as played: what steps take beyond their bounds is counted in.

        It changes with the bandwidth, so this is repeated while it helps.
        """
        while self.settings.schedule == "1f1b":
            chain = best.chain
            excess_s = best.priced.latency_s - latency_of(chain, best.allocation.times)
            trial = self._at_level(best, replace(chain, fixed_s=chain.fixed_s + excess_s))
            trial = self.play(trial)
            if not trial.objective < best.objective * (1.0 - ENOUGH):
                break
            best = trial
        return best

    def _at_level(self, now: Solution, said: Chain) -> Solution:
        """Price ``now`` at full power with the bandwidths at which the ends of ``said`` are one."""
        band_hz = self.tables.snapshot.radio.bandwidth_hz
        hz_m = levelled_hz(said, now.allocation.edge_hz_r, band_hz)
        times = full_power_times(now.chain, hz_m)
        allocation = replace(now.allocation, edge_hz_r=hz_m, times=times)
        return self.priced(now.chain, allocation, now.rho)

    def priced(self, chain: Chain, allocation: Allocation, rho: float) -> Solution:
        """Compute powers, energy and objective of a decision, its latency by the bound."""
        powers = powers_for(chain, allocation.edge_hz_r, allocation.times)
        priced = price_rows(chain, allocation.times, powers)
        return Solution(
            chain=chain,
            allocation=allocation,
            powers=powers,
            priced=priced,
            rho=rho,
            objective=self._objective(chain, priced, rho),
        )

    def _objective(self, chain: Chain, priced: RowPrices, rho: float) -> float:
        late = self.latency_price * rho * float(priced.latency_s.max())
        return late + float(self.worth(chain, priced).sum())

    def opening_prices(self) -> DualPrices:
        """Start with equal bandwidth, and every cluster's second at the round's price."""
        clusters = self.tables.num_clusters
        hz_m = np.full(clusters, self.tables.snapshot.radio.bandwidth_hz / clusters)
        return DualPrices(np.zeros(clusters), np.full(clusters, self.latency_price), hz_m)

    def dual_prices(self, now: Solution) -> DualPrices:
        """Return the dual prices at the solution ``now``."""
        ceiling_m, radio = others_max(now.priced.latency_s), now.allocation
        return DualPrices(ceiling_m, radio.latency_price_r, radio.edge_hz_r)

    def choose(self, prices: DualPrices, now: Layouts | None) -> Layouts:
        """Choose the best row of every cluster at ``prices``; raises InfeasibleError."""
        return Search(self).choose(prices, now)

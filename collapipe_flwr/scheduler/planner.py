"""Plans one round: alternate between segments with batches and radio while the objective falls."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from collapipe_flwr.costs.arrays import Array
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
from collapipe_flwr.costs.layouts import (
    Layouts,
    gather_members,
    make_key,
    replace_rows,
    scatter_members,
    stack_layouts,
)
from collapipe_flwr.scheduler.dual_prices import DualPrices
from collapipe_flwr.scheduler.local_search import pair_batches, recut_batches
from collapipe_flwr.scheduler.problem import Estimates, PlanningProblem
from collapipe_flwr.scheduler.radio.equal_ends import equalize_hz
from collapipe_flwr.scheduler.radio.interior_point import Allocation, allocate, share_equally
from collapipe_flwr.scheduler.runners_up import Incumbent
from collapipe_flwr.scheduler.scorer import Scorer
from collapipe_flwr.scheduler.search import HASTY_CLUSTERS, Search

POLISHED_CLUSTERS = 5  # up to here time allows trying runners-up one by one
JOINED_CLUSTERS = 8  # and up to here the best choice of all of them together
FRESH_CLUSTERS = 8  # up to here time allows searching from scratch in every round
HASTENED_CLUSTERS = 1000  # up to here it allows polishing first decisions of many clusters
POLISH_SOLVES = 32  # radio solves spent on runners-up
POLISH_RIVALS = 8  # of them at a time, by either order
WORTH_A_TRY = 0.15  # share of the objective by which a runner-up may seem worse
SLOW = 0.98  # of a round's length: for clusters that take longer, rows far away are tried
CLOSE = 1.015  # a plan for another length of a round is polished if it costs up to this factor
ELSEWHERE = 0.02  # least relative difference of such lengths
ALTERNATIONS = 6  # of segments and radio at most
ENOUGH = 1e-4  # relative gain of an alternation that is worth another
EVENING = (0.5, 1.0, 2.0, 4.0, 8.0)  # of relative latencies, by which bandwidth is moved
EVENINGS = 4  # times at most
AMPLE = 8.0  # times its bandwidth: what a cluster is slow with is not the bandwidth's fault
WORTHWHILE = 1e-3  # relative gain that is worth another look of many clusters
LATE_CLUSTERS = 10  # of many that are searched further at a time
LATE_ROWS = 32  # rows of such a cluster that a beam goes on from
KEPT_SOLUTIONS = 256  # of radio problems, by their rows
SAME = 1e-9  # relative differences below this count as none


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

    def tabulate_spent(self, shape: tuple[int, ...]) -> Array:
        """Return the joules of every member, (M, I)."""
        return scatter_members(self.priced.energy_j, self.rows, shape)

    def tabulate_radio(self, shape: tuple[int, ...]) -> Array:
        """Return the part of `tabulate_spent` that transmissions take."""
        return scatter_members(self.priced.energy_j - self.chain.computing_j, self.rows, shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSolver(PlanningProblem):
    """Solve the problem of one round: few clusters by steps as played, many by their bound."""

    # By padding and rows: plans near each other have many runners-up in common.
    _optimized: dict[tuple[int, bytes], Solution] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )

    @property
    def few(self) -> bool:
        """Whether there are so few clusters that every trial can be played."""
        return self.tables.few

    @property
    def hasty(self) -> bool:
        """Whether there are so many clusters that time allows one search of a round only."""
        return self.tables.num_clusters > HASTY_CLUSTERS

    def solve(self, stay: Solution | None = None, spare: Layouts | None = None) -> Solution:
        """Search the best plan, from scratch or also from ``stay``; raises InfeasibleError.

        More than `FRESH_CLUSTERS` leave time for one choice near ``stay``, with ``spare`` rows.
        """
        search = Search(self, spare)
        anew = self.tables.num_clusters <= FRESH_CLUSTERS
        rows = search.choose(
            self.make_opening_prices(), None if anew or stay is None else stay.rows
        )
        best = self.optimize_radio(rows)
        if stay is not None:
            best = min(stay, best, key=lambda s: s.objective)
        if search.thorough:  # else rounds of many lengths were tried at once
            best = self.improve(best, search)
        if not self.few:
            time_allows = self.tables.num_clusters <= HASTENED_CLUSTERS
            return self._improve_all(best) if stay is None and time_allows else best
        best = self.polish(best)
        if self.tables.num_clusters > JOINED_CLUSTERS:
            return best
        for rows in search.pick_elsewhere():
            trial, length_s = self.optimize_radio(rows), best.priced.latency_s.max()
            near = abs(trial.priced.latency_s.max() / length_s - 1.0) < ELSEWHERE
            if not near and trial.objective < CLOSE * best.objective:
                best = min(best, self.polish(trial), key=lambda s: s.objective)
        # What is found far away once is near in the rounds that follow.
        far = stay is None and self.settings.schedule == "1f1b"
        return self.polish(best, far=True) if far else best

    def polish(self, best: Solution, *, far: bool = False) -> Solution:
        """Try the runners-up of ``best`` with the radio re-optimised, while time allows.

        Dual prices value a cluster's alternatives at the bandwidth it has now; the radio solver
        knows what each is really worth. Those ``far`` from ``best`` are the last that are tried.
        """
        overlapped = self.settings.schedule == "1f1b"
        most = JOINED_CLUSTERS if overlapped else POLISHED_CLUSTERS
        tries = POLISH_SOLVES if self.tables.num_clusters <= most else 0
        if overlapped and tries:
            best = self.shift_bandwidth(best)
        tried: set[bytes] = {make_key(best.rows)}
        while tries > 0:
            before = best
            for rivals in self._propose_rivals(best, far=far):
                fresh = [r for r in rivals if make_key(r) not in tried][:tries]
                tried |= {make_key(r) for r in fresh}
                tries -= len(fresh)
                solutions = [
                    self.optimize_radio(rows, before.allocation.edge_hz_r) for rows in fresh
                ]
                best = min([best, *solutions], key=lambda s: s.objective)
                if best.objective < before.objective * (1.0 - SAME):
                    break
            else:
                break
        return self.shift_bandwidth(best) if overlapped else best

    def _propose_rivals(self, best: Solution, *, far: bool) -> Iterator[list[Layouts]]:
        """Propose plans near ``best``: under 1F1B one that may differ in all clusters, then in one.

        The latter, for few clusters, by dual prices and in turn by what they cost as played.
        """
        near, values = self._find_promising(best)
        lists = [near.take(np.argsort(values, kind="stable")[:POLISH_RIVALS])]
        if self.settings.schedule == "1f1b" and len(near):
            found = self.make_incumbent(best).play_rows(near, joint=True)
            yield [found.combine()]
            quickest = np.argsort(found.value_alone(), kind="stable")[:POLISH_RIVALS]
            lists.append(found.near.take(quickest))
        if self.tables.num_clusters <= POLISHED_CLUSTERS:
            places = [(rows, r) for r in range(POLISH_RIVALS) for rows in lists if r < len(rows)]
            single = [rows.take(np.array([r])) for rows, r in places]
            plans = [replace_rows(best.rows, row.cluster_r, row) for row in single]
            yield list({make_key(plan): plan for plan in plans}.values())
        if far:
            for rows in self._search_far(best, near):
                yield [rows]

    def _search_far(self, best: Solution, near: Layouts) -> Iterator[Layouts]:
        """Choose among ``near`` and what a beam finds for the clusters that a round waits for.

        Once over the bandwidth in place and once over equal bandwidth, where other rows may be
        best.
        """
        slow = best.rows.take(best.priced.latency_s > SLOW * best.priced.latency_s.max())
        even = share_equally(best.chain, self.tables.snapshot.radio.bandwidth_hz)
        for now in map(self.make_incumbent, (best, self.price(best.chain, even, best.rho))):
            yield now.play_rows(near, joint=True).grow(slow, now.play_rows).combine()

    def make_incumbent(self, now: Solution) -> Incumbent:
        """Make ``now`` the plan whose rows may be replaced."""
        costs = self.estimate(now.chain, now.priced)
        return Incumbent(self, now.rows, costs, now.allocation.edge_hz_r)

    def _find_promising(self, best: Solution) -> tuple[Layouts, Array]:
        """Find rows a move away that by dual prices cost little more, and how much, (R,)."""
        scorer, now = Scorer(self, self.make_dual_prices(best)), best.rows
        near = stack_layouts([self.list_neighbours(now), pair_batches(now, self.list_batches())[1]])
        values = scorer.score(near, now) - scorer.score(now, now)[near.cluster_r]
        promising = values < WORTH_A_TRY * best.objective
        return near.take(promising), values[promising]

    def _improve_all(self, best: Solution) -> Solution:
        """Improve ``best`` by plans near it until none helps."""
        while True:
            before = best
            for rows in self._propose_moves(best):
                trial = self.optimize_radio(rows, before.allocation.edge_hz_r)
                best = min(best, trial, key=lambda s: s.objective)
            if not best.objective < before.objective * (1.0 - WORTHWHILE):
                return best

    def _propose_moves(self, best: Solution) -> Iterator[Layouts]:
        """Propose plans near ``best`` of many clusters.

        First with the best rows a move away, then with rows further away for clusters that end late
        whatever their bandwidth.
        """
        yield self.make_incumbent(best).bound_rows(self._find_promising(best)[0]).combine()
        chain, hz_m = best.chain, AMPLE * best.allocation.edge_hz_r
        times = compute_full_power_times(chain, hz_m)
        ample = self.estimate(chain, price_rows(chain, times, solve_powers(chain, hz_m, times)))
        late = np.argsort(-ample.latency, kind="stable")[:LATE_CLUSTERS]
        late = np.sort(late[ample.latency[late] > SLOW * best.priced.latency_s.max()])
        if not len(late):
            return
        start = self.keep_fitting(recut_batches(best.rows.take(late), self.list_batches()))
        # Seen from the others, which end together, no row of one of them shortens a round.
        nothing = np.zeros(len(best.rows))
        alone = Incumbent(self, best.rows, Estimates(nothing, nothing, nothing), hz_m)
        found = alone.bound_rows(start).grow(start, alone.bound_rows, LATE_ROWS)
        yield replace(alone, costs=ample).bound_rows(found.near).combine()

    def improve(self, best: Solution, search: Search | None = None) -> Solution:
        """Alternate segments and radio from ``best`` on while the objective falls."""
        search = search or Search(self)
        for _ in range(ALTERNATIONS):
            rows = search.choose(self.make_dual_prices(best), best.rows)
            if make_key(rows) == make_key(best.rows):
                break
            trial = self.optimize_radio(rows, best.allocation.edge_hz_r)
            gain = best.objective - trial.objective
            best = min(best, trial, key=lambda s: s.objective)
            if not gain > ENOUGH * best.objective:
                break
        return best

    def optimize_radio(self, rows: Layouts, hz_m: Array | None = None) -> Solution:
        """Optimise bandwidth and powers for one row per cluster (docs/theory.md, "Radio").

        For 1F1B the program's formula is not exact: it takes links for hidden that memory is too
        short to hide, and others for seen that are hidden. So full power is tried as well, over
        equal bandwidth and over ``hz_m`` where 1F1B is played, else over bandwidths with which the
        clusters end together.
        """
        key = rows.member_rs.shape[1], make_key(rows)
        if key not in self._optimized:
            if len(self._optimized) == KEPT_SOLUTIONS:
                self._optimized.clear()
            self._optimized[key] = self._solve_radio(rows)
        best = self._optimized[key]
        played_here = self.few and self.settings.schedule == "1f1b"
        return best if hz_m is None or not played_here else self._try_full_power(best, hz_m)

    def _solve_radio(self, rows: Layouts) -> Solution:
        """Optimise as `optimize_radio` does without any bandwidths in place."""
        band_hz = self.tables.snapshot.radio.bandwidth_hz
        chain = make_chain(self.tables, rows, self.settings)
        rho = self.learning.compute_rho(self.tables, rows)
        best = self._allocate(chain, rho)
        if self.settings.schedule != "1f1b":
            return best
        if not self.few:
            return self.equalize_finish_times(best)
        return self._try_full_power(best, np.full(len(rows), band_hz / len(rows)))

    def stay(self, rows: Layouts, hz_m: Array) -> Solution:
        """Optimise the radio of rows in place, starting from the bandwidths in place, ``hz_m``.

        Under 1F1B full power suits many clusters, so that no program has to be solved for them.
        """
        if self.few or self.settings.schedule != "1f1b":
            return self.optimize_radio(rows)
        chain = make_chain(self.tables, rows, self.settings)
        rho = self.learning.compute_rho(self.tables, rows)
        price = np.full(len(rows), self.latency_price * rho / len(rows))
        now = Allocation(
            edge_hz_r=hz_m, times=compute_full_power_times(chain, hz_m), latency_price_r=price
        )
        return self.equalize_finish_times(self.price(chain, now, rho))

    def _try_full_power(self, best: Solution, hz_m: Array) -> Solution:
        """Try the rows of ``best`` at full power over these bandwidths; return the better one."""
        times = compute_full_power_times(best.chain, hz_m)
        allocation = replace(best.allocation, edge_hz_r=hz_m, times=times)
        trial = self.price(best.chain, allocation, best.rho, best)
        return min(best, trial, key=lambda s: s.objective)

    def play(self, solution: Solution) -> Solution:
        """Play the steps of a decision by the bound; few clusters play all that they try."""
        if self.few or self.settings.schedule != "1f1b":
            return solution
        priced = replay_rows(solution.chain, solution.allocation.times, solution.priced)
        objective = self._objective(solution.chain, priced, solution.rho)
        return replace(solution, priced=priced, objective=objective)

    def equalize_finish_times(self, best: Solution) -> Solution:
        """Give clusters at full power the bandwidths to end together, if that is better."""
        band_hz = self.tables.snapshot.radio.bandwidth_hz
        hz_m = equalize_hz(best.chain, best.allocation.edge_hz_r, band_hz)
        return self._try_full_power(best, hz_m)

    def shift_bandwidth(self, best: Solution) -> Solution:
        """Shift bandwidth to slower clusters, all at full power, while the objective falls."""
        band_hz = self.tables.snapshot.radio.bandwidth_hz
        for _ in range(EVENINGS):
            before = best
            for power in EVENING:
                late = before.priced.latency_s / before.priced.latency_s.max()
                hz_m = before.allocation.edge_hz_r * late**power
                best = self._try_full_power(best, hz_m * (band_hz / hz_m.sum()))
            if not best.objective < before.objective * (1.0 - ENOUGH):
                break
        return best

    def _allocate(self, chain: Chain, rho: float) -> Solution:
        """Optimise the radio by its formula of latencies."""
        allocation = allocate(
            chain,
            gather_members(self.price_mi, chain.rows),
            latency_price=self.latency_price * rho,
            bandwidth_hz=self.tables.snapshot.radio.bandwidth_hz,
        )
        return self.price(chain, allocation, rho)

    def price(
        self, chain: Chain, allocation: Allocation, rho: float, best: Solution | None = None
    ) -> Solution:
        """Compute latency, energy and objective of a decision.

        Few clusters play 1F1B, unless the lower bound shows that ``best`` is better.
        """
        powers = solve_powers(chain, allocation.edge_hz_r, allocation.times)
        priced = price_rows(chain, allocation.times, powers)
        objective = self._objective(chain, priced, rho)
        if self.few and (best is None or objective < best.objective):
            priced = replay_rows(chain, allocation.times, priced)
            objective = self._objective(chain, priced, rho)
        return Solution(
            chain=chain,
            allocation=allocation,
            powers=powers,
            priced=priced,
            rho=rho,
            objective=objective,
        )

    def _objective(self, chain: Chain, priced: RowPrices, rho: float) -> float:
        late = self.latency_price * rho * float(priced.latency_s.max())
        return late + float(self.price_energy(chain, priced).sum())

    def make_opening_prices(self) -> DualPrices:
        """Start with equal bandwidth, and every cluster's second at the round's price."""
        clusters = self.tables.num_clusters
        hz_m = np.full(clusters, self.tables.snapshot.radio.bandwidth_hz / clusters)
        return DualPrices(np.zeros(clusters), np.full(clusters, self.latency_price), hz_m)

    def make_dual_prices(self, now: Solution) -> DualPrices:
        """Return the dual prices at the solution ``now``."""
        ceiling_m, radio = find_others_max(now.priced.latency_s), now.allocation
        return DualPrices(ceiling_m, radio.latency_price_r, radio.edge_hz_r)

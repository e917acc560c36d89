"""A lower bound on what any scheduler can reach that keeps all budgets on average over a run.

With multipliers theta >= 0 of the devices' budgets and all rounds' channels known,

    mean over rounds of  min over plans of  rho T / T_ref + sum theta (e / budget - 1)

is below the mean cost of every sequence of plans that keeps all budgets (weak duality). The inner
minimum is over every spread of blocks (`assignments`), every batch of the grid for every cluster,
and the fastest order, power and bandwidth for each: a relaxation that is solved by enumeration, so
that the bound is certified, whatever the multipliers. Subgradient steps make them good.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import linprog

from benchmarks.scheduling.assignments import Round, batch_choices, rho_of, spreads
from collapipe_flwr.costs.arrays import Array, Ints
from collapipe_flwr.scheduler.problem import Learning

STEPS = 200
ENOUGH = 1e-3  # relative distance from the best multipliers
MOST = 10.0  # reference latencies per budget
INWARD = 0.2  # part of the way from the best point to where planes are highest
POINTS = 6400  # lengths of a round that are told apart
LONGEST = 10.0  # times the shortest; longer ones count as this
FINE = 1.05  # the same for which links and rounds are told apart
FAR = 3.0  # times the shortest without links: spreads that take longer are not looked at closely
ACTIVE = 1.05  # batches whose quickest plan is within this factor are there in every step


@dataclass(frozen=True, slots=True)
class Options:
    """Cluster m with one batch: seconds of every spread in every round, sorted, and energies."""

    joule_tn: Array  # per block, over the budget
    seconds_ta: Array
    order_ta: Ints

    @property
    def quickest_t(self) -> Array:
        """Seconds of the quickest spread."""
        return np.asarray(self.seconds_ta[:, 0])

    def of_round(self, t: int) -> Options:
        """One round alone, views of these."""
        return Options(self.joule_tn[[t]], self.seconds_ta[t : t + 1], self.order_ta[t : t + 1])

    def lengthen(self, a: int, seconds: float) -> None:
        """Of one round alone: the spread at that place takes longer."""
        self.seconds_ta[0, a] = seconds
        order = np.argsort(self.seconds_ta[0], kind="stable")
        self.seconds_ta[0], self.order_ta[0] = self.seconds_ta[0, order], self.order_ta[0, order]


class Planes:
    """The least of tangent planes of a concave function over multipliers >= 0 lies above it.

    The next point is between the best one and where that least is highest: a step to the latter
    alone (Kelley 1960) goes back and forth between corners.
    """

    def __init__(self, width: int) -> None:
        self.best, self.value, self.upper = np.zeros(width), -np.inf, np.inf
        self._point = self.best
        self._rows: list[Array] = []
        self._heights: list[float] = []

    @property
    def gap(self) -> float:
        """By how much the best point may be below the maximum, relatively."""
        return (self.upper - self.value) / abs(self.value)

    def add(self, value: float, slope: Array) -> None:
        """What the function is at the point that was asked for."""
        if value > self.value:
            self.best, self.value = self._point, value
        self._rows.append(slope.ravel())
        self._heights.append(value - float(slope.ravel() @ self._point))

    def next(self) -> Array:
        """Where to look next."""
        if self._rows:
            planes = np.column_stack([-np.array(self._rows), np.ones(len(self._rows))])
            goal = np.append(np.zeros(len(self.best)), -1.0)
            limits = [(0.0, MOST)] * len(self.best) + [(None, None)]
            found = linprog(goal, A_ub=planes, b_ub=self._heights, bounds=limits)
            self.upper = -float(found.fun)
            self._point = self.best + INWARD * (found.x[:-1] - self.best)
        return self._point


@dataclass(frozen=True, slots=True)
class Clairvoyant:
    """All rounds of a world, enumerated; costs in reference latencies."""

    spread_mn: list[Ints]
    options: list[list[Options | None]]  # by cluster, by batch; None where memory forbids all
    choices: Ints  # (K, M) places of batches
    rho_k: Array  # over the reference latency

    def bound(self) -> tuple[float, Array]:
        """The bound and its multipliers, (M, N)."""
        floor = self.floors()
        active = np.flatnonzero(floor.mean(1) <= ACTIVE * floor.mean(1).min())
        planes = Planes(len(self.spread_mn) * max(s.shape[1] for s in self.spread_mn))
        shape = (len(self.spread_mn), -1)
        for _ in range(STEPS):
            theta = planes.next().reshape(shape)
            value, spent = self._value(theta, active)
            planes.add(value, spent - 1.0)
            if planes.gap <= ENOUGH:
                break
        theta = planes.best.reshape(shape)
        return self.certified(theta), theta

    def certified(self, theta: Array) -> float:
        """The bound at these multipliers over every choice of batches."""
        return float(self.cheapest(theta)[0].mean())

    def batch_rho(self, theta: Array) -> float | None:
        """Of the batches that the bound comes to, if they are the same in all rounds."""
        found = np.unique(self.cheapest(theta)[1], axis=0)
        if len(found) > 1:
            return None
        return float(self.rho_k[(self.choices == found[0]).all(1)][0])

    def cheapest(self, theta: Array) -> tuple[Array, Ints, Ints]:
        """Of every round: the least Lagrangian, (T,), its batches and places of spreads, (T, M)."""
        least = self.floors() + self._least_energy(theta) - theta.sum()
        order = np.argsort(least.min(1), kind="stable")
        best = np.full(least.shape[1], np.inf)
        batch_tm, place_tm = (np.zeros((len(best), len(theta)), np.int64) for _ in range(2))
        for k in order:
            if (least[k] < best).any():
                values, _, places = self._scan(theta, int(k))
                less = values < best
                best[less], place_tm[less] = values[less], places[less]
                batch_tm[less] = self.choices[k]
            elif (least[k].min() >= best.max()) or not np.isfinite(least[k]).any():
                break
        return best, batch_tm, place_tm

    def of_round(self, t: int) -> Clairvoyant:
        """One round alone; its seconds are views of these."""
        options = [[None if o is None else o.of_round(t) for o in row] for row in self.options]
        return replace(self, options=options)

    def floors(self) -> Array:
        """Cost of every choice of batches if all clusters are as quick as they can, (K, T)."""
        rounds = next(o for row in self.options for o in row if o is not None).seconds_ta.shape[0]
        quick = np.array(
            [
                [np.full(rounds, np.inf) if o is None else o.quickest_t for o in row]
                for row in self.options
            ]
        )
        slowest = np.max([quick[m][self.choices[:, m]] for m in range(len(self.options))], axis=0)
        return np.asarray(self.rho_k[:, None] * slowest)

    def _least_energy(self, theta: Array) -> Array:
        """Priced energy of every choice of batches if all clusters are as thrifty as can be."""
        rounds = self.floors().shape[1]
        least = np.array(
            [
                [
                    np.full(rounds, np.inf) if o is None else self._worth(m, o, theta).min(1)
                    for o in row
                ]
                for m, row in enumerate(self.options)
            ]
        )
        return np.asarray(sum(least[m][self.choices[:, m]] for m in range(len(self.options))))

    def _worth(self, m: int, option: Options, theta: Array) -> Array:
        """Priced energy of the spreads, quickest first, (T, A)."""
        devices = self.spread_mn[m].shape[1]
        worth = (theta[m, :devices] * option.joule_tn) @ self.spread_mn[m].T
        return np.take_along_axis(worth, option.order_ta, axis=1)

    def _value(self, theta: Array, active: Ints) -> tuple[float, Array]:
        """The Lagrangian over some choices of batches, and mean energies over budgets, (M, N)."""
        found = [self._scan(theta, int(k)) for k in active]
        values = np.array([value for value, *_ in found])
        pick = values.argmin(0)
        energy = np.mean([found[k][1][t] for t, k in enumerate(pick)], axis=0)
        return float(values.min(0).mean()), np.asarray(energy)

    def _scan(self, theta: Array, k: int) -> tuple[Array, Array, Ints]:
        """The least Lagrangian of one choice of batches in every round, its energies and places."""
        options = [self.options[m][b] for m, b in enumerate(self.choices[k])]
        chosen = [o for o in options if o is not None]
        rounds = len(chosen[0].seconds_ta)
        energy, places = np.zeros((rounds, *theta.shape)), np.zeros((rounds, len(theta)), np.int64)
        if len(chosen) < len(options):
            return np.full(rounds, np.inf), energy, places
        shortest = np.max([o.quickest_t for o in chosen], axis=0)
        edges = shortest[:, None] * LONGEST ** (np.arange(POINTS + 1) / POINTS)
        worth = [self._worth(m, o, theta) for m, o in enumerate(chosen)]
        last = [_places(o.seconds_ta, edges) for o in chosen]
        total = self.rho_k[k] * edges
        for m, values in enumerate(worth):
            # A round between two edges is as short as the first and as thrifty as the second.
            lowest = np.minimum.accumulate(values, axis=1)
            total = total + np.take_along_axis(lowest, last[m], axis=1)
        pick = total.argmin(1)
        for m, option in enumerate(chosen):
            for t in range(rounds):
                places[t, m] = a = int(worth[m][t, : last[m][t, pick[t]] + 1].argmin())
                held = self.spread_mn[m][option.order_ta[t, a]]
                energy[t, m, : len(held)] = held * option.joule_tn[t]
        return total.min(1) - theta.sum(), energy, places


def _places(seconds_ta: Array, edges_tp: Array) -> Ints:
    """The last spread that is within the next edge; all of them behind the last edge."""
    upper = np.concatenate([edges_tp[:, 1:], np.full((len(edges_tp), 1), np.inf)], axis=1)
    rows = [np.searchsorted(s, e, side="right") - 1 for s, e in zip(seconds_ta, upper, strict=True)]
    return np.array(rows)


def clairvoyant(rounds: list[Round], learning: Learning) -> Clairvoyant:
    """Enumerate all rounds of a world."""
    tables, settings = rounds[0].tables, rounds[0].settings
    batches, choices = batch_choices(settings, tables.num_clusters)
    present = tables.members.present_mi
    spread = [
        _possible(rounds[0], m, spreads(int(here.sum()) - 1, tables.num_blocks))
        for m, here in enumerate(present)
    ]
    rho = rho_of(learning, tables, batches[choices]) / learning.reference.latency_s
    options = [
        [_options(rounds, m, spread[m], int(batch), air=False) for batch in batches]
        for m in range(tables.num_clusters)
    ]
    every = Clairvoyant(spread, options, choices, rho)
    floor = every.floors()[:, 0]
    # Batches that no good choice has need not be told apart finely: theirs stays a lower bound.
    far_s = FAR * float(floor.min() / rho[floor.argmin()])
    for m, b in {
        (m, int(b)) for k in choices[floor <= FINE * floor.min()] for m, b in enumerate(k)
    }:
        options[m][b] = _options(rounds, m, spread[m], int(batches[b]), air=True, far_s=far_s)
    return every


def _possible(first: Round, m: int, spread: Ints) -> Ints:
    """The spreads that fit the memories with some micro-batches."""
    fits = [first.fits(m, spread, size, count) for size, count in first.settings.batches]
    return spread[np.any(fits, axis=0)]


def _options(
    rounds: list[Round], m: int, spread: Ints, batch: int, *, air: bool, far_s: float = np.inf
) -> Options | None:
    settings, devices = rounds[0].settings, spread.shape[1]
    seconds = np.full((len(rounds), len(spread)), np.inf)
    # Small micro-batches first: most of the others are then seen to be slower at once.
    for size, count in sorted(settings.batches):
        if size * count == batch:
            good = np.flatnonzero(rounds[0].fits(m, spread, size, count))
            for t, one in enumerate(rounds if air else rounds[:1]) if len(good) else ():
                at = t if air else slice(None)
                known = seconds[t, good]
                limit_s = np.minimum(known, far_s)
                least = one.least_s(m, spread[good], (size, count), air=air, known_s=limit_s)
                seconds[at, good] = np.minimum(known, least)
    if not np.isfinite(seconds).any():
        return None
    budget = rounds[0].tables.members.budget_mi[m, 1 : devices + 1]
    joule = np.array([one.joule(m, batch)[:devices] / budget for one in rounds])
    order = np.argsort(seconds, axis=1, kind="stable")
    order = order[:, : int(np.isfinite(seconds[0]).sum())]
    return Options(joule, np.take_along_axis(seconds, order, axis=1), order)

"""The clairvoyant bound with steps of 1F1B as they are played, for every order and all depths.

`orders` bounds a step closely where memory is ample, and by up to some per cent too low where it is
short: neighbours then have to share few micro-batches. So the spreads that the bound comes to are
looked at again. Of each, every order of its devices is played with all warm-up depths that the
bound of single stages does not rule out, and what none of them undercuts takes the place of the
bound, until every round's least Lagrangian is of spreads that have been played.
"""

from __future__ import annotations

from itertools import permutations

import numpy as np

from benchmarks.scheduling.assignments import Round, batch_choices
from benchmarks.scheduling.clairvoyant import Clairvoyant
from benchmarks.scheduling.orders import Stage
from collapipe_flwr.costs.arrays import Array, Ints
from collapipe_flwr.costs.chain import Chain, choose_depths, compute_full_power_times, make_chain
from collapipe_flwr.costs.layouts import Layouts
from collapipe_flwr.costs.makespan import compute_step_makespan_s
from collapipe_flwr.costs.many_steps import ManySteps

LOOKS = 8  # at multipliers, anew where spreads turned out to take longer
ENOUGH = 1e-4  # relative gain of a look that is worth another
MOST_PLAYED = 100_000  # combinations of depths of one order; with more its bound counts
AT_ONCE = 20_000  # of them side by side
ENOUGH_AT_ONCE = 4_000  # to play them before the bounds of more orders are looked at
NEARLY = 1.0 - 1e-6  # of the quickest known: what is not quicker than this is not looked at


class Replayed:
    """A bound whose seconds are raised to what plans take as played."""

    def __init__(self, lower: Clairvoyant, rounds: list[Round]) -> None:
        self.lower, self.rounds = lower, rounds
        self._batches = batch_choices(rounds[0].settings, rounds[0].tables.num_clusters)[0]
        self._known: set[tuple[int, ...]] = set()

    def bound(self) -> tuple[float, Array]:
        """The bound and its multipliers, (M, N)."""
        least, at = -np.inf, self.lower.bound()[1]
        theta = at
        for _ in range(LOOKS):
            found = float(np.mean([self.raised(t, theta) for t in range(len(self.rounds))]))
            better = found > least + ENOUGH * abs(found)
            least, at = max((least, at), (found, theta), key=lambda each: each[0])
            if not better:
                break
            theta = self.lower.bound()[1]
        return least, at

    def raised(self, t: int, theta: Array) -> float:
        """The least Lagrangian of one round, of spreads that have been played."""
        lower = self.lower.of_round(t)
        while True:
            values, batch_tm, place_tm = lower.cheapest(theta)
            longer = [
                self._lengthen(lower, t, m, int(b), int(place_tm[0, m]))
                for m, b in enumerate(batch_tm[0])
            ]
            if not any(longer):
                return float(values[0])

    def _lengthen(self, lower: Clairvoyant, t: int, m: int, b: int, a: int) -> bool:
        """Play a spread that has not been; whether it takes longer than was known."""
        option = lower.options[m][b]
        assert option is not None
        spread = int(option.order_ta[0, a])
        key = (t, m, b, spread)
        if key in self._known:
            return False
        self._known.add(key)
        seconds = played_s(self.rounds[t], m, lower.spread_mn[m][spread], int(self._batches[b]))
        if not seconds > option.seconds_ta[0, a]:
            return False
        option.lengthen(a, seconds)
        return True


def played_s(one: Round, m: int, spread_n: Ints, batch: int) -> float:
    """Seconds of the round that no order and no depths undercut with all of the band."""
    best = np.inf
    orders = np.array(list(permutations(np.flatnonzero(spread_n))))
    for size, count in one.settings.batches:
        if size * count == batch and one.fits(m, spread_n[None], size, count)[0]:
            rows = Layouts(
                cluster_r=np.full(len(orders), m),
                member_rs=orders + 1,
                stop_rs=np.cumsum(spread_n[orders], axis=1),
                micro_batch_size_r=np.full(len(orders), size),
                micro_batches_r=np.full(len(orders), count),
            )
            chain = make_chain(one.tables, rows, one.settings)
            best = min(best, _Orders(chain, count).least_s())
    return best


class _Orders:
    """All orders of the same devices, (Q,), at full power; stages ``k`` from control unit on."""

    def __init__(self, chain: Chain, count: int) -> None:
        self.chain, self.count = chain, count
        band_hz = np.full(len(chain.rows), chain.tables.snapshot.radio.bandwidth_hz)
        self.times = compute_full_power_times(chain, band_hz)
        self.passes = [s.T for s in (chain.forward_stage_s, chain.backward_stage_s)]
        self.hops = [self.times[:, :, way].T for way in (0, 1)]
        self.held = chain.held_rs.T
        stage, hop = (each[0] + each[1] for each in (self.passes, self.hops))
        self.begun = np.zeros_like(stage)
        self.begun[1:] = np.cumsum(stage[:-1] + hop, axis=0)
        self.whole = self.begun[-1] + stage[-1]
        self.tail = self.whole - self.begun - stage
        slowest = [np.maximum(p[:-1], h) for p, h in zip(self.passes, self.hops, strict=True)]
        self.pace = [np.maximum.accumulate(np.pad(s, ((1, 0), (0, 0)))) for s in slowest]

    def least_s(self) -> float:
        """Seconds of the round that no order undercuts."""
        steps, fixed = self.chain.steps_r, self.chain.fixed_s
        found = choose_depths(self.chain, self.times, np.arange(len(fixed)))[1]
        best, low = float((fixed + steps * found).min()), fixed + steps * self._bound_s()
        order_r, depth_kr = self._none()
        for q in np.argsort(low, kind="stable").tolist():
            if not low[q] < NEARLY * best:
                break
            more_kr = self._depths(q, (NEARLY * best - fixed[q]) / steps[q])
            if more_kr is None:
                return min(float(low[q]), NEARLY * self._played(order_r, depth_kr, best))
            order_r = np.append(order_r, np.full(more_kr.shape[1], q))
            depth_kr = np.concatenate([depth_kr, more_kr], axis=1)
            if len(order_r) >= ENOUGH_AT_ONCE:
                best = self._played(order_r, depth_kr, best)
                order_r, depth_kr = self._none()
        return NEARLY * self._played(order_r, depth_kr, best)

    def _none(self) -> tuple[Ints, Ints]:
        return np.zeros(0, np.int64), np.zeros((len(self.begun), 0), np.int64)

    def _played(self, order_r: Ints, depth_kr: Ints, best: float) -> float:
        """The quickest round of these orders with these depths, or ``best``."""
        for first in range(0, len(order_r), AT_ONCE):
            some = order_r[first : first + AT_ONCE]
            step_s = self._play(some, depth_kr[:, first : first + AT_ONCE])
            seconds = self.chain.fixed_s[some] + self.chain.steps_r[some] * step_s
            best = min(best, float(seconds.min()))
        return best

    def _bound_s(self) -> Array:
        """What a step of every order takes at least."""
        both = (self.chain.forward_stage_s, self.chain.backward_stage_s)
        hops = (self.times[:, :, 0], self.times[:, :, 1])
        count = self.chain.rows.micro_batches_r.astype(np.float64)
        return compute_step_makespan_s(
            self.chain.options, both, hops, count, held=self.chain.held_rs.astype(np.float64)
        )

    def _stage(self, k: int, q: int) -> tuple[Stage, Array]:
        """A stage, and the way from it to the edge and back."""
        parts = (*self.passes, self.held, *self.pace)
        return Stage(*(np.atleast_1d(each[k, q]) for each in parts)), self.tail[k, q]

    def _depths(self, q: int, limit_s: float) -> Ints | None:
        """All depths with which no stage alone makes a step longer, (K, D); None of too many."""
        edge = len(self.begun) - 1
        if self.count * self.passes[0][0, q] > self.whole[q] - self.passes[1][0, q]:
            return None
        # Before its first gradient a control unit has sent all: nothing is quicker than that.
        found = np.full((1, 1), self.count)
        for k in range(1, edge):
            stage, tail = self._stage(k, q)
            depth = np.arange(1, int(self.held[k, q]) + 1)
            least = self.begun[k, q] + stage.with_depth_s(
                depth.astype(np.float64), self.count, tail
            )
            depth = depth[least < limit_s]
            longer = np.stack([np.repeat(found[-1], len(depth)), np.tile(depth, found.shape[1])])
            falling = longer[1] <= longer[0]
            found = np.concatenate([np.repeat(found, len(depth), 1), longer[1:]])[:, falling]
            if found.shape[1] > MOST_PLAYED:
                return None
        return np.concatenate([found, np.ones_like(found[:1])])

    def _play(self, q_r: Ints, depth_kr: Ints) -> Array:
        """Seconds of a step of these orders with these depths."""
        ahead, back = self.passes
        there, home = (np.pad(hop, ((0, 1), (0, 0))) for hop in self.hops)
        steps = ManySteps(
            ahead_kr=ahead[:, q_r],
            back_kr=back[:, q_r],
            there_kr=there[:, q_r],
            home_kr=home[:, q_r],
            used_kr=np.ones(depth_kr.shape, bool),
            micro_batches_r=np.full(len(q_r), self.count),
        )
        return steps.play(depth_kr)

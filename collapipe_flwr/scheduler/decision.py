"""A solved round, with codecs no coarser than they must be.

A decision is made as if every link used the coarsest codec allowed: nothing is faster. A cluster
opens with the coarsest one, or with a finer one on all its hops where that spares more rounds than
its time grows: errors make rounds to the target 1 + 2 times the sum of the hops' square errors as
many (there and back). Then it lifts hops to finer codecs, the one that removes most noise per bit
first, as long as

    its time  <= (1 + MARGIN) * the round's as it opened,
    its price of energy  <= that as it opened + MARGIN * the round's objective / M,

powers and bandwidth as decided. At last the radio is optimised for the new payloads, so that the
objective is at most 1 + 2 MARGIN times that of the opening. Our own rule.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from collapipe_flwr.core.domain import Plan
from collapipe_flwr.costs.arrays import Array, Ints, Mask
from collapipe_flwr.costs.chain import price_rows
from collapipe_flwr.costs.layouts import of_members, with_codecs
from collapipe_flwr.costs.radio import NOISE, SHARES, rank_codecs
from collapipe_flwr.scheduler.base import solution_plan
from collapipe_flwr.scheduler.model_share import with_model_shares
from collapipe_flwr.scheduler.planner import PlanSolver, Solution
from collapipe_flwr.scheduler.replicating import with_replicas

MARGIN = 0.02  # what finer codecs may cost
SPARED = 0.005  # of the time to the target, from which on a finer codec opens
TINY = 1e-12  # relative


def refine_codecs(planner: PlanSolver, coarse: Solution) -> Solution:
    """Choose finer codecs than ``coarse`` has where they are worth it, and optimise the radio."""
    steps = rank_codecs(planner.settings.codecs)
    if len(steps) < 2:
        return coarse
    codec = lift_codecs(Lifting(planner, coarse, steps))
    if (codec == coarse.chain.hops.codec).all():
        return coarse
    tables = with_codecs(planner.tables, coarse.rows, codec)
    finer = replace(planner, tables=tables)
    return finer.play(finer.stayed(coarse.rows, coarse.allocation.edge_hz_r))


class Lifting:
    """A decision, the codecs with which it opens, and what its clusters may spend on finer ones."""

    def __init__(self, planner: PlanSolver, coarse: Solution, steps: tuple[int, ...]) -> None:
        self.coarse, self.steps = coarse, steps
        self._prices = of_members(planner.price_mi, coarse.rows)
        bounded = price_rows(coarse.chain, coarse.allocation.times, coarse.powers)
        self._played_s = coarse.priced.latency_s - bounded.latency_s  # more than 1F1B's bound
        free = np.array([not c.profile.link_codec for c in planner.tables.snapshot.clusters])
        self.movable = free[:, None] & coarse.chain.hops.used
        self.opening = self._open()
        latency, worth = self.priced(self.opening)
        self._most_worth = worth + MARGIN * coarse.objective / len(coarse.rows)
        self._most_s = (1.0 + MARGIN) * latency.max() * (1.0 + TINY)

    def _open(self) -> Ints:
        """Choose one codec per cluster by the time to the target, (R, S + 1)."""
        codec = self.coarse.chain.hops.codec
        round_s = self.coarse.priced.latency_s.max()
        for finer in reversed(self.steps[:-1]):
            trial = np.where(self.movable, finer, codec)
            now, then = (
                self._noise(each) * np.maximum(self.priced(each)[0], round_s)
                for each in (codec, trial)
            )
            codec = np.where((then < (1.0 - SPARED) * now)[:, None], trial, codec)
        return codec

    def _noise(self, codec_rh: Ints) -> Array:
        """Return by how much errors multiply the rounds to the target, (R,)."""
        return np.asarray(1.0 + 2.0 * (NOISE[codec_rh] * self.coarse.chain.hops.used).sum(-1))

    def priced(self, codec_rh: Ints) -> tuple[Array, Array]:
        """Compute time and priced energy of every cluster, (R,), at its powers and bandwidth.

        An axis more in front of ``codec_rh`` holds several choices of codecs.
        """
        coarse = self.coarse
        grown = SHARES[codec_rh] / SHARES[coarse.chain.hops.codec]
        times = coarse.allocation.times * grown[..., None]
        prices = price_rows(coarse.chain, times, coarse.powers)
        return prices.latency_s + self._played_s, (self._prices * prices.energy_j).sum(-1)

    def allowed(self, codec_rh: Ints) -> Mask:
        """Return which clusters keep both margins, in the shape of `priced`."""
        latency, worth = self.priced(codec_rh)
        return np.asarray((latency <= self._most_s) & (worth <= self._most_worth))


def lift_codecs(lifting: Lifting) -> Ints:
    """Lift codecs of hops, (R, S + 1), one per cluster at a time while one is allowed."""
    hops, steps = lifting.coarse.chain.hops, lifting.steps
    finer = np.arange(len(SHARES))
    finer[list(steps[1:])] = steps[:-1]
    codec = lifting.opening.copy()
    every = np.arange(codec.shape[1])
    while True:
        fine = finer[codec]
        movable = lifting.movable & (fine != codec)
        if not movable.any():
            return codec
        trials = np.tile(codec, (len(every), 1, 1))  # each with one hop lifted
        trials[every, :, every] = fine.T
        gained = NOISE[codec] - NOISE[fine]
        spent = hops.bits * (SHARES[fine] - SHARES[codec])
        good = movable & lifting.allowed(trials).T
        value = np.where(good, gained / np.maximum(spent, 1.0), 0.0)
        rows = np.flatnonzero(value.max(1) > 0.0)
        if not len(rows):
            return codec
        picked = (rows, value[rows].argmax(1))
        codec[picked] = fine[picked]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A solved round for some set of clusters that hold ``share`` of all examples."""

    planner: PlanSolver
    solution: Solution
    share: float
    model_share_m: Array

    def plan(self, policy: str) -> Plan:
        """Convert to a `Plan`, with codecs no coarser than they must be."""
        refined_solution = refine_codecs(self.planner, self.solution)
        plan = solution_plan(refined_solution, policy, self.share)
        if self.planner.settings.replicas:
            plan = with_replicas(plan, self.planner, refined_solution.rho)
        tables, settings = self.planner.tables, self.planner.settings
        return with_model_shares(plan, self.model_share_m, tables, settings)

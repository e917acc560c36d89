"""Solved rounds: codecs no coarser than they must be, and rounds that close early.

**Codecs.** A decision is made as if every link used the coarsest codec allowed: nothing is faster.
A cluster opens with the coarsest one, or with a finer one on all its hops where that spares more
rounds than its time grows: errors make rounds to the target 1 + 2 times the sum of the hops' square
errors as many (there and back). Then it lifts hops to finer codecs, the one that removes most noise
per bit first, as long as

    its time  <= (1 + MARGIN) * the round's as it opened,
    its price of energy  <= that as it opened + MARGIN * the round's objective / M,

powers and bandwidth as decided. At last the radio is optimised for the new payloads, so that the
objective is at most 1 + 2 MARGIN times that of the opening. Our own rule.

**Closing early.** A round closes at ``slack`` times what its median cluster needs, or when all are
there. A cluster that needs longer is late by s rounds: its update joins once in 1 + s rounds and
weighs 1 / sqrt(1 + s). A plan for all shortens the slowest cluster's round at the others' cost.
Where progress per second is worth more than that, the round does not wait for one cluster, or two,
four and so on. Those are planned by themselves, with bandwidth and memory of the edge in proportion
to their number. Section 4.7 of docs/theory.md. Our reconstruction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from collapipe_flwr.core.domain import ClusterSnapshot, Plan, Snapshot
from collapipe_flwr.costs.arrays import Array, Ints, Mask
from collapipe_flwr.costs.chain import price_rows
from collapipe_flwr.costs.convergence import compute_join_weight, sum_late_bound
from collapipe_flwr.costs.layouts import gather_members, set_codecs
from collapipe_flwr.costs.radio import NOISE, SHARES, rank_codecs
from collapipe_flwr.scheduler.base import make_plan
from collapipe_flwr.scheduler.model_share import set_model_shares
from collapipe_flwr.scheduler.planner import PlanSolver, Solution
from collapipe_flwr.scheduler.problem import NEVER
from collapipe_flwr.scheduler.replicating import add_replicas

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
    tables = set_codecs(planner.tables, coarse.rows, codec)
    finer = replace(planner, tables=tables)
    return finer.play(finer.stay(coarse.rows, coarse.allocation.edge_hz_r))


class Lifting:
    """A decision, the codecs with which it opens, and what its clusters may spend on finer ones."""

    def __init__(self, planner: PlanSolver, coarse: Solution, steps: tuple[int, ...]) -> None:
        self.coarse, self.steps = coarse, steps
        self._prices = gather_members(planner.price_mi, coarse.rows)
        bounded = price_rows(coarse.chain, coarse.allocation.times, coarse.powers)
        self._played_s = coarse.priced.latency_s - bounded.latency_s  # more than 1F1B's bound
        free = np.array([not c.profile.link_codec for c in planner.tables.snapshot.clusters])
        self.movable = free[:, None] & coarse.chain.hops.used
        self.opening = self._open()
        latency, worth = self.price(self.opening)
        self._most_worth = worth + MARGIN * coarse.objective / len(coarse.rows)
        self._most_s = (1.0 + MARGIN) * latency.max() * (1.0 + TINY)

    def _open(self) -> Ints:
        """Choose one codec per cluster by the time to the target, (R, S + 1)."""
        codec = self.coarse.chain.hops.codec
        round_s = self.coarse.priced.latency_s.max()
        for finer in reversed(self.steps[:-1]):
            trial = np.where(self.movable, finer, codec)
            now, then = (
                self._compute_noise(each) * np.maximum(self.price(each)[0], round_s)
                for each in (codec, trial)
            )
            codec = np.where((then < (1.0 - SPARED) * now)[:, None], trial, codec)
        return codec

    def _compute_noise(self, codec_rh: Ints) -> Array:
        """Return by how much errors multiply the rounds to the target, (R,)."""
        return np.asarray(1.0 + 2.0 * (NOISE[codec_rh] * self.coarse.chain.hops.used).sum(-1))

    def price(self, codec_rh: Ints) -> tuple[Array, Array]:
        """Compute time and priced energy of every cluster, (R,), at its powers and bandwidth.

        An axis more in front of ``codec_rh`` holds several choices of codecs.
        """
        coarse = self.coarse
        grown = SHARES[codec_rh] / SHARES[coarse.chain.hops.codec]
        times = coarse.allocation.times * grown[..., None]
        prices = price_rows(coarse.chain, times, coarse.powers)
        return prices.latency_s + self._played_s, (self._prices * prices.energy_j).sum(-1)

    def find_allowed(self, codec_rh: Ints) -> Mask:
        """Return which clusters keep both margins, in the shape of `price`."""
        latency, worth = self.price(codec_rh)
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
        good = movable & lifting.find_allowed(trials).T
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
        plan = make_plan(refined_solution, policy, self.share)
        if self.planner.settings.replicas:
            plan = add_replicas(plan, self.planner, refined_solution.rho)
        tables, settings = self.planner.tables, self.planner.settings
        return set_model_shares(plan, self.model_share_m, tables, settings)


Decide = Callable[[Snapshot, float], Decision]
"""The best plan for some clusters, where a second counts 1 / share of one of the round."""


def compute_closing_s(latency_m: Array, slack: float) -> float:
    """Return when a round closes, as `RoundDeadline` does."""
    median = np.sort(latency_m)[(len(latency_m) - 1) // 2]
    return float(min(latency_m.max(), slack * median))


def count_rounds_late(latency_m: Array, slack: float) -> Ints:
    """Count the rounds by which each cluster is late."""
    ratio = latency_m / compute_closing_s(latency_m, slack)
    return np.asarray(np.maximum(np.ceil(ratio * (1.0 - 1e-9)) - 1, 0), dtype=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyClosing:
    """A decision for the clusters that are waited for, and one for those that are not."""

    whole: Decision  # that waits for all
    parts: tuple[Decision, ...]
    slack: float

    @property
    def latency_m(self) -> Array:
        """Seconds of a round of every cluster, in the order of the parts, (M,)."""
        return np.concatenate([part.solution.priced.latency_s for part in self.parts])

    @property
    def rho(self) -> float:
        """Rounds to the target over those of the reference plan, late updates as they count."""
        tables = [part.planner.tables for part in self.parts]
        examples = np.concatenate([each.examples_m for each in tables])
        shares, late = examples / examples.sum(), count_rounds_late(self.latency_m, self.slack)
        learning = self.whole.planner.learning
        if learning.constants is None:
            return float(1.0 / (shares * compute_join_weight(late)).sum())
        steps = np.concatenate([part.solution.chain.steps_r for part in self.parts])
        batches = np.concatenate([part.solution.rows.batch_r for part in self.parts])
        rounds = float(
            learning.constants.count_rounds(sum_late_bound(shares, steps, batches, late))
        )
        return min(rounds / learning.reference_rounds, NEVER)

    @property
    def objective(self) -> float:
        """Time to the target, and the energy that a round costs on average."""
        waits = count_rounds_late(self.latency_m, self.slack)
        late = np.split(waits, np.cumsum([len(p.solution.rows) for p in self.parts])[:-1])
        time = (
            self.whole.planner.latency_price
            * self.rho
            * compute_closing_s(self.latency_m, self.slack)
        )
        pairs = zip(self.parts, late, strict=True)
        return time + sum(float((_price_energy(part) / (1.0 + s)).sum()) for part, s in pairs)

    def plan(self, policy: str) -> Plan:
        """Convert to a `Plan`, with clusters in the order of the snapshot."""
        plans = [part.plan(policy) for part in self.parts]
        by_id = {cluster.cluster_id: cluster for plan in plans for cluster in plan.clusters}
        order = [c.profile.cluster_id for c in self.whole.planner.tables.snapshot.clusters]
        clusters = tuple(by_id[name] for name in order)
        latency_m = np.array([cluster.latency_s for cluster in clusters])
        seconds = compute_closing_s(latency_m, self.slack)
        return replace(plans[0], clusters=clusters, latency_s=seconds, rho=self.rho)


def close_early(whole: Decision, decide: Decide, slack: float) -> EarlyClosing:
    """Choose the better of ``whole`` and rounds that wait for fewer clusters."""
    snapshot = whole.planner.tables.snapshot
    best = EarlyClosing(whole=whole, parts=(whole,), slack=slack)
    here, gone, now = snapshot.clusters, tuple[ClusterSnapshot, ...](), whole
    most = len(here) // 2  # the median cluster is always waited for
    while len(gone) < most:
        dearest = np.argsort(-now.solution.allocation.latency_price_r, kind="stable")
        late = set(dearest[: min(max(len(gone), 1), most - len(gone))].tolist())
        gone = (*gone, *(c for m, c in enumerate(here) if m in late))
        here = tuple(c for m, c in enumerate(here) if m not in late)
        here_share = _count_examples(here) / _count_examples(snapshot.clusters)
        now = decide(_take_part(snapshot, here), here_share)
        worth = _price_late_second(now, whole, here_share)
        parts = (now, decide(_take_part(snapshot, gone), 1.0 / worth))
        fewer = EarlyClosing(whole=whole, parts=parts, slack=slack)
        if not fewer.objective < best.objective:
            break
        best = fewer
    return best


def _price_late_second(now: Decision, whole: Decision, share: float) -> float:
    """Price a second of late clusters in seconds of the round.

    With r = 1 + s, progress per second is in proportion to (share + late share * r^-1.5) / T. A
    relative change of their latency changes r as much, so progress by 1.5 of the late term.
    """
    closes_s = float(now.solution.priced.latency_s.max())
    ratio = max(float(whole.solution.priced.latency_s.max()) / closes_s, 1.0)
    late = (1.0 - share) * ratio**-1.5
    return float(1.5 * late / (share + late) / ratio)


def _take_part(snapshot: Snapshot, clusters: Sequence[ClusterSnapshot]) -> Snapshot:
    """Restrict to some clusters, with their part of the bandwidth and of the edge's memory."""
    share = len(clusters) / len(snapshot.clusters)
    return replace(
        snapshot,
        clusters=tuple(clusters),
        radio=replace(snapshot.radio, bandwidth_hz=share * snapshot.radio.bandwidth_hz),
        edge=replace(snapshot.edge, memory_bytes=int(share * snapshot.edge.memory_bytes)),
    )


def _count_examples(clusters: Sequence[ClusterSnapshot]) -> int:
    return sum(cluster.profile.examples for cluster in clusters)


def _price_energy(decision: Decision) -> Array:
    """Return the part of the objective besides the round's latency, by cluster."""
    return decision.planner.price_energy(decision.solution.chain, decision.solution.priced)

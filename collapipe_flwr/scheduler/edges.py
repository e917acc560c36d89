"""Edges: every cluster has one (`choose_edges`), and may choose among several (`EdgeChoice`).

A choice makes whole plans of few assignments and takes the best of them.

A round lasts as long as its slowest cluster, and n clusters that share an edge each have an n-th of
its speed and memory. So edges are assigned together. Few assignments are all planned. Of many, the
plan in place says what they would be worth: with its blocks and bandwidths at full power, the bound
of the step gives

    T[m, k, n]    seconds of cluster m's round on its k-th edge, if n clusters share that

by one pricing of all clusters for each k and n. Over T, clusters move one at a time while

    max_m T + SPREAD mean_m T

falls; the mean counts because what a quick cluster spares of the band helps the slow one. The best
assignment is planned as a whole and kept if it costs less; then the same from the new plan.

The first round, and every `THOROUGH`-th from there, plans everybody's first edge, too, so that no
choice is worse than none. The rounds between plan the assignment in place, and one other if it
promises to be quicker by `PROMISING`: clusters follow what is learnt of speeds and rates. Our own
rule.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from operator import is_

import numpy as np

from collapipe_flwr.core.domain import (
    ClusterPlan,
    ClusterProfile,
    ClusterSnapshot,
    EdgeProfile,
    ModelProfile,
    Plan,
    Snapshot,
)
from collapipe_flwr.core.errors import InfeasibleError, ScheduleError
from collapipe_flwr.costs.arrays import Array, Ints
from collapipe_flwr.costs.chain import compute_full_power_times, compute_latency_s, make_chain
from collapipe_flwr.costs.layouts import make_plan_rows, select_clusters
from collapipe_flwr.costs.tables import FEW_CLUSTERS, tabulate
from collapipe_flwr.costs.work import fits
from collapipe_flwr.scheduler.estimates import estimate_profiles
from collapipe_flwr.scheduler.link_estimates import LinkEstimates, apply_links
from collapipe_flwr.scheduler.protocol import SchedulerConfig, SchedulerState
from collapipe_flwr.scheduler.replan import ReplanInput, replan

ALL_PLANNED = 8  # assignments: so few are all planned in a thorough round
MOST_PLANS = 3  # whole plans of promising assignments in a thorough round
THOROUGH = 10  # rounds
PROMISING = 0.02  # relative gain by T that is worth a whole plan
SPREAD = 0.3  # of the mean, in what clusters move by
MOST_MOVES = 200
# Numbers of clusters for which T is priced; one between two of them counts as the larger.
SHARING = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256, 512, 1024)

Assignment = tuple[int, ...]
"""Of every cluster the place of its edge among its own."""
Step = Callable[[SchedulerState, Snapshot], tuple[Plan, SchedulerState]]
"""Plans a round in which every cluster has one edge."""
Cost = Callable[[Plan, Snapshot, SchedulerState], float]
"""The objective of such a plan."""
Chosen = Mapping[str, str]
"""cluster -> id of its edge."""


@dataclass(frozen=True, slots=True)
class _Trial:
    plan: Plan
    state: SchedulerState  # after it
    cost: float


class EdgeChoice:
    """The choice of one round."""

    def __init__(
        self, snapshot: Snapshot, state: SchedulerState, settings: SchedulerConfig, step: Step
    ) -> None:
        self._snapshot, self._state, self._settings, self._step = snapshot, state, settings, step
        self._eliminate_edges: list[tuple[EdgeProfile | None, ...]] = [
            cluster.profile.edges or (None,) for cluster in snapshot.clusters
        ]
        self._trials: dict[Assignment, _Trial] = {}
        self._refusals: dict[Assignment, ScheduleError] = {}

    def choose(self, cost: Cost) -> tuple[Plan, SchedulerState]:
        """Choose the cheapest plan that is found; raise ScheduleError if there is none."""
        last = self._state.last_plan
        before = self._find_edges(last)
        is_thorough = last is None or not self._state.rounds % THOROUGH
        wanted = [before]
        if is_thorough:
            wanted.append((0,) * len(self._eliminate_edges))
            if math.prod(map(len, self._eliminate_edges)) <= ALL_PLANNED:
                wanted += product(*(range(len(edges)) for edges in self._eliminate_edges))
        for assignment in wanted:
            self._try(assignment, cost)
        for assignment in () if self._trials else self._propose_starts():
            self._try(assignment, cost)
        if not self._trials:
            raise self._refusals[before]
        for _ in range(MOST_PLANS if is_thorough else 1):
            now = min(self._trials, key=lambda each: self._trials[each].cost)
            found = self._find_promising(now, 0.0 if is_thorough else PROMISING)
            if found in self._trials or found in self._refusals:
                break
            self._try(found, cost)
        best = min(self._trials.values(), key=lambda trial: trial.cost)
        stay = self._trials.get(before, best)
        better = best.cost < (1.0 - self._settings.hysteresis) * stay.cost
        chosen = best if better else stay
        return chosen.plan, chosen.state

    def _find_edges(self, plan: Plan | None) -> Assignment:
        """Return a plan's assignment, with the first edge for clusters that are not in the plan."""
        known = map_edges(plan)
        wanted = [known.get(c.profile.cluster_id) for c in self._snapshot.clusters]
        ids = [[edge and edge.id for edge in edges] for edges in self._eliminate_edges]
        return tuple(
            own.index(name) if name in own else 0 for own, name in zip(ids, wanted, strict=True)
        )

    def _try(self, assignment: Assignment, cost: Cost) -> None:
        """Plan the round with these edges, unless that was done."""
        if assignment in self._trials or assignment in self._refusals:
            return
        snapshot = self._place(assignment)
        try:
            plan, after = self._step(self._state, snapshot)
        except ScheduleError as error:
            self._refusals[assignment] = error
            return
        if not self._state.weight:  # the first plan finds what time is worth to all
            self._state = replace(
                self._state, weight=after.weight, placeholder_j=after.placeholder_j
            )
        value = math.inf if plan.fallback else cost(plan, snapshot, self._state)
        self._trials[assignment] = _Trial(plan, after, value)

    def _place(self, assignment: Assignment) -> Snapshot:
        pairs = zip(self._snapshot.clusters, self._eliminate_edges, assignment, strict=True)
        chosen = {c.profile.cluster_id: edge.id for c, edges, k in pairs if (edge := edges[k])}
        return choose_edges(self._snapshot, chosen, self._state.links)

    def _propose_starts(self) -> Iterator[Assignment]:
        """Propose all edges in turn, everybody's second edge, third, etc., and the roomiest."""
        yield tuple(m % len(edges) for m, edges in enumerate(self._eliminate_edges))
        for k in range(1, max(map(len, self._eliminate_edges))):
            yield tuple(min(k, len(edges) - 1) for edges in self._eliminate_edges)
        rooms = [
            [edge.memory_bytes if edge else 0 for edge in edges] for edges in self._eliminate_edges
        ]
        yield tuple(room.index(max(room)) for room in rooms)

    def _find_promising(self, now: Assignment, least_gain: float) -> Assignment:
        """Return the assignment that seems quickest from ``now``; itself if none gains enough."""
        trial = self._trials[now]
        if trial.plan.fallback:
            return now
        outlook = _Outlook(self._eliminate_edges, self._bound_seconds(trial.plan))
        alone = tuple(outlook.seconds_mkn[:, :, 0].argmin(1).tolist())
        best = min(map(outlook.improve, (now, alone)), key=outlook.compute_value)
        gains = outlook.compute_value(best) < (1.0 - least_gain) * outlook.compute_value(now)
        return best if gains else now

    def _bound_seconds(self, plan: Plan) -> Array:
        """Bound T, (M, K, N): infinite where an edge has no room, 0 of clusters without a plan."""
        named = {each.cluster_id: each for each in plan.clusters}
        most = max(map(len, self._eliminate_edges))
        shape = (len(self._eliminate_edges), most, len(SHARING))
        seconds = np.full(shape, np.inf)
        for k in range(most):
            seen = self._place(tuple(min(k, len(edges) - 1) for edges in self._eliminate_edges))
            seen, _ = estimate_profiles(seen, self._state.beliefs)
            moved = [self._replan_moved(named.get(c.profile.cluster_id), c) for c in seen.clusters]
            here = np.array([m for m, each in enumerate(moved) if each is not None], np.int64)
            if not len(here):
                continue
            plans = [each for each in moved if each is not None]
            counts = SHARING[: 1 + int(_find_place(len(self._eliminate_edges)))]
            seconds[here, k, : len(counts)] = self._bound_rounds_s(seen, plans, counts)
        for m, edges in enumerate(self._eliminate_edges):
            seconds[m, len(edges) :] = np.inf
            if self._snapshot.clusters[m].profile.cluster_id not in named:
                seconds[m] = 0.0
        return seconds

    def _replan_moved(
        self, plan: ClusterPlan | None, cluster: ClusterSnapshot
    ) -> ClusterPlan | None:
        """Replan without a device that is the edge now; return None where that leaves no plan."""
        if plan is None:
            return None
        ids = [device.device_id for device in cluster.profile.devices]
        if set(ids).issuperset(plan.device_ids):
            return plan
        rest = ReplanInput(
            profile=cluster.profile,
            model=self._snapshot.find_model(cluster.profile),
            present=ids,
        )
        try:
            return replan(plan, rest)
        except InfeasibleError:
            return None

    def _bound_rounds_s(
        self, seen: Snapshot, plans: Sequence[ClusterPlan], counts: Sequence[int]
    ) -> Array:
        """Bound the seconds of every plan's round if so many clusters share its edge, (M, N)."""

        def alone(cluster: ClusterSnapshot) -> ClusterSnapshot:
            profile = cluster.profile
            own = profile.edge
            if own is not None and not profile.edge_at_home:
                own = replace(own, name=f"of {profile.cluster_id}")
            return replace(cluster, profile=replace(profile, edge=own))

        each = replace(seen, clusters=tuple(map(alone, seen.clusters)))
        each = select_clusters(each, [plan.cluster_id for plan in plans])
        whole = tabulate(each, self._settings.coarsest)
        rows = make_plan_rows(whole, plans)
        hz_m, found = np.array([plan.bandwidth_hz for plan in plans]), []
        shared = whole.edges.own_m & ~whole.edges.home_m
        for count in counts:
            part = np.where(shared, 1.0 / count, 1.0)
            edges = replace(
                whole.edges,
                speed_m=part * whole.edges.speed_m,
                memory_m=part * whole.edges.memory_m,
            )
            tables = replace(whole, edges=edges)
            chain = make_chain(tables, rows, self._settings)
            latency_m = compute_latency_s(chain, compute_full_power_times(chain, hz_m))
            found.append(np.where(fits(tables, rows, self._settings), latency_m, np.inf))
        return np.stack(found, axis=1)


def _find_place(sharing: int | Ints) -> Ints:
    """Return the place in `SHARING` of the first number that is no smaller."""
    return np.minimum(np.searchsorted(SHARING, sharing), len(SHARING) - 1)


class _Outlook:
    """Predicts what an assignment of clusters to edges costs, by T."""

    def __init__(self, edges: Sequence[Sequence[EdgeProfile | None]], seconds_mkn: Array) -> None:
        self.seconds_mkn = seconds_mkn
        names: dict[str, int] = {}
        self._machine_mk = np.zeros(seconds_mkn.shape[:2], np.int64)
        for m, own in enumerate(edges):
            for k, edge in enumerate(own):
                name = edge.name if edge else ""
                self._machine_mk[m, k] = names.setdefault(name, len(names))
        self._sizes = [len(own) for own in edges]
        self._every = np.arange(len(edges))

    def _look_up_latency(self, assignment: Assignment) -> tuple[Array, Ints]:
        """Look up the seconds of every cluster, and its machine."""
        k = np.array(assignment)
        machine = self._machine_mk[self._every, k]
        return self.seconds_mkn[self._every, k, _find_place(np.bincount(machine)[machine])], machine

    def compute_value(self, assignment: Assignment) -> float:
        """Return the slowest cluster's seconds plus a part of the mean."""
        latency, _ = self._look_up_latency(assignment)
        return float(latency.max() + SPREAD * latency.mean())

    def improve(self, assignment: Assignment) -> Assignment:
        """Move clusters one at a time while that helps."""
        for _ in range(MOST_MOVES):
            best = min(self._propose_moves(assignment), key=self.compute_value, default=assignment)
            if not self.compute_value(best) < self.compute_value(assignment):
                break
            assignment = best
        return assignment

    def _propose_moves(self, assignment: Assignment) -> Iterator[Assignment]:
        latency, machine = self._look_up_latency(assignment)
        movable = self._every
        if len(movable) > FEW_CLUSTERS:  # then only those move whose edge the slowest one has
            movable = np.flatnonzero(machine == machine[latency.argmax()])
        for m in movable.tolist():
            for k in range(self._sizes[m]):
                if k != assignment[m]:
                    yield (*assignment[:m], k, *assignment[m + 1 :])


def map_edges(plan: Plan | None) -> dict[str, str]:
    """Map each cluster of a plan to its edge."""
    return {} if plan is None else {each.cluster_id: each.edge for each in plan.clusters}


def choose_edges(snapshot: Snapshot, chosen: Chosen, links: LinkEstimates) -> Snapshot:
    """Give every cluster one edge: the chosen one, else its first.

    ``links`` are what is known of its links. Returns the snapshot where nobody has a choice.
    """
    clusters = tuple(
        _choose_edge(c, chosen.get(c.profile.cluster_id), snapshot.find_model(c.profile))
        for c in snapshot.clusters
    )
    if all(map(is_, clusters, snapshot.clusters)):
        return snapshot
    return apply_links(replace(snapshot, clusters=clusters), links)


def _choose_edge(
    cluster: ClusterSnapshot, name: str | None, model: ModelProfile
) -> ClusterSnapshot:
    """Return the cluster with one edge; a device that is the edge holds no blocks."""
    profile = cluster.profile
    if not profile.other_edges:
        return cluster
    usable = [edge for edge in profile.edges if profile.has_devices_beside(edge)]
    edge = next((edge for edge in usable if edge.id == name), usable[0])
    one = cluster.with_edge(edge)
    return replace(one, profile=divide_memory(one.profile, model))


def divide_memory(cluster: ClusterProfile, model: ModelProfile) -> ClusterProfile:
    """Divide the control unit's memory among its two parts, if it is the edge.

    Each gets the state of its part and half of what is left.
    """
    unit, edge = cluster.control_unit, cluster.edge
    if edge is None or cluster.other_edges or not cluster.edge_at_home:
        return cluster
    if edge.memory_bytes != unit.memory_bytes:  # it is divided already
        return cluster
    own, last = model.embedding.state_bytes, model.decoder.state_bytes
    here = max(own + (unit.memory_bytes - own - last) // 2, 1)
    there = max(unit.memory_bytes - here, 1)
    return replace(
        cluster,
        control_unit=replace(unit, memory_bytes=here),
        edge=replace(edge, memory_bytes=there),
    )

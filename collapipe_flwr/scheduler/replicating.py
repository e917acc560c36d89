"""Adding replicas: the last step, after segments, batches and radio are decided.

Only the slowest cluster makes a round shorter, so its plan is changed, then that of the next
slowest, as long as what it pays falls by `WORTH` each time. A change lets a device without a
segment share the slowest stage, or lets stages next to each other share all their blocks: two of
them, every two, or all. Bandwidth, micro-batches and the other clusters stay as they are, and hops
keep their times, so what is found is a plan within the same limits; no more is claimed of it.
Under 1F1B depths are the textbook's for so many workers, and deeper where that gains. Where nothing
wins the plan is what it was, bit by bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import groupby

from collapipe_flwr.core.domain import ClusterPlan, Plan, Segment
from collapipe_flwr.core.schedule import compute_textbook_depths
from collapipe_flwr.costs.arrays import Array
from collapipe_flwr.costs.layouts import index_members
from collapipe_flwr.costs.replicas import ReplicatedCosts, ReplicatedPricing
from collapipe_flwr.scheduler.problem import PlanningProblem

WORTH = 0.01  # of what a cluster pays, that a change must gain
MOST_CLUSTERS = 20  # beyond, there is no time to try
MOST_CHANGES = 8
MOST_SLACK = 3  # micro-batches more in flight per stage than the textbook has


def add_replicas(plan: Plan, problem: PlanningProblem, rho: float) -> Plan:
    """Add replicas to ``plan`` in the clusters that make the round long."""
    if len(plan.clusters) > MOST_CLUSTERS:
        return plan
    for _ in range(MOST_CHANGES):
        m = max(range(len(plan.clusters)), key=lambda c: plan.clusters[c].latency_s)
        better = _Changes(problem, rho, plan, m).find_best()
        if better is None:
            break
        clusters = (*plan.clusters[:m], better, *plan.clusters[m + 1 :])
        plan = replace(plan, clusters=clusters, latency_s=max(c.latency_s for c in clusters))
    return plan


class _Changes:
    """The changes that the plan of cluster ``m`` allows."""

    def __init__(self, problem: PlanningProblem, rho: float, plan: Plan, m: int) -> None:
        self._problem, self._m, self._now = problem, m, plan.clusters[m]
        self._second_price = problem.latency_price * rho
        self._members = index_members(problem.tables, m)
        self._others_s = max(
            (c.latency_s for c in plan.clusters if c is not self._now), default=0.0
        )

    def find_best(self) -> ClusterPlan | None:
        """Find the change that gains most; None where none is worth it."""
        now = self._make_pricing(self._now).price()
        value = self._price(now.latency_s, now.spent_j)
        least, found = value - WORTH * abs(value), None
        for segments, hops in self._propose_segments(now.slowest_stage):
            for plan, costs in self._propose_candidates(
                segments, now.hop_s[list(hops)], hops, least
            ):
                value = self._price(costs.latency_s, costs.spent_j)
                if self._is_allowed(costs) and value < least:
                    least, found = value, _apply_costs(plan, costs)
        return found

    def _propose_segments(
        self, slowest: int
    ) -> Iterator[tuple[tuple[Segment, ...], tuple[int, ...]]]:
        """Propose segments, and which hops of today's plan theirs are."""
        segments, hops = self._now.segments, tuple(range(len(self._now.segments) + 1))
        here = segments[slowest]
        for name in (n for n in self._members if n not in self._now.device_ids):
            more = replace(here, replicas=(*here.replicas, name))
            yield (*segments[:slowest], more, *segments[slowest + 1 :]), hops
        for group in _list_groups(len(segments)):
            yield _merge(segments, group), (*sorted(set(group)), len(segments))

    def _propose_candidates(
        self, segments: tuple[Segment, ...], hop_s: Array, hops: tuple[int, ...], least: float
    ) -> Iterator[tuple[ClusterPlan, ReplicatedCosts]]:
        """Propose full depths under GPipe, else deeper ones as long as these gain.

        Yields none where no depth can make the cluster pay less than ``least``.
        """
        full = self._problem.tables.members.power_max_mi[self._m].tolist()
        names = [name for segment in segments for name in segment.device_ids]
        devices_w = {name: full[self._members[name]] for name in names}
        plan = replace(
            self._now,
            segments=segments,
            hops=tuple(self._now.hops[hop] for hop in hops if self._now.hops),
            tx_power_w={self._now.member_ids[0]: full[0]} | devices_w,
            gradient_power_w=devices_w,
        )
        if max(plan.replicas) > plan.micro_batches:
            return
        plan = self._make_pricing(plan).save_power(hop_s)
        shortest_s = float("inf")
        for depths in self._propose_depths(plan):
            deep = replace(plan, warmup_depth=depths)
            pricing = self._make_pricing(deep)
            if not self._price(*pricing.bound_costs()) < least:
                return
            costs = pricing.price()
            yield deep, costs
            if costs.step_s >= shortest_s or not costs.fits:
                return
            shortest_s = costs.step_s

    def _propose_depths(self, plan: ClusterPlan) -> Iterator[tuple[int, ...]]:
        most = plan.micro_batches
        if self._problem.settings.schedule == "gpipe":
            yield (most,) * len(plan.replicas)
            return
        for slack in range(MOST_SLACK + 1):
            yield tuple(min(depth, most) for depth in compute_textbook_depths(plan.replicas, slack))

    # -- prices -----------------------------------------------------------------------------

    def _make_pricing(self, plan: ClusterPlan) -> ReplicatedPricing:
        return ReplicatedPricing(self._problem.tables, self._m, plan, self._problem.settings)

    def _is_allowed(self, costs: ReplicatedCosts) -> bool:
        """Return whether it fits all memories and what every device may spend in this round."""
        room, at = self._problem.room_mi[self._m], self._members
        return costs.fits and all(j <= room[at[n]] for n, j in costs.spent_j.items() if n in at)

    def _price(self, latency_s: float, energy_j: Mapping[str, float]) -> float:
        """Compute what the cluster pays: seconds of the round, and joules."""
        prices = self._problem.price_mi[self._m]
        head = self._problem.tables.snapshot.clusters[self._m].profile.edge_device
        joules = sum(
            prices[self._members.get(name, 0)] * j for name, j in energy_j.items() if name != head
        )
        return self._second_price * max(latency_s, self._others_s) + float(joules)


def _apply_costs(plan: ClusterPlan, costs: ReplicatedCosts) -> ClusterPlan:
    return replace(
        plan,
        latency_s=costs.latency_s,
        step_s=costs.step_s,
        energy_j=costs.energy_j,
        memory_bytes=costs.memory_bytes,
    )


def _list_groups(count: int) -> list[tuple[int, ...]]:
    """List groupings: for every stage the first one of those that it is merged with."""
    pairs = [
        tuple(first if stage == first + 1 else stage for stage in range(count))
        for first in range(count - 1)
    ]
    every_two = tuple(stage - stage % 2 for stage in range(count))
    found = dict.fromkeys((*pairs, every_two, (0,) * count))
    return [group for group in found if group != tuple(range(count))]


def _merge(segments: tuple[Segment, ...], group: tuple[int, ...]) -> tuple[Segment, ...]:
    found = []
    for _, stages in groupby(range(len(segments)), key=group.__getitem__):
        together = [segments[stage] for stage in stages]
        first, *others = (name for segment in together for name in segment.device_ids)
        found.append(
            Segment(
                device_id=first,
                first_block=together[0].first_block,
                stop_block=together[-1].stop_block,
                replicas=tuple(others),
            )
        )
    return tuple(found)

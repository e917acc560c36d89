"""Planned rounds: a scheduler over a world of described clusters, called by the strategy.

Before a round the world gives a snapshot and the scheduler a plan. After it the scheduler learns
what it really came to, for the clusters that finished: losses, gradient norms, how far the model
moved, and how long stages and rounds took, what they spent and what links carried. Clusters of
machines measured that (`outcomes`). Simulated ones ran in threads of some machine whose seconds say
nothing about the described boards: theirs is the plan's price in the world as it truly is, whose
devices may differ from their profiles (`World.truth`). Snapshots hold the estimates of real links,
whatever the policy.

A control unit reports at the end of a round which of its devices do not answer. They are left out
of snapshots until it reports them back, so a device that returns takes part one round later.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from flwr.app import ArrayRecord

from collapipe_flwr.core.domain import (
    ChannelState,
    ClusterOutcome,
    ClusterPlan,
    ClusterProfile,
    ClusterSnapshot,
    LinkSample,
    LinkShares,
    ModelProfile,
    Plan,
    RoundOutcome,
    Snapshot,
)
from collapipe_flwr.core.errors import DevicesMissing, InfeasibleError
from collapipe_flwr.core.json_codec import from_json, to_json
from collapipe_flwr.costs.measured import explained_s
from collapipe_flwr.costs.price import PricedCluster, price, with_rates
from collapipe_flwr.costs.work import PricingOptions
from collapipe_flwr.federation.checkpoint import Memory
from collapipe_flwr.federation.movement import MovementMeter
from collapipe_flwr.federation.outcomes import measured_outcome
from collapipe_flwr.federation.quarantine import Quarantine, Sentences
from collapipe_flwr.federation.rounds import ClosedRound, Outcome, RoundPlan
from collapipe_flwr.federation.telemetry import ClusterTelemetry, link_samples
from collapipe_flwr.scheduler.estimates import expected_s
from collapipe_flwr.scheduler.link_estimates import links_learned, with_links
from collapipe_flwr.scheduler.protocol import Scheduler, SchedulerState
from collapipe_flwr.simulation.episode import simulated_cluster
from collapipe_flwr.simulation.world import World

log = logging.getLogger("flwr.collapipe")
Absent = Mapping[str, Collection[str]]  # device ids by cluster id
Matrix = tuple[tuple[float, ...], ...]  # of numbers by pair of members


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    state: str = ""
    absent: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    examples: Mapping[str, int] = field(default_factory=dict)
    quarantine: Sentences = field(default_factory=dict)


class ScheduledRounds:
    """A :class:`RoundPlanner` for described clusters.

    ``clusters`` maps node ids to cluster ids of the ``world``; other nodes are never asked. It may
    change between rounds, when a cluster comes back as another node.
    ``options`` are the scheduler's own, so that prices and plans agree. ``paced`` says that senders
    keep to planned rates. ``budgeted`` gives devices that join a cluster their energy budgets.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        world: World,
        model: ModelProfile,
        clusters: Mapping[int, str],
        *,
        options: PricingOptions | None = None,
        paced: bool = False,
        budgeted: Callable[[ClusterProfile], ClusterProfile] = lambda profile: profile,
    ) -> None:
        self._budgeted = budgeted
        self.state: SchedulerState | None = None
        self._scheduler = scheduler
        self.world = world
        self._model = model
        self._clusters = clusters
        self._options = options
        self._paced = paced
        self._meter = MovementMeter()
        self._absent: dict[str, tuple[str, ...]] = {}  # devices by cluster
        self._quarantine = Quarantine()
        self._before: tuple[int, SchedulerState | None] | None = None  # of a round not settled yet
        self._examples: dict[str, int] = {}  # of a round, where machines trained on others

    @property
    def energy_budget_j(self) -> dict[str, float]:
        """The energy that each device may spend per round on average."""
        members = (device for profile in self.world.clusters for device in profile.members)
        return {device.device_id: device.energy_budget_j for device in members}

    @property
    def memory_limit_bytes(self) -> dict[str, int]:
        """The memory that plans may use of each device."""
        members = (device for profile in self.world.clusters for device in profile.members)
        return {device.device_id: device.memory_bytes for device in members}

    def plan(self, server_round: int, nodes: Sequence[int], arrays: ArrayRecord) -> RoundPlan:
        """The scheduler's plan for the clusters behind ``nodes``; raises ScheduleError.

        Of a round that is tried again, nothing but the plan of the last attempt is remembered.
        """
        del arrays
        if self._before is not None and self._before[0] == server_round:
            self.state = self._before[1]
        self._before = (server_round, self.state)
        names = {node: self._clusters.get(node, f"node-{node}") for node in nodes}
        plan = self._step(server_round, [n for n in names.values() if n in self._known()])
        return RoundPlan(
            server_round=server_round,
            plan=plan,
            cluster_ids=names,
            binding=True,
            whole=frozenset(p.cluster_id for p in self.world.clusters if p.whole),
            bundles=frozenset(p.cluster_id for p in self.world.clusters if p.bundles),
        )

    def settle(self, closed: ClosedRound) -> Outcome:
        """Price the finished part of the plan, and let the scheduler observe it."""
        assert closed.plan.plan is not None and self.state is not None
        self._before = None
        outcome = self._settled(closed)
        self._follow(closed)
        return outcome

    def _follow(self, closed: ClosedRound) -> None:
        """Use the current devices of clusters of machines from the next round on."""
        known = {profile.cluster_id: profile for profile in self.world.clusters}
        for told in closed.telemetry.values():
            now, before = told.profile, known.get(told.cluster_id)
            if now is None or before is None or _ids(now) == _ids(before):
                continue
            self.world = self.world.with_cluster(self._budgeted(now))
            come, gone = _ids(now) - _ids(before), _ids(before) - _ids(now)
            changes = (("came", come), ("went", gone))
            said = "; ".join(f"{', '.join(sorted(ids))} {how}" for how, ids in changes if ids)
            log.info("cluster %s: %s", told.cluster_id, said)

    def _settled(self, closed: ClosedRound) -> Outcome:
        assert closed.plan.plan is not None and self.state is not None
        done = finished(closed.plan.plan, closed)
        asked = (*closed.plan.plan.clusters, *closed.joined.values())
        if not done.clusters:
            return Outcome(queues_j=self.state.energy_queue_j)
        self._absent |= {name: told.absent for name, told in closed.telemetry.items()}
        for name, told in closed.telemetry.items():
            self._quarantine.learn(closed.plan.server_round, name, told)
        self._examples |= _other_examples(done, closed.telemetry, self._snapshot(closed))
        outcome = self._outcome(done, closed)
        whole = replace(closed.plan.plan, clusters=asked)
        self.state = self._scheduler.observe(self.state, whole, outcome)
        return Outcome(
            latency_s=outcome.latency_s,
            energy_j={c.cluster_id: c.energy_j for c in outcome.clusters},
            queues_j=self.state.energy_queue_j,
            clusters=outcome.clusters,
        )

    def dump(self) -> Memory:
        state = self.state.to_json() if self.state is not None else ""
        kept = to_json(
            _Kept(
                state=state,
                absent=self._absent,
                examples=self._examples,
                quarantine=self._quarantine.sentences,
            )
        )
        return Memory(text=kept, arrays=self._meter.last)

    def load(self, memory: Memory) -> None:
        """Restore from a checkpoint; raises ScheduleError or ProtocolError for another's."""
        kept = from_json(_Kept, memory.text, "the planner's checkpoint") if memory.text else _Kept()
        self.state = SchedulerState.from_json(kept.state) if kept.state else None
        self._absent, self._examples = dict(kept.absent), dict(kept.examples)
        self._quarantine = Quarantine(kept.quarantine)
        self._meter.last = dict(memory.arrays)

    def _step(self, server_round: int, present: Sequence[str]) -> Plan:
        snapshot = self._believed(server_round, present)
        if self.state is None:
            self.state = self._scheduler.init(snapshot)
        out = self._left_out_in(server_round)
        there = without_absent(snapshot, out)
        if snapshot.clusters and not there.clusters:
            self._try_in_full(out)
            raise DevicesMissing("no cluster has a device left: bring one back")
        try:
            plan, self.state = self._scheduler.step(self.state, there)
        except InfeasibleError as error:
            short = [name for name, devices in out.items() if devices]
            if not short:
                raise
            if not (rest := without_clusters(there, short)).clusters:
                self._try_in_full(out)
                raise DevicesMissing(str(error)) from error
            log.warning("%s cannot take part without their lost devices", ", ".join(short))
            plan, self.state = self._scheduler.step(self.state, rest)
            self._try_in_full(out)  # who sits out reports nothing
        self._try_in_full(_left_out(snapshot, there))
        return with_rates(plan, snapshot)

    def _left_out_in(self, server_round: int) -> dict[str, tuple[str, ...]]:
        """The absent or quarantined devices of each cluster."""
        held = self._quarantine.devices(server_round)
        names = self._absent.keys() | held.keys()
        return {name: (*self._absent.get(name, ()), *held.get(name, ())) for name in names}

    def _try_in_full(self, cluster_ids: Iterable[str]) -> None:
        """Plan with all devices of these clusters next time."""
        for cluster_id in cluster_ids:
            self._absent.pop(cluster_id, None)
            self._quarantine.lift(cluster_id)

    def _outcome(self, plan: Plan, closed: ClosedRound) -> RoundOutcome:
        """What the scheduler may learn from the round."""
        seen = self._snapshot(closed)
        truth, options = self.world.truth(seen), self._options or PricingOptions()
        parts = zip(plan.clusters, price(plan, truth, options).clusters, strict=True)
        clusters = [self._cluster(part, priced, closed, seen, truth) for part, priced in parts]
        movement = self._meter.measure(closed)
        awaited = [c.latency_s for c in clusters if c.cluster_id not in closed.joined]
        outcome = RoundOutcome(
            round_index=plan.round_index,
            latency_s=max(awaited or [cluster.latency_s for cluster in clusters]),
            clusters=tuple(clusters),
            update_norm=movement.norm if movement else None,
            update_change_norm=movement.change_norm if movement else None,
            update_spread=movement.spread if movement else None,
        )
        return self._explained(plan, outcome, seen, options)

    def _cluster(
        self,
        plan: ClusterPlan,
        priced: PricedCluster,
        closed: ClosedRound,
        seen: Snapshot,
        truth: Snapshot,
    ) -> ClusterOutcome:
        told = closed.telemetry.get(plan.cluster_id)
        profiles = {cluster.profile.cluster_id: cluster.profile for cluster in seen.clusters}
        profile, options = profiles[plan.cluster_id], self._options or PricingOptions()
        if told is None or not profile.real_links:
            found = simulated_cluster(plan, priced, truth, seen, options)
            noise = told.gradient_noise(plan) if told else None
            found = replace(found, loss=told.loss if told else None, gradient_noise=noise)
        else:
            links = self._samples(plan, told)
            found = measured_outcome(
                plan, priced, told, profile, seen.model, links=links, recompute=options.recompute
            )
        return self._with_expected(found)

    def _with_expected(self, cluster: ClusterOutcome) -> ClusterOutcome:
        """The outcome with the stage times that the scheduler expected."""
        assert self.state is not None
        beliefs, name = self.state.beliefs, cluster.cluster_id
        stages = (replace(s, expected_s=expected_s(beliefs, name, s)) for s in cluster.stages)
        return replace(cluster, stages=tuple(stages))

    def _explained(
        self, plan: Plan, outcome: RoundOutcome, seen: Snapshot, options: PricingOptions
    ) -> RoundOutcome:
        """The outcome with the round times that the measured stages and links explain."""
        assert self.state is not None
        known = links_learned(self.state.links, outcome)
        shown = with_links(self._described(seen.round_index), known)
        clusters = [
            replace(found, explained_s=explained_s(part, found.stages, shown, options))
            if found.measured and found.stages
            else found
            for part, found in zip(plan.clusters, outcome.clusters, strict=True)
        ]
        return replace(outcome, clusters=tuple(clusters))

    def _samples(self, plan: ClusterPlan, told: ClusterTelemetry) -> tuple[LinkSample, ...]:
        return tuple(link_samples(plan, told, paced=self._paced))

    def _snapshot(self, closed: ClosedRound) -> Snapshot:
        names = (*closed.plan.cluster_ids.values(), *closed.joined)
        present = [name for name in names if name in self._known()]
        return self._believed(closed.plan.server_round, present)

    def _believed(self, server_round: int, present: Sequence[str]) -> Snapshot:
        snapshot = self._described(server_round, present)
        return snapshot if self.state is None else with_links(snapshot, self.state.links)

    def _described(self, server_round: int, present: Sequence[str] | None = None) -> Snapshot:
        """The world's snapshot, with the numbers of examples that machines really train on."""
        snapshot = self.world.snapshot(server_round, self._model, present)
        if not self._examples:
            return snapshot
        clusters = (
            replace(c, profile=replace(c.profile, examples=self._examples[name]))
            if (name := c.profile.cluster_id) in self._examples
            else c
            for c in snapshot.clusters
        )
        return replace(snapshot, clusters=tuple(clusters))

    def _known(self) -> set[str]:
        return set(self._clusters.values())


def _ids(profile: ClusterProfile) -> set[str]:
    return {device.device_id for device in profile.devices}


def _left_out(whole: Snapshot, part: Snapshot) -> set[str]:
    left = {cluster.profile.cluster_id for cluster in part.clusters}
    return {cluster.profile.cluster_id for cluster in whole.clusters} - left


def _other_examples(
    plan: Plan, telemetry: Mapping[str, ClusterTelemetry], snapshot: Snapshot
) -> dict[str, int]:
    """Examples per round of machines that take other steps than planned (a user's loader)."""
    profiles = {c.profile.cluster_id: c.profile for c in snapshot.clusters}
    found = {}
    for part in plan.clusters:
        told = telemetry.get(part.cluster_id)
        steps = told.reports[0].steps if told and told.reports else 0  # the control unit's
        batch = part.micro_batch_size * part.micro_batches
        profile = profiles[part.cluster_id]
        if profile.real_links and steps and steps != math.ceil(profile.examples / batch):
            found[part.cluster_id] = steps * batch
    return found


def finished(plan: Plan, closed: ClosedRound) -> Plan:
    """The plans that ended with this round, as each cluster finished it."""
    told = closed.telemetry
    ends = {name: told[name].replanned for name in told if told[name].replanned is not None}
    begun = (*plan.clusters, *closed.joined.values())
    done = (ends.get(c.cluster_id) or c for c in begun if c.cluster_id in closed.models)
    return replace(plan, clusters=tuple(done))


def without_absent(snapshot: Snapshot, absent: Absent) -> Snapshot:
    """The snapshot without absent devices, and without clusters that have no device left."""
    left = [_without(c, absent.get(c.profile.cluster_id, ())) for c in snapshot.clusters]
    return replace(snapshot, clusters=tuple(c for c in left if c.profile.devices))


def without_clusters(snapshot: Snapshot, cluster_ids: Collection[str]) -> Snapshot:
    left = (c for c in snapshot.clusters if c.profile.cluster_id not in cluster_ids)
    return replace(snapshot, clusters=tuple(left))


def _without(cluster: ClusterSnapshot, missing: Collection[str]) -> ClusterSnapshot:
    devices, channel, links = cluster.profile.devices, cluster.channel, cluster.links
    kept = [n for n, device in enumerate(devices) if device.device_id not in missing]
    if len(kept) == len(devices):
        return cluster
    members = [0, *(n + 1 for n in kept)]  # 0 is the control unit
    return replace(
        cluster,
        profile=replace(cluster.profile, devices=tuple(devices[n] for n in kept)),
        channel=ChannelState(
            d2d_gain=_between(channel.d2d_gain, members),
            edge_gain=tuple(channel.edge_gain[i] for i in members),
        ),
        links=links
        and LinkShares(
            d2d=_between(links.d2d, members), edge=tuple(links.edge[i] for i in members)
        ),
    )


def _between(matrix: Matrix, members: Sequence[int]) -> Matrix:
    return tuple(tuple(matrix[i][j] for j in members) for i in members)

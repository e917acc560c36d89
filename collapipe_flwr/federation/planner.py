"""Planned rounds: a scheduler over a world of described clusters, called by the strategy.

Before a round the world gives a snapshot and the scheduler a plan. After it the scheduler learns
the real outcome for the clusters that finished: losses, gradient norms, how far the model moved,
and how long stages and rounds took, what they spent and what links carried. Clusters of machines
measured that (`outcomes`). Simulated ones ran in threads of some machine whose seconds say nothing
about the described boards: their outcome is the plan's price in the world as it truly is, whose
devices may differ from their profiles (`World.truth`). Snapshots hold the estimates of real links,
whatever the policy.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from flwr.app import ArrayRecord

from collapipe_flwr.core.domain import (
    ClusterOutcome,
    ClusterPlan,
    ClusterProfile,
    ModelProfile,
    Plan,
    RoundOutcome,
    Snapshot,
)
from collapipe_flwr.core.errors import DevicesMissing, InfeasibleError
from collapipe_flwr.core.json_codec import from_json, to_json
from collapipe_flwr.costs.measured import explained_s
from collapipe_flwr.costs.price import price, with_rates
from collapipe_flwr.costs.replicas import PricedCluster
from collapipe_flwr.federation.absence import Absence, without_absent
from collapipe_flwr.federation.checkpoint import ComponentState
from collapipe_flwr.federation.outcomes import MovementMeter, measured_outcome
from collapipe_flwr.federation.rounds import ClosedRound, Outcome, RoundPlan
from collapipe_flwr.federation.telemetry import ClusterTelemetry, link_samples
from collapipe_flwr.scheduler.edges import edges_in, on_edges
from collapipe_flwr.scheduler.estimates import expected_s
from collapipe_flwr.scheduler.link_estimates import links_begun, links_learned, with_links
from collapipe_flwr.scheduler.plans import check_trust
from collapipe_flwr.scheduler.protocol import SchedulerState
from collapipe_flwr.simulation.episode import simulated_cluster
from collapipe_flwr.simulation.world import World

if TYPE_CHECKING:
    from collapipe_flwr.federation.planning import Planning

log = logging.getLogger("flwr.collapipe")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    state: SchedulerState | None = None
    absence: Absence = field(default_factory=Absence)
    examples: dict[str, int] = field(default_factory=dict)


class ScheduledRounds:
    """A :class:`RoundPlanner` for described clusters.

    ``clusters`` maps node ids to cluster ids of the ``world``; other nodes are never asked. It may
    change between rounds, when a cluster reconnects as another node. Devices that join a cluster
    get the energy budget of ``planning``.
    """

    def __init__(
        self, planning: Planning, world: World, model: ModelProfile, clusters: Mapping[int, str]
    ) -> None:
        self.state: SchedulerState | None = None
        self._planning, self._scheduler = planning, planning.scheduler
        self.world = world
        self._model = model
        self._clusters = clusters
        self._meter = MovementMeter()
        self._absence = Absence()
        self._before: tuple[int, SchedulerState | None] | None = None  # of a round not settled yet
        self._examples: dict[str, int] = {}  # of a round, where machines trained on others

    def plan(self, server_round: int, nodes: Sequence[int], arrays: ArrayRecord) -> RoundPlan:
        """Let the scheduler plan for the clusters behind ``nodes``; raises ScheduleError.

        If a round is planned again, the plan of the attempt before is forgotten.
        """
        del arrays
        if self._before is not None and self._before[0] == server_round:
            self.state = self._before[1]
        self._before = (server_round, self.state)
        names = {node: self._clusters.get(node, f"node-{node}") for node in nodes}
        known = self._clusters.values()
        plan = self._step(server_round, [name for name in names.values() if name in known])
        return RoundPlan(
            server_round=server_round,
            plan=plan,
            cluster_ids=names,
            binding=True,
            bundles=frozenset(p.cluster_id for p in self.world.clusters if p.bundles),
        )

    def plan_evaluation(
        self, server_round: int, nodes: Sequence[int], arrays: ArrayRecord
    ) -> RoundPlan:
        """Plan for nodes that only evaluate; the scheduler's state stays as it is."""
        before = self.state
        plan = self.plan(server_round, nodes, arrays)
        self.state = before
        return plan

    def _step(self, server_round: int, present: Sequence[str]) -> Plan:
        described = self._described(server_round, present)
        links = links_begun({} if self.state is None else self.state.links, described)
        snapshot = with_links(described, links)
        before = self._scheduler.init(snapshot) if self.state is None else self.state
        self.state = replace(before, links=links)
        asked, missing = _ids(snapshot), self._absence.devices(server_round)
        out = {name: devices for name, devices in missing.items() if name in asked}
        there = without_absent(snapshot, out)
        if snapshot.clusters and not there.clusters:
            self._absence.lift(out)
            raise DevicesMissing("no cluster has a device left: bring one back")
        short = [name for name, devices in out.items() if devices]
        rest = tuple(c for c in there.clusters if c.profile.cluster_id not in short)
        try:
            plan, state = self._scheduler.step(self.state, there)
            # A plan that was kept leaves them out as well, and the others no better than before.
            too_short = plan.fallback and any(plan.cluster(name) is None for name in short)
        except InfeasibleError as error:
            if not short:
                raise
            if not rest:
                self._absence.lift(out)
                raise DevicesMissing(str(error)) from error
            too_short = True
        if too_short and rest:
            log.warning("%s cannot take part without their lost devices", ", ".join(short))
            plan, state = self._scheduler.step(self.state, replace(there, clusters=rest))
        self.state = state
        # Clusters that take no part report nothing: they are tried with all devices next time.
        self._absence.lift([name for name in out if plan.cluster(name) is None])
        known = {c.profile.cluster_id: c.profile for c in snapshot.clusters}
        for each in plan.clusters:  # whatever the policy
            check_trust(each, known[each.cluster_id], self._model.trusted_blocks)
        return with_rates(plan, on_edges(snapshot, edges_in(plan), links))

    def settle(self, closed: ClosedRound) -> Outcome:
        """Price the finished part of the plan, and let the scheduler observe it."""
        assert closed.plan.plan is not None and self.state is not None
        self._before = None
        self.world, after = self._worlds(closed.telemetry)  # it may have ended on newcomers
        done = finished(closed.plan.plan, closed, self.world)
        outcome = Outcome(queues_j=self.state.energy_queue_j)
        if done.clusters:
            outcome = self._observe(done, closed)
        self.world = after
        return outcome

    def _worlds(self, telemetry: Mapping[str, ClusterTelemetry]) -> tuple[World, World]:
        """Return the world with devices that joined since the plan, and that of the next rounds.

        A device that was replaced by another of its name counts as before until the next plan.
        """
        known = {profile.cluster_id: profile for profile in self.world.clusters}
        joined = after = self.world
        for name, measured in telemetry.items():
            if measured.profile is None or name not in known:
                continue
            profile = self._planning.described(measured.profile, self._model)
            if _described(profile) == _described(known[name]):
                continue
            before, now = _devices(known[name]), _devices(measured.profile)
            new = (device for device in profile.devices if device.device_id not in before)
            devices = (*known[name].devices, *new)
            joined = joined.with_cluster(replace(known[name], devices=devices))
            after = after.with_cluster(profile)
            changes = (("joined", now - before), ("left", before - now))
            said = "; ".join(f"{', '.join(sorted(ids))} {how}" for how, ids in changes if ids)
            log.info("cluster %s: %s", name, said or "describes itself in other numbers")
        return joined, after

    def _observe(self, done: Plan, closed: ClosedRound) -> Outcome:
        assert closed.plan.plan is not None and self.state is not None
        known = {c.cluster_id: _devices(c) | _edges(c) for c in self.world.clusters}
        for name, measured in closed.telemetry.items():
            own, part = _of_devices(measured, known.get(name, set())), done.cluster(name)
            self._absence.learn(closed.plan.server_round, name, own, part.edge if part else "")
        self._examples |= _other_examples(done, closed.telemetry, self._snapshot(closed))
        outcome = self._outcome(done, closed)
        asked = (*closed.plan.plan.clusters, *closed.joined.values())
        whole = replace(closed.plan.plan, clusters=asked)
        self.state = self._scheduler.observe(self.state, whole, outcome)
        return Outcome(
            latency_s=outcome.latency_s,
            energy_j={c.cluster_id: c.energy_j for c in outcome.clusters},
            queues_j=self.state.energy_queue_j,
            clusters=outcome.clusters,
        )

    def dump(self) -> ComponentState:
        kept = _Kept(state=self.state, absence=self._absence, examples=self._examples)
        return ComponentState(text=to_json(kept), arrays=self._meter.last)

    def load(self, memory: ComponentState) -> None:
        """Restore from a checkpoint; raises ProtocolError for another's."""
        kept = from_json(_Kept, memory.text or "{}", "the planner's checkpoint")
        self.state, self._absence, self._examples = kept.state, kept.absence, kept.examples
        self._before = None
        self._meter.last = dict(memory.arrays)

    def _outcome(self, plan: Plan, closed: ClosedRound) -> RoundOutcome:
        """Collect what the scheduler may learn from the round."""
        assert self.state is not None
        seen = on_edges(self._snapshot(closed), edges_in(plan), self.state.links)
        truth = self.world.truth(seen)
        parts = zip(
            plan.clusters, price(plan, truth, self._planning.settings).clusters, strict=True
        )
        clusters = [self._cluster(part, priced, closed, seen, truth) for part, priced in parts]
        awaited = [c.latency_s for c in clusters if c.cluster_id not in closed.joined]
        outcome = RoundOutcome(
            round_index=plan.round_index,
            latency_s=max(awaited or [cluster.latency_s for cluster in clusters]),
            clusters=tuple(clusters),
        )
        return self._explained(plan, self._meter.measure(closed, outcome))

    def _cluster(
        self,
        plan: ClusterPlan,
        priced: PricedCluster,
        closed: ClosedRound,
        seen: Snapshot,
        truth: Snapshot,
    ) -> ClusterOutcome:
        """Build the outcome of one cluster, with the stage times that the scheduler expected."""
        assert self.state is not None
        measured, name = closed.telemetry.get(plan.cluster_id), plan.cluster_id
        profile = next(c.profile for c in seen.clusters if c.profile.cluster_id == name)
        if measured is None or not profile.real_links:
            found = simulated_cluster(plan, priced, truth, seen, self._planning.settings)
            noise = measured.gradient_noise if measured else None
            found = replace(found, loss=measured.loss if measured else None, gradient_noise=noise)
        else:
            found = measured_outcome(
                plan,
                priced,
                measured,
                profile,
                seen.model,
                links=tuple(link_samples(plan, measured, paced=self._planning.paced)),
                recompute=self._planning.settings.recompute,
            )
        beliefs = self.state.beliefs
        stages = (replace(s, expected_s=expected_s(beliefs, name, s)) for s in found.stages)
        return replace(found, stages=tuple(stages))

    def _explained(self, plan: Plan, outcome: RoundOutcome) -> RoundOutcome:
        """Add to the outcome the round times that the measured stages and links explain."""
        assert self.state is not None
        known = links_learned(self.state.links, outcome)
        shown = with_links(self._described(outcome.round_index), known)
        shown = on_edges(shown, edges_in(plan), known)
        clusters = [
            replace(
                found, explained_s=explained_s(part, found.stages, shown, self._planning.settings)
            )
            if found.measured and found.stages
            else found
            for part, found in zip(plan.clusters, outcome.clusters, strict=True)
        ]
        return replace(outcome, clusters=tuple(clusters))

    def _snapshot(self, closed: ClosedRound) -> Snapshot:
        names = (*closed.plan.cluster_ids.values(), *closed.joined)
        known = self._clusters.values()
        return self._believed(closed.plan.server_round, [name for name in names if name in known])

    def _believed(self, server_round: int, present: Sequence[str]) -> Snapshot:
        snapshot = self._described(server_round, present)
        return snapshot if self.state is None else with_links(snapshot, self.state.links)

    def _described(self, server_round: int, present: Sequence[str] | None = None) -> Snapshot:
        """Take the world's snapshot, with the numbers of examples that machines really train on."""
        snapshot = self.world.snapshot(server_round, self._model, present)
        clusters = (
            replace(c, profile=replace(c.profile, examples=self._examples[name]))
            if (name := c.profile.cluster_id) in self._examples
            else c
            for c in snapshot.clusters
        )
        return replace(snapshot, clusters=tuple(clusters))


def _devices(profile: ClusterProfile) -> set[str]:
    return {device.device_id for device in profile.devices}


def _edges(profile: ClusterProfile) -> set[str]:
    return {edge.id for edge in profile.edges}


def _of_devices(measured: ClusterTelemetry, known: set[str]) -> ClusterTelemetry:
    """Drop devices that the cluster does not have from the telemetry: they would pile up."""
    return replace(
        measured,
        absent=tuple(name for name in measured.absent if name in known),
        quarantined={name: why for name, why in measured.quarantined.items() if name in known},
    )


def _described(profile: ClusterProfile) -> ClusterProfile:
    """Clear the budgets and examples of the profile, which are set or counted elsewhere."""
    described = profile.with_members(lambda member: replace(member, energy_budget_j=0.0))
    return replace(described, examples=0)


def _ids(snapshot: Snapshot) -> set[str]:
    return {cluster.profile.cluster_id for cluster in snapshot.clusters}


def _other_examples(
    plan: Plan, telemetry: Mapping[str, ClusterTelemetry], snapshot: Snapshot
) -> dict[str, int]:
    """Examples per round of machines that take other steps than planned (a user's loader)."""
    profiles = {c.profile.cluster_id: c.profile for c in snapshot.clusters}
    found = {}
    for part in plan.clusters:
        measured = telemetry.get(part.cluster_id)
        reports = (measured.reports[0], measured.edge) if measured and measured.reports else ()
        steps = min((report.steps for report in reports if report is not None), default=0)
        batch = part.micro_batch_size * part.micro_batches
        profile = profiles[part.cluster_id]
        if profile.real_links and steps and steps != math.ceil(profile.examples / batch):
            found[part.cluster_id] = steps * batch
    return found


def finished(plan: Plan, closed: ClosedRound, world: World) -> Plan:
    """Return the plans that ended with this round, as each cluster finished it.

    A plan with parties that the world lacks has no price: that cluster counts as it began.
    """
    known = {c.cluster_id: (_devices(c), _edges(c) or {""}) for c in world.clusters}
    ends = {
        name: last
        for name, measured in closed.telemetry.items()
        if (last := measured.replanned) and name in known
        if known[name][0].issuperset(last.device_ids) and last.edge in known[name][1]
    }
    begun = (*plan.clusters, *closed.joined.values())
    done = (ends.get(c.cluster_id, c) for c in begun if c.cluster_id in closed.models)
    return replace(plan, clusters=tuple(done))

"""The loop of rounds around a scheduler: plan a snapshot, learn from what the round cost.

Federation and simulation run the same loop. A snapshot goes in with everything that earlier rounds
taught about links, absent devices and numbers of examples, and a plan comes out. After the round
the plan as each cluster finished it and what clusters measured go in, and the outcome, from which
the scheduler has learnt, comes out. Clusters of machines measured that outcome; that of simulated
ones is the price of the plan in the world as it truly is (`scheduler.outcomes`).

**Devices that plans do without.** A control unit reports at the end of a round which of its devices
do not answer. They are left out of snapshots until it reports them back, so a device that returns
takes part one round later. A device that answered but was at fault (`cluster.suspects`) would be at
fault again in the next round, at the price of a replay. It is left out of the next plans, of twice
as many after every further offence, and then tried again. One that an audit found is left out of
`MOST_ROUNDS` at once. To die is an offence, too: a device that dies of the work itself, as for want
of memory, is back by the end of the round. The first time it goes unpunished, for most that die are
only started again.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from collapipe_flwr.core.domain import (
    ClusterPlan,
    ClusterProfile,
    ClusterSnapshot,
    Plan,
    Snapshot,
)
from collapipe_flwr.core.errors import DevicesMissing, InfeasibleError
from collapipe_flwr.core.measurements import ClusterMeasurement
from collapipe_flwr.core.outcome import ClusterOutcome, Movement, RoundOutcome
from collapipe_flwr.costs.measured import explain_latency_s
from collapipe_flwr.costs.price import price, set_planned_rates
from collapipe_flwr.costs.replicas import PricedCluster
from collapipe_flwr.costs.work import PricingOptions
from collapipe_flwr.scheduler.edges import choose_edges, map_edges
from collapipe_flwr.scheduler.estimates import expect_s
from collapipe_flwr.scheduler.link_estimates import (
    LinkEstimates,
    apply_links,
    begin_links,
    learn_links,
)
from collapipe_flwr.scheduler.outcomes import measure_outcome, sample_links, simulate_cluster
from collapipe_flwr.scheduler.plans import check_privacy
from collapipe_flwr.scheduler.protocol import Scheduler, SchedulerState

log = logging.getLogger("flwr.collapipe")
Measured = Mapping[str, ClusterMeasurement]  # by cluster
FIRST_ROUNDS, MOST_ROUNDS = 2, 64
Absent = Mapping[str, Collection[str]]  # device ids by cluster id


@dataclass(frozen=True, slots=True, kw_only=True)
class Quarantine:
    """A device that is left out up to round ``until``, after this number of ``offences``.

    One that is ``untrue`` was found by an audit.
    """

    until: int
    offences: int = 1
    untrue: bool = False


@dataclass(slots=True)
class Absence:
    """The devices that do not answer, and those in quarantine, by cluster."""

    absent: dict[str, tuple[str, ...]] = field(default_factory=dict)
    quarantines: dict[str, dict[str, Quarantine]] = field(default_factory=dict)

    def list_devices(self, server_round: int) -> dict[str, tuple[str, ...]]:
        """List the devices that are left out of a round, by cluster."""
        found = dict(self.absent)
        for name, quarantines in self.quarantines.items():
            held = tuple(
                d for d, quarantine in quarantines.items() if quarantine.until >= server_round
            )
            found[name] = (*found.get(name, ()), *held)
        return found

    def learn(
        self, server_round: int, cluster_id: str, measured: ClusterMeasurement, edge: str = ""
    ) -> None:
        """Record absences and offences that a cluster reports, and devices that worked.

        The cluster's last ``edge`` counts as having worked.
        """
        self.absent[cluster_id] = measured.absent
        found = self.quarantines.setdefault(cluster_id, {})
        reasons = {**dict.fromkeys(measured.lost, "it died again"), **measured.quarantined}
        for name in (edge, *(report.name for report in measured.reports)):
            if name not in reasons:
                found.pop(name, None)
        for device_id, why in reasons.items():
            offences = found[device_id].offences + 1 if device_id in found else 1
            rounds = min(FIRST_ROUNDS * 2 ** min(offences - 1, 30), MOST_ROUNDS)
            if offences == 1 and device_id not in measured.quarantined:
                rounds = 0
            if untrue := device_id in measured.untrue:
                rounds = MOST_ROUNDS
            until = server_round + rounds
            found[device_id] = Quarantine(until=until, offences=offences, untrue=untrue)
            if not rounds:
                continue
            log.warning(
                "%s is quarantined, and planned with again in round %d: %s",
                device_id,
                server_round + rounds + 1,
                why,
            )

    def lift(self, cluster_ids: Collection[str]) -> None:
        """Use all devices of these clusters next time: without them they cannot take part.

        Those that an audit found stay out.
        """
        for name in cluster_ids:
            self.absent.pop(name, None)
            for device_id, quarantine in self.quarantines.get(name, {}).items():
                if not quarantine.untrue:
                    self.quarantines[name][device_id] = replace(quarantine, until=0)


def drop_absent(snapshot: Snapshot, absent: Absent) -> Snapshot:
    """Remove absent devices, and clusters that have no device left, from the snapshot.

    Absent edges are removed too, where a cluster has another.
    """
    left = [_drop_missing(c, absent.get(c.profile.cluster_id, ())) for c in snapshot.clusters]
    return replace(snapshot, clusters=tuple(c for c in left if c.profile.can_train))


def _drop_missing(cluster: ClusterSnapshot, missing: Collection[str]) -> ClusterSnapshot:
    profile = cluster.profile
    edges = [e for e in profile.edges if not {e.id, e.device_id}.intersection(missing)]
    if edges and len(edges) < len(profile.edges):
        one, *others = edges
        profile = replace(profile, edge=one, other_edges=tuple(others))
        cluster = replace(cluster, profile=profile)
    return cluster.without(missing)


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerState:
    """What a controller knows between rounds; fields are named as in checkpoints.

    ``examples`` are those of a round, of clusters of machines that train on others than they said.
    """

    state: SchedulerState | None = None
    absence: Absence = field(default_factory=Absence)
    examples: Mapping[str, int] = field(default_factory=dict)


class RoundController:
    """Plans rounds with a scheduler and teaches it; ``memory`` is all that it remembers.

    ``options`` are those by which finished plans are priced. ``paced`` says that senders keep to
    planned rates. With ``leaves_out``, clusters that cannot be planned sit out; else they are an
    error.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        options: PricingOptions,
        *,
        paced: bool = False,
        leaves_out: bool = False,
    ) -> None:
        self.memory = ControllerState()
        self._scheduler, self._options, self._paced = scheduler, options, paced
        self._leaves_out = leaves_out
        self._before: tuple[int, SchedulerState | None] | None = None  # of an open round

    @property
    def state(self) -> SchedulerState:
        """The scheduler's state, which exists from the first plan on."""
        assert self.memory.state is not None
        return self.memory.state

    def forget(self, memory: ControllerState | None = None) -> None:
        """Start again, or from the memory of a checkpoint."""
        self.memory, self._before = memory or ControllerState(), None

    def look_ahead(self, snapshot: Snapshot) -> Plan:
        """Plan without a round to follow: the scheduler's state stays as it is."""
        before = self.memory.state
        plan = self.plan(snapshot)
        self._remember(before)
        return plan

    def plan(self, snapshot: Snapshot) -> Plan:
        """Plan a round; if it is planned again, the plan of the attempt before is forgotten.

        Raises ScheduleError, DevicesMissing where lost devices are the reason.
        """
        if self._before is not None and self._before[0] == snapshot.round_index:
            self._remember(self._before[1])
        self._before = (snapshot.round_index, self.memory.state)
        described = self._set_examples(snapshot)
        known = self.memory.state
        links = begin_links({} if known is None else known.links, described)
        snapshot = apply_links(described, links)
        plan = self._plan_present(snapshot, links)
        profiles = _index_profiles(snapshot)
        for each in plan.clusters:  # whatever the policy
            check_privacy(each, profiles[each.cluster_id])
        return set_planned_rates(plan, choose_edges(snapshot, map_edges(plan), links))

    def _plan_present(self, snapshot: Snapshot, links: LinkEstimates) -> Plan:
        """Plan without absent devices, and without the clusters that cannot be planned then."""
        absence, known = self.memory.absence, self.memory.state
        missing = absence.list_devices(snapshot.round_index)
        out = {
            name: devices for name, devices in missing.items() if name in _index_profiles(snapshot)
        }
        there = drop_absent(snapshot, out)
        if snapshot.clusters and not there.clusters:
            absence.lift(out)
            raise DevicesMissing("no device is reachable; restart one")
        gone = _index_profiles(snapshot).keys() - _index_profiles(there).keys()
        left_out = dict.fromkeys(sorted(gone), "none of its devices is reachable")
        while True:
            state = self._scheduler.init(there) if known is None else known
            state = replace(state, links=links)
            try:
                plan, state = self._scheduler.step(state, there)
                break
            except InfeasibleError as error:
                refused = self._refuse(error, state, there) if self._leaves_out else {}
                if len(refused) in (0, len(there.clusters)):
                    if not any(out.values()):
                        raise
                    absence.lift(out)
                    raise DevicesMissing(str(error)) from error
            rest = (c for c in there.clusters if c.profile.cluster_id not in refused)
            there = replace(there, clusters=tuple(rest))
            for name, why in refused.items():
                lost = f"without {', '.join(out[name])}: " if out.get(name) else ""
                left_out[name] = f"{lost}{why}"
        self._remember(state)
        # Clusters that take no part report nothing: they are tried with all devices next time.
        absence.lift([name for name in out if plan.find_cluster(name) is None])
        return replace(plan, left_out=left_out)

    def _refuse(
        self, error: InfeasibleError, state: SchedulerState, snapshot: Snapshot
    ) -> dict[str, str]:
        """Choose the clusters to plan without, and say why.

        These are the ones without a plan even alone; if there are none, those that had no plan
        before, so that the others keep theirs.
        """
        refused, last = {}, state.last_plan
        named = [
            cluster
            for cluster in snapshot.clusters
            if not error.clusters or cluster.profile.cluster_id in error.clusters
        ]
        for cluster in named:
            try:
                self._scheduler.step(state, replace(snapshot, clusters=(cluster,)))
            except InfeasibleError as alone:
                refused[cluster.profile.cluster_id] = str(alone)
        names = (cluster.profile.cluster_id for cluster in named)
        new = [name for name in names if last is None or last.find_cluster(name) is None]
        return refused or dict.fromkeys(new, f"it has no plan beside the others: {error}")

    def learn(
        self,
        asked: Plan,
        done: Plan,
        snapshot: Snapshot,
        truth: Snapshot,
        measured: Measured | None = None,
        *,
        late: Collection[str] = (),
        movement: Movement | None = None,
    ) -> RoundOutcome:
        """Compute the outcome of a round and let the scheduler observe it.

        ``done`` holds the plans with which clusters finished, of those that were ``asked``. The
        ``snapshot`` is as plans knew it, ``truth`` as it really was; the same object where both
        agree. The round did not wait for clusters that are ``late``: their plans are older.
        """
        measured, self._before = measured or {}, None
        edges = map_edges(done)
        for name, profile in _index_profiles(snapshot).items():
            if name in measured:
                told = _drop_strangers(measured[name], profile)
                self.memory.absence.learn(snapshot.round_index, name, told, edges.get(name, ""))
        found = _count_examples(done, measured, self._set_examples(snapshot))
        examples = {**self.memory.examples, **found}
        self.memory = replace(self.memory, examples=examples)
        seen = self._apply_knowledge(snapshot, done, self.state.links)
        true = seen if truth is snapshot else self._apply_knowledge(truth, done, self.state.links)
        known, real = _index_profiles(seen), _index_profiles(true)
        priced = price(done, true, self._options).clusters
        clusters = tuple(
            self._add_expected(
                self._simulate(part, cost, measured.get(name), real[name], seen, true)
                if name not in measured or not known[name].real_links
                else self._measure(part, cost, measured[name], known[name], seen)
            )
            for part, cost in zip(done.clusters, priced, strict=True)
            for name in (part.cluster_id,)
        )
        awaited = [c.latency_s for c in clusters if c.cluster_id not in late]
        outcome = RoundOutcome(
            round_index=done.round_index,
            latency_s=max(awaited or [cluster.latency_s for cluster in clusters]),
            clusters=clusters,
            movement=movement or Movement(),
        )
        outcome = self._explain(done, outcome, snapshot)
        self._remember(self._scheduler.observe(self.state, asked, outcome))
        return replace(outcome, queues_j=self.state.energy_queue_j)

    def _simulate(
        self,
        plan: ClusterPlan,
        priced: PricedCluster,
        measured: ClusterMeasurement | None,
        profile: ClusterProfile,
        seen: Snapshot,
        truth: Snapshot,
    ) -> ClusterOutcome:
        """Compute the outcome of a described cluster, which has a loss if it trained."""
        found = simulate_cluster(plan, priced, profile, truth, seen, self._options)
        if measured is None:
            return found
        return replace(found, loss=measured.loss, gradient_noise=measured.gradient_noise)

    def _measure(
        self,
        plan: ClusterPlan,
        priced: PricedCluster,
        measured: ClusterMeasurement,
        profile: ClusterProfile,
        seen: Snapshot,
    ) -> ClusterOutcome:
        """Compute the outcome of a cluster of machines."""
        links = tuple(sample_links(plan, measured, paced=self._paced))
        return measure_outcome(
            plan, priced, measured, profile, seen.find_model(profile), links=links
        )

    def _add_expected(self, found: ClusterOutcome) -> ClusterOutcome:
        """Add the stage times that the scheduler expected to the outcome."""
        beliefs, name = self.state.beliefs, found.cluster_id
        stages = (replace(s, expected_s=expect_s(beliefs, name, s)) for s in found.stages)
        return replace(found, stages=tuple(stages))

    def _explain(self, plan: Plan, outcome: RoundOutcome, snapshot: Snapshot) -> RoundOutcome:
        """Add the round times that the measured stages and links explain."""
        if not any(found.measured and found.stages for found in outcome.clusters):
            return outcome
        links = learn_links(self.state.links, outcome)
        shown = self._apply_knowledge(snapshot, plan, links)
        clusters = (
            replace(found, explained_s=explain_latency_s(part, found.stages, shown, self._options))
            if found.measured and found.stages
            else found
            for part, found in zip(plan.clusters, outcome.clusters, strict=True)
        )
        return replace(outcome, clusters=tuple(clusters))

    def _apply_knowledge(self, snapshot: Snapshot, plan: Plan, links: LinkEstimates) -> Snapshot:
        """Return the snapshot with what is known of it, and every cluster on its planned edge."""
        known = apply_links(self._set_examples(snapshot), links)
        return choose_edges(known, map_edges(plan), links)

    def _set_examples(self, snapshot: Snapshot) -> Snapshot:
        """Return the snapshot with the numbers of examples that machines really train on."""
        known = self.memory.examples
        if not known.keys() & _index_profiles(snapshot).keys():
            return snapshot

        def counted(cluster: ClusterSnapshot) -> ClusterSnapshot:
            profile = cluster.profile
            examples = known.get(profile.cluster_id, profile.examples)
            return replace(cluster, profile=replace(profile, examples=examples))

        return replace(snapshot, clusters=tuple(map(counted, snapshot.clusters)))

    def _remember(self, state: SchedulerState | None) -> None:
        self.memory = replace(self.memory, state=state)


def _index_profiles(snapshot: Snapshot) -> dict[str, ClusterProfile]:
    return {cluster.profile.cluster_id: cluster.profile for cluster in snapshot.clusters}


def _drop_strangers(measured: ClusterMeasurement, profile: ClusterProfile) -> ClusterMeasurement:
    """Drop devices that the cluster does not have from the measurement: they would pile up."""
    known = {d.device_id for d in profile.devices} | {edge.id for edge in profile.edges}
    return replace(
        measured,
        absent=tuple(name for name in measured.absent if name in known),
        quarantined={name: why for name, why in measured.quarantined.items() if name in known},
    )


def _count_examples(done: Plan, measured: Measured, snapshot: Snapshot) -> dict[str, int]:
    """Count the examples of machines that took other steps than planned (a user's loader)."""
    profiles, found = _index_profiles(snapshot), {}
    for part in done.clusters:
        told = measured.get(part.cluster_id)
        reports = (told.reports[0], told.edge) if told and told.reports else ()
        steps = min((report.steps for report in reports if report is not None), default=0)
        batch = part.micro_batch_size * part.micro_batches
        profile = profiles[part.cluster_id]
        if profile.real_links and steps and steps != math.ceil(profile.examples / batch):
            found[part.cluster_id] = steps * batch
    return found

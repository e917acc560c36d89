"""The planners of a run, whose clusters are known or describe themselves.

A planner keeps the world of the clusters behind Flower's nodes and hands its snapshots to a
`RoundController`. A node without a known description is queried before its first round; a node that
does not answer is not planned for. Without a model to split, clients train whole models in their
own processes, and there is nothing to plan.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

from flwr.serverapp import Grid

from collapipe_flwr.cluster.order import LearningSettings
from collapipe_flwr.core.domain import (
    ClusterProfile,
    ModelProfile,
    Plan,
    Snapshot,
)
from collapipe_flwr.core.errors import ConfigError, RunError
from collapipe_flwr.core.json_codec import from_json, to_json
from collapipe_flwr.core.measurements import CacheUse, ClusterMeasurement
from collapipe_flwr.core.outcome import (
    ClusterOutcome,
    RoundOutcome,
    Spared,
)
from collapipe_flwr.costs.work import NOTHING
from collapipe_flwr.federation.checkpoint import ComponentState
from collapipe_flwr.federation.hook_options import WITHOUT_MODEL
from collapipe_flwr.federation.members import NO_CLUSTER, Newcomers, find_namesakes
from collapipe_flwr.federation.planning import Planning
from collapipe_flwr.federation.products import with_rank
from collapipe_flwr.federation.round import ClosedRound, RoundPlan
from collapipe_flwr.models.any_splitter import DescribedModel
from collapipe_flwr.models.profile import StateBytes, profile_model
from collapipe_flwr.scheduler.base import Policy
from collapipe_flwr.scheduler.controller import ControllerState, RoundController
from collapipe_flwr.scheduler.protocol import Scheduler
from collapipe_flwr.scheduler.ranks import choose_ranks
from collapipe_flwr.simulation.world import (
    World,
    make_world,
)

log = logging.getLogger("flwr.collapipe")
DESCRIBE_S = 300.0  # for nodes to describe their clusters: a weak board imports for minutes
RankProfile = Callable[[int, str], ModelProfile]  # of a rank, which this cluster has
_UNKNOWN = ModelProfile(embedding=NOTHING, blocks=(), decoder=NOTHING)


@runtime_checkable
class RoundPlanner(Protocol):
    """Plans a round, and learns from its result."""

    def plan(self, server_round: int, nodes: Sequence[int]) -> RoundPlan:
        """Return the plan for ``nodes``; raises ScheduleError if there is none."""

    def settle(self, closed: ClosedRound) -> RoundOutcome:
        """Price the round, and update queues and estimates."""


class KnownClusters:
    """A :class:`RoundPlanner` for the clusters of a ``world``.

    ``clusters`` maps node ids to cluster ids; other nodes are never asked. It may change between
    rounds, when a cluster reconnects as another node. Devices that join a cluster get the energy
    budget of ``planning``. ``of_rank`` profiles the model with adapters of a cluster's own rank.
    """

    def __init__(
        self,
        planning: Planning,
        world: World,
        model: ModelProfile,
        clusters: Mapping[int, str],
        of_rank: RankProfile | None = None,
    ) -> None:
        self.world = world
        self.controller = RoundController(
            planning.scheduler, planning.settings, paced=planning.paced, leaves_out=True
        )
        self._planning = planning
        self._model = model
        self._clusters = clusters
        self._kept: dict[str, float] = {}  # share of the next round's visits, see `CacheUse`
        self._of_rank = of_rank
        self._ranks: dict[str, int] = {}  # that were chosen, by cluster

    def plan(self, server_round: int, nodes: Sequence[int]) -> RoundPlan:
        """Plan for the clusters behind ``nodes``; raises ScheduleError."""
        return self._plan(server_round, nodes, self.controller.plan)

    def plan_evaluation(self, server_round: int, nodes: Sequence[int]) -> RoundPlan:
        """Plan for nodes that only evaluate; the scheduler's state stays as it is."""
        return self._plan(server_round, nodes, self.controller.look_ahead)

    def _plan(
        self, server_round: int, nodes: Sequence[int], decide: Callable[[Snapshot], Plan]
    ) -> RoundPlan:
        names = {node: self._clusters.get(node, f"node-{node}") for node in nodes}
        self._choose_ranks(server_round, names.values())
        snapshot = self._snapshot(server_round, names.values())
        plan = decide(snapshot)
        for name, why in plan.left_out.items():
            log.warning("cluster %s sits out round %d: %s", name, server_round, why)
        return RoundPlan(
            server_round=server_round,
            plan=plan,
            cluster_ids=names,
            left_out=plan.left_out,
            bundles=frozenset(p.cluster_id for p in self.world.clusters if p.bundles),
            ranks={c.profile.cluster_id: c.profile.lora_rank for c in snapshot.clusters},
        )

    def _choose_ranks(self, server_round: int, names: Collection[str]) -> None:
        """Choose the ranks of clusters as soon as one has none yet; raises ScheduleError."""
        free = {
            profile.cluster_id: profile.budgets_j
            for profile in self.world.clusters
            if profile.cluster_id in names and not profile.lora_rank
        }
        if not self._planning.ranks or free.keys() <= self._ranks.keys():
            return

        def decide(ranks: Mapping[str, int]) -> Plan:
            return self.controller.look_ahead(self._snapshot(server_round, names, ranks))

        chosen = choose_ranks(decide, free, self._planning.ranks)
        self._ranks |= chosen
        for name, rank in chosen.items():
            log.info("cluster %s trains adapters of rank %d", name, rank)

    def settle(self, closed: ClosedRound) -> RoundOutcome:
        """Let the controller learn from the finished part of the plan."""
        asked, names = closed.plan.plan, closed.plan.cluster_ids.values()
        assert asked is not None
        self.world, after = self._worlds(closed.telemetry)  # it may have ended on newcomers
        done = finished(asked, closed, self.world)
        outcome = RoundOutcome(queues_j=self.controller.state.energy_queue_j)
        if done.clusters:
            snapshot = self._snapshot(closed.plan.server_round, (*names, *closed.joined))
            outcome = self.controller.learn(
                replace(asked, clusters=(*asked.clusters, *closed.joined.values())),
                done,
                snapshot,
                self.world.truth(snapshot),
                closed.telemetry,
                late=closed.joined,
                movement=closed.movement,
            )
            spared = {c.cluster_id: self._spared(c, closed.telemetry) for c in outcome.clusters}
            outcome = replace(outcome, spared={n: s for n, s in spared.items() if s.visits})
        self.world = after
        self._kept |= {name: measured.kept_share for name, measured in closed.telemetry.items()}
        return outcome

    def _spared(
        self, outcome: ClusterOutcome, telemetry: Mapping[str, ClusterMeasurement]
    ) -> Spared:
        """Price what a control unit did not compute again, as its other work in this round."""
        name = outcome.cluster_id
        use = telemetry[name].cache if name in telemetry else CacheUse()
        unit = next(c.control_unit for c in self.world.clusters if c.cluster_id == name)
        each_s = self._model.embedding.forward_flop / unit.speed_flop_per_s
        seconds = use.spared_s if outcome.measured else use.hits * each_s
        return Spared(
            hits=use.hits,
            visits=use.visits,
            seconds=seconds,
            joules=seconds * unit.speed_flop_per_s * unit.energy_per_flop_j,
        )

    def _worlds(self, telemetry: Mapping[str, ClusterMeasurement]) -> tuple[World, World]:
        """Return the world with devices that joined since the plan, and that of the next rounds.

        A device that was replaced by another of its name counts as before until the next plan.
        """
        known = {profile.cluster_id: profile for profile in self.world.clusters}
        joined = after = self.world
        for name, measured in telemetry.items():
            if measured.profile is None or name not in known:
                continue
            profile = self._planning.described(measured.profile, self._model)
            if _without_budgets(profile) == _without_budgets(known[name]):
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

    def dump(self) -> ComponentState:
        return ComponentState(text=to_json(self.controller.memory))

    def load(self, memory: ComponentState) -> None:
        """Restore from a checkpoint; raises ProtocolError for another's."""
        text = memory.text or "{}"
        self.controller.forget(from_json(ControllerState, text, "the planner's checkpoint"))

    def _snapshot(
        self,
        server_round: int,
        names: Collection[str],
        ranks: Mapping[str, int] | None = None,
    ) -> Snapshot:
        """Return the round's snapshot; clusters without a rank have that of ``ranks``, if any."""
        world, known = self.world, set(self._clusters.values())
        if ranks := self._ranks if ranks is None else ranks:
            world = replace(world, clusters=tuple(_with_rank(p, ranks) for p in world.clusters))
        present = [name for name in names if name in known]
        # The cluster with least in its cache decides when the round is over.
        kept = min((self._kept.get(name, 0.0) for name in present), default=0.0)
        models = {
            profile.lora_rank: _spare(self._of_rank(profile.lora_rank, profile.cluster_id), kept)
            for profile in world.clusters
            if self._of_rank is not None and profile.lora_rank and profile.cluster_id in present
        }
        return world.snapshot(server_round, _spare(self._model, kept), present, models)


class DescribedClusters(KnownClusters):
    """A :class:`RoundPlanner` that asks unknown nodes for their descriptions first."""

    def __init__(
        self,
        planning: Planning,
        model: Callable[[], ModelProfile],
        of_rank: RankProfile | None = None,
    ) -> None:
        self._profiled = model
        self._names: dict[int, str] = {}  # by node
        self._newcomers: Newcomers | None = None
        world = make_world(cluster_devices=(), examples=())
        super().__init__(planning, world, _UNKNOWN, self._names, of_rank)

    def query_unknown(self, grid: Grid, nodes: Sequence[int]) -> bool:
        """Query unknown nodes; returns whether any of ``nodes`` has described a cluster.

        If no cluster is known yet, the other nodes are queried as well. Raises RunError if there is
        none.
        """
        self._query(grid, nodes)
        if not self._names:
            everyone = list(grid.get_node_ids())
            self._query(grid, [node for node in everyone if node not in nodes])
            if not self._names:
                faults = self._newcomers.faults.values() if self._newcomers else ()
                why = next(map(str, faults), f"{NO_CLUSTER}, and look into the clients' logs")
                raise RunError(
                    f"none of {len({*nodes, *everyone})} nodes describes a cluster: {why}"
                )
        return any(node in self._names for node in nodes)

    def _query(self, grid: Grid, nodes: Sequence[int]) -> None:
        unknown = [node for node in nodes if node not in self._names]
        if not unknown:
            return
        self._newcomers = self._newcomers or Newcomers(grid, DESCRIBE_S)
        answers = self._newcomers.profiles(unknown)
        listed = set(grid.get_node_ids())
        others = find_namesakes(answers, {n: c for n, c in self._names.items() if n in listed})
        for error in others.values():
            log.warning("%s; it takes part when the first one is gone", error)
        self._register({n: p for n, p in sorted(answers.items()) if p and n not in others})

    def _register(self, found: Mapping[int, ClusterProfile]) -> None:
        """Place the clusters of new nodes; a cluster may be back as another node.

        One that is back counts as it describes itself now. Those that were there keep their places.
        """
        world, new = self.world, dict[str, ClusterProfile]()
        known = {profile.cluster_id for profile in world.clusters}
        for node, profile in found.items():
            name = profile.cluster_id
            for before in [n for n, cluster in self._names.items() if cluster == name]:
                del self._names[before]
            self._names[node] = name
            if name in known:
                world = world.with_cluster(self._planning.described(profile, self._model))
            else:
                new[name] = profile
        if new:
            self._model = self._model if world.clusters else self._profiled()
            profiles = {profile.cluster_id: profile for profile in world.clusters} | new
            placed = self._planning.world(
                [profiles[name] for name in sorted(profiles)], self._model
            )
            world = placed.with_places(world.placements)
        self.world = world


@dataclass(frozen=True, slots=True)
class Unplanned:
    """A :class:`RoundPlanner` of rounds in which all clients train whole models.

    ``clusters`` are the names of nodes; others are called after their number.
    """

    clusters: Mapping[int, str] = field(default_factory=dict)

    def plan(self, server_round: int, nodes: Sequence[int]) -> RoundPlan:
        names = {node: self.clusters.get(node, f"node-{node}") for node in nodes}
        return RoundPlan(server_round=server_round, plan=None, cluster_ids=names)

    def settle(self, closed: ClosedRound) -> RoundOutcome:
        del closed
        return RoundOutcome()


def planner_of(
    scheduler: str | Scheduler | Planning | RoundPlanner | None,
    model: DescribedModel | None,
    learning: Callable[[int], LearningSettings],
    edge_address: str = "",
) -> RoundPlanner:
    """Choose the planner of a run; raises ConfigError for an unknown name.

    That is ``scheduler`` itself if it is one; with a ``model``, one for clusters that describe
    themselves.
    """
    if isinstance(scheduler, RoundPlanner):
        return scheduler
    if not isinstance(scheduler, str | Scheduler | Planning | None):
        raise ConfigError(
            f"scheduler must be the name of a policy, a Scheduler or a Planning, got {scheduler!r}"
        )
    if model is None:
        if scheduler is not None:
            raise ConfigError(WITHOUT_MODEL.format("scheduler"))
        return Unplanned()
    if isinstance(scheduler, Planning):
        planning = scheduler
    else:
        planning = Planning(policy=scheduler or "dssda")
        if isinstance(scheduler, Policy):
            planning = replace(planning, settings=scheduler.settings)
    if model.batch_size is not None:
        planning = planning.for_batches(model.batch_size, cut=not model.splitter.whole_batches)
    first = learning(1)
    if first.execution.recompute:
        planning = planning.recomputing()
    if first.labels_at_home:
        planning = replace(planning, labels_at_home=True)
    if first.trusted_blocks:
        planning = replace(planning, trusted_blocks=first.trusted_blocks)
    planning = replace(planning, updates=first.updates)
    if edge_address:
        planning = replace(planning, edge_address=edge_address)
    return DescribedClusters(
        planning,
        lambda: planning.check(
            profile_model(model.splitter, model.shape, first.optimizer.state_bytes)
        ),
        profile_ranks(model, first.optimizer.state_bytes),
    )


def profile_ranks(model: DescribedModel, state_bytes: StateBytes) -> RankProfile:
    """Return what profiles the model with adapters of a rank, once; raises ConfigError."""
    known: dict[int, ModelProfile] = {}

    def profile(rank: int, cluster_id: str) -> ModelProfile:
        if rank not in known:
            splitter = with_rank(model, rank, cluster_id).splitter
            known[rank] = profile_model(splitter, model.shape, state_bytes)
        return known[rank]

    return profile


def _with_rank(profile: ClusterProfile, ranks: Mapping[str, int]) -> ClusterProfile:
    rank = profile.lora_rank or ranks.get(profile.cluster_id, 0)
    return replace(profile, lora_rank=rank)


def _spare(model: ModelProfile, kept: float) -> ModelProfile:
    """Return the costs of a model whose first part is computed already for a share of visits."""
    first = model.embedding
    return replace(model, embedding=replace(first, forward_flop=(1.0 - kept) * first.forward_flop))


def _devices(profile: ClusterProfile) -> set[str]:
    return {device.device_id for device in profile.devices}


def _without_budgets(profile: ClusterProfile) -> ClusterProfile:
    """Clear the budgets and examples of the profile, which are set or counted elsewhere."""
    described = profile.with_members(lambda member: replace(member, energy_budget_j=0.0))
    return replace(described, examples=0)


def finished(plan: Plan, closed: ClosedRound, world: World) -> Plan:
    """Return the plans that ended with this round, as each cluster finished it.

    A plan with parties that the world lacks has no price: that cluster counts as it began.
    """
    devices = {c.cluster_id: _devices(c) for c in world.clusters}
    edges = {c.cluster_id: {edge.id for edge in c.edges} or {""} for c in world.clusters}
    ends = {
        name: last
        for name, measured in closed.telemetry.items()
        if (last := measured.replanned) and name in devices
        if devices[name].issuperset(last.device_ids) and last.edge in edges[name]
    }
    begun = (*plan.clusters, *closed.joined.values())
    done = (ends.get(c.cluster_id, c) for c in begun if c.cluster_id in closed.models)
    return replace(plan, clusters=tuple(done))

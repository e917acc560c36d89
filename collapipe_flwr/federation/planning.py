"""How rounds are planned: for clusters that describe themselves, and for clients that do not.

A node without a known description is queried before its first round; a node that does not answer is
not planned for. Without a model to split, clients train whole models in their own processes: their
plans are one block (the whole model) on one assumed machine each, and advice only. No client is
left out because of them, and nothing is priced after the round.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from flwr.app import ArrayRecord
from flwr.serverapp import Grid

from collapipe_flwr.cluster.order import LearningSettings
from collapipe_flwr.core.domain import BlockCost, ClusterProfile, ModelProfile
from collapipe_flwr.core.errors import ConfigError, RunError
from collapipe_flwr.core.json_codec import from_json, to_json
from collapipe_flwr.federation.checkpoint import ComponentState
from collapipe_flwr.federation.members import NO_CLUSTER, Newcomers, check_names
from collapipe_flwr.federation.planner import ScheduledRounds
from collapipe_flwr.federation.records import array_bytes
from collapipe_flwr.federation.rounds import ClosedRound, Outcome, RoundPlan, RoundPlanner
from collapipe_flwr.models.any_splitter import DescribedModel
from collapipe_flwr.models.profile import profile_model
from collapipe_flwr.scheduler.base import Policy
from collapipe_flwr.scheduler.edges import with_divided_memory
from collapipe_flwr.scheduler.policies import make_scheduler
from collapipe_flwr.scheduler.protocol import Scheduler, SchedulerConfig
from collapipe_flwr.simulation.world import (
    EnergyBudget,
    World,
    budgeted,
    make_world,
    with_edge_at_home,
)

log = logging.getLogger("flwr.collapipe")
MOST_MICRO_BATCHES = 8  # of a user's batch: the overhead of each is unknown in the first rounds
DESCRIBE_S = 300.0  # for nodes to describe their clusters: a weak board imports for minutes
ASSUMED_DEVICE = "raspberry-pi-5"
ASSUMED_EXAMPLES = 1000
_ASSUMPTION = (
    f"the clients describe no devices: one {ASSUMED_DEVICE} with {ASSUMED_EXAMPLES} examples "
    "assumed for each"
)
_NOTHING = BlockCost(
    forward_flop=0.0,
    backward_flop=0.0,
    parameter_bytes=0,
    state_bytes=0,
    stash_bytes=0.0,
    output_bytes=1.0,  # one byte crosses to the edge, none is too few for a radio model
)
_UNKNOWN = ModelProfile(embedding=_NOTHING, blocks=(), decoder=_NOTHING)


@dataclass(frozen=True, slots=True, kw_only=True)
class Planning:
    """How rounds are planned: the policy, its settings, and the simulated surroundings.

    ``policy`` is a scheduler or its name. ``radio``, ``channel`` and ``seed`` place simulated
    clusters around the edge. Every device may spend ``budget`` per round on average. ``paced`` says
    that senders keep to planned rates. Simulated devices deviate from their profiles by
    ``truth_error`` (`simulation.world.World`). With ``labels_at_home`` every control unit is its
    cluster's edge. The first ``trusted_blocks`` are on trusted devices alone.
    """

    policy: str | Scheduler = "dssda"
    settings: SchedulerConfig = field(default_factory=SchedulerConfig)
    radio: str = "wifi"
    channel: str = "static"
    seed: int = 0
    budget: EnergyBudget = field(default_factory=EnergyBudget)
    paced: bool = False
    truth_error: float = 0.0
    labels_at_home: bool = False
    trusted_blocks: int = 0

    def for_batches(self, size: int, *, cut: bool = True) -> Planning:
        """Fix steps at ``size`` examples, of which plans choose only the micro-batches."""
        most = min(size, MOST_MICRO_BATCHES) if cut else 1
        counts = tuple(n for n in range(1, most + 1) if size % n == 0)
        sizes = tuple(size // count for count in reversed(counts))
        settings = replace(
            self.settings, batch_size=size, micro_batch_sizes=sizes, micro_batches=counts
        )
        return replace(self, settings=settings)

    def guard(self, model: ModelProfile) -> ModelProfile:
        """Return the model with its trusted blocks; raises ConfigError where it has fewer."""
        if self.trusted_blocks > len(model.blocks):
            raise ConfigError(
                f"privacy.trusted-blocks is {self.trusted_blocks}, but the model has "
                f"{len(model.blocks)} blocks: set it to {len(model.blocks)} at most"
            )
        return replace(model, trusted_blocks=self.trusted_blocks)

    def described(self, profile: ClusterProfile, model: ModelProfile | None) -> ClusterProfile:
        """Adapt a cluster for plans: its edges, memory and energy budgets."""
        if self.labels_at_home:
            chosen = None if profile.other_edges else profile.edge
            profile = with_edge_at_home(replace(profile, edge=chosen, other_edges=()))
        if model is not None and not profile.other_edges:
            profile = with_divided_memory(profile, model)
        return budgeted(profile, self.budget, model)

    @property
    def scheduler(self) -> Scheduler:
        """The policy's scheduler; raises ConfigError for an unknown name."""
        if isinstance(self.policy, str):
            return make_scheduler(self.policy, self.settings)
        return self.policy

    def world(self, profiles: Sequence[ClusterProfile], model: ModelProfile) -> World:
        """Place the described clusters in a world; raises ConfigError for unknown names."""
        world = make_world(
            cluster_devices=[profile.members for profile in profiles],
            examples=[profile.examples for profile in profiles],
            cluster_ids=[profile.cluster_id for profile in profiles],
            radio=self.radio,
            channel=self.channel,
            seed=self.seed,
            truth_error=self.truth_error,
        )
        described = tuple(self.described(profile, model) for profile in profiles)
        return replace(world, clusters=described)


class DescribedClusters(ScheduledRounds):
    """A :class:`RoundPlanner` that asks unknown nodes for their descriptions first."""

    def __init__(self, planning: Planning, model: Callable[[], ModelProfile]) -> None:
        self._profiled = model
        self._names: dict[int, str] = {}  # by node
        self._newcomers: Newcomers | None = None
        world = make_world(cluster_devices=(), examples=())
        super().__init__(planning, world, _UNKNOWN, self._names)

    def query_unknown(self, grid: Grid, nodes: Sequence[int]) -> bool:
        """Query unknown nodes; returns whether any of ``nodes`` has described a cluster.

        If no cluster is known yet, the other nodes are queried as well. Raises RunError if there is
        none, or two nodes describe the same.
        """
        self._query(grid, nodes)
        if not self._names:
            everyone = list(grid.get_node_ids())
            self._query(grid, [node for node in everyone if node not in nodes])
            if not self._names:
                raise RunError(
                    f"none of {len({*nodes, *everyone})} nodes describes a cluster: {NO_CLUSTER}, "
                    "and look into the clients' logs"
                )
        return any(node in self._names for node in nodes)

    def _query(self, grid: Grid, nodes: Sequence[int]) -> None:
        unknown = [node for node in nodes if node not in self._names]
        if not unknown:
            return
        self._newcomers = self._newcomers or Newcomers(grid, DESCRIBE_S)
        answers = self._newcomers.profiles(unknown)
        found = {node: profile for node, profile in sorted(answers.items()) if profile}
        check_names(found)
        self._register(found)

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
    """A :class:`RoundPlanner` by whose rounds all ``clusters`` (by node) train whole models."""

    clusters: Mapping[int, str]

    def plan(self, server_round: int, nodes: Sequence[int], arrays: ArrayRecord) -> RoundPlan:
        del arrays
        names = {node: self.clusters[node] for node in nodes}
        return RoundPlan(server_round=server_round, plan=None, cluster_ids=names, binding=False)

    def settle(self, closed: ClosedRound) -> Outcome:
        del closed
        return Outcome()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    nodes: tuple[int, ...] = ()
    state: str = ""


class DefaultProfilePlanner(ScheduledRounds):
    """A :class:`RoundPlanner` that knows only the nodes and the size of the model."""

    def __init__(self, planning: Planning) -> None:
        self._names: dict[int, str] = {}  # by node, in the order in which they were first asked
        world = make_world(cluster_devices=(), examples=())
        super().__init__(planning, world, _UNKNOWN, self._names)

    def plan(self, server_round: int, nodes: Sequence[int], arrays: ArrayRecord) -> RoundPlan:
        """Make a plan that is only advice; raises ScheduleError where the scheduler finds none."""
        if not nodes:
            return RoundPlan(server_round=server_round, plan=None, cluster_ids={}, binding=False)
        self._names |= {n: f"node-{n}" for n in sorted(set(nodes) - self._names.keys())}
        if len(self._names) > len(self.world.clusters):
            self._model = assumed_model(arrays)
            self.world = assumed_world(list(self._names.values()), self._model)
        planned = super().plan(server_round, nodes, arrays)
        assert planned.plan is not None
        advice = replace(planned.plan, fallback=_ASSUMPTION)
        return replace(planned, plan=advice, binding=False)

    def settle(self, closed: ClosedRound) -> Outcome:
        """Nothing was measured, so nothing is priced."""
        del closed
        return Outcome()

    def dump(self) -> ComponentState:
        memory = super().dump()
        return replace(memory, text=to_json(_Kept(nodes=tuple(self._names), state=memory.text)))

    def load(self, memory: ComponentState) -> None:
        """Restore from a checkpoint; raises ProtocolError for another planner's."""
        kept = from_json(_Kept, memory.text or "{}", "the planner's checkpoint")
        self._names |= {node: f"node-{node}" for node in kept.nodes}
        super().load(replace(memory, text=kept.state))


def assumed_model(arrays: ArrayRecord) -> ModelProfile:
    """One block that holds every array; 2 FLOP per parameter and example forward, 4 backward."""
    size = max(array_bytes(arrays), 1)
    flop = 2.0 * size / 4  # as if every parameter took 4 bytes
    whole = replace(
        _NOTHING,
        forward_flop=flop,
        backward_flop=2 * flop,
        parameter_bytes=size,
        state_bytes=4 * size,  # weights, gradients, two moments
    )
    return replace(_UNKNOWN, blocks=(whole,))


def assumed_world(cluster_ids: Sequence[str], model: ModelProfile) -> World:
    """One machine per cluster, with enough memory for the model."""
    count = len(cluster_ids)
    world = make_world(
        cluster_devices=[[ASSUMED_DEVICE, ASSUMED_DEVICE]] * count,
        examples=[ASSUMED_EXAMPLES] * count,
        cluster_ids=cluster_ids,
    )
    room = 2 * model.blocks[0].state_bytes
    clusters = tuple(
        replace(c, devices=tuple(replace(d, memory_bytes=d.memory_bytes + room) for d in c.devices))
        for c in world.clusters
    )
    return replace(world, clusters=clusters)


def planner_of(
    scheduler: str | Scheduler | Planning | RoundPlanner | None,
    model: DescribedModel | None,
    learning: Callable[[int], LearningSettings],
) -> RoundPlanner:
    """Choose the planner of a run; raises ConfigError for an unknown name.

    That is ``scheduler`` itself if it is one; with a ``model``, a planner for clusters that
    describe themselves; else one with default profiles.
    """
    if isinstance(scheduler, RoundPlanner):
        return scheduler
    if not isinstance(scheduler, str | Scheduler | Planning | None):
        raise ConfigError(
            f"scheduler must be the name of a policy, a Scheduler or a Planning, got {scheduler!r}"
        )
    if isinstance(scheduler, Planning):
        planning = scheduler
    else:
        planning = Planning(policy=scheduler or ("dssda" if model else "fedavg"))
        if isinstance(scheduler, Policy):
            planning = replace(planning, settings=scheduler.settings)
    if model is None:
        return DefaultProfilePlanner(planning)
    if model.batch_size is not None:
        planning = planning.for_batches(model.batch_size, cut=not model.splitter.whole_batches)
    first, planned = learning(1), planning.settings.schedule
    if first.labels_at_home:
        planning = replace(planning, labels_at_home=True)
    if first.trusted_blocks:
        planning = replace(planning, trusted_blocks=first.trusted_blocks)
    if first.schedule != planned:
        raise ConfigError(
            f"rounds are planned for schedule {planned!r}, but run by {first.schedule!r}: give "
            f"learning=LearningSettings(schedule={planned!r}), or change the scheduler"
        )
    return DescribedClusters(
        planning,
        lambda: planning.guard(
            profile_model(model.splitter, model.shape, first.optimizer.state_bytes)
        ),
    )

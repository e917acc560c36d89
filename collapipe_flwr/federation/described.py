"""Plans for clusters that describe themselves when they first take part.

A node without a known description is queried before its first round; a node that does not answer is
not planned for.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

from flwr.app import ArrayRecord
from flwr.serverapp import Grid

from collapipe_flwr.core.domain import ClusterProfile, ModelProfile
from collapipe_flwr.core.errors import RunError
from collapipe_flwr.federation.checkpoint import Memory
from collapipe_flwr.federation.members import NO_CLUSTER, described
from collapipe_flwr.federation.planner import ScheduledRounds
from collapipe_flwr.federation.rounds import ClosedRound, Outcome, RoundPlan
from collapipe_flwr.scheduler.policies import make_scheduler
from collapipe_flwr.scheduler.protocol import Scheduler, SchedulerConfig
from collapipe_flwr.simulation.world import EnergyBudget, budgeted, make_world

log = logging.getLogger("flwr.collapipe")
MOST_MICRO_BATCHES = 8  # of a user's batch: what each takes besides is unknown in the first rounds
# For nodes to describe their clusters: a weak board imports for minutes. Halved by waits in vain.
DESCRIBE_S = 300.0
LEAST_DESCRIBE_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Planning:
    """How rounds are planned: the policy, its settings, and the simulated surroundings.

    ``policy`` is a scheduler or its name. ``radio``, ``channel`` and ``seed`` place simulated
    clusters around the edge. Every device may spend ``budget`` per round on average. ``paced`` says
    that senders keep to planned rates. Simulated devices deviate from their profiles by
    ``truth_error`` (`simulation.world.World`).
    """

    policy: str | Scheduler = "dssda"
    settings: SchedulerConfig = field(default_factory=SchedulerConfig)
    radio: str = "wifi"
    channel: str = "static"
    seed: int = 0
    budget: EnergyBudget = field(default_factory=EnergyBudget)
    paced: bool = False
    truth_error: float = 0.0

    def for_batches(self, size: int, *, cut: bool = True) -> Planning:
        """The same for steps of ``size`` examples, of which plans choose only the micro-batches."""
        most = min(size, MOST_MICRO_BATCHES) if cut else 1
        counts = tuple(n for n in range(1, most + 1) if size % n == 0)
        sizes = tuple(size // count for count in reversed(counts))
        settings = replace(
            self.settings, batch_size=size, micro_batch_sizes=sizes, micro_batches=counts
        )
        return replace(self, settings=settings)

    @property
    def scheduler(self) -> Scheduler:
        """The policy's scheduler; raises ConfigError for an unknown name."""
        if isinstance(self.policy, str):
            return make_scheduler(self.policy, self.settings)
        return self.policy

    def rounds(
        self, profiles: Sequence[ClusterProfile], names: Mapping[int, str], model: ModelProfile
    ) -> ScheduledRounds:
        """The planner for described clusters; ``names`` maps nodes to clusters and may change.

        Raises ConfigError for unknown names.
        """
        world = make_world(
            cluster_devices=[profile.members for profile in profiles],
            examples=[profile.examples for profile in profiles],
            cluster_ids=[profile.cluster_id for profile in profiles],
            radio=self.radio,
            channel=self.channel,
            seed=self.seed,
            truth_error=self.truth_error,
        )
        described = tuple(budgeted(profile, self.budget, model) for profile in profiles)
        return ScheduledRounds(
            self.scheduler,
            replace(world, clusters=described),
            model,
            names,
            options=self.settings,
            paced=self.paced,
            budgeted=lambda profile: budgeted(profile, self.budget, model),
        )


@runtime_checkable
class Meets(Protocol):
    """A planner that has to be shown the nodes before it can plan for them."""

    def meet(self, grid: Grid, nodes: Sequence[int]) -> None:
        """Ask those that it does not know."""

    def plan_evaluation(
        self, server_round: int, nodes: Sequence[int], arrays: ArrayRecord
    ) -> RoundPlan:
        """A plan for nodes that only evaluate; nothing is remembered of it."""


class DescribedClusters:
    """A :class:`RoundPlanner` that asks unknown nodes for their descriptions first."""

    def __init__(self, planning: Planning, model: Callable[[], ModelProfile]) -> None:
        self._planning = planning
        self._model = model
        self._profiles: dict[str, ClusterProfile] = {}  # by cluster id
        self._names: dict[int, str] = {}  # by node
        self._rounds: ScheduledRounds | None = None
        self._loaded = Memory()
        self._wait_s = DESCRIBE_S

    def meet(self, grid: Grid, nodes: Sequence[int]) -> None:
        """Query unknown nodes; raises RunError if none of ``nodes`` has described a cluster."""
        strangers = [node for node in nodes if node not in self._names]
        if strangers:
            found = described(grid, strangers, self._wait_s)
            self._welcome(found)
            if len(found) < len(strangers):
                self._wait_s = max(self._wait_s / 2, LEAST_DESCRIBE_S)
        if nodes and not any(node in self._names for node in nodes):
            raise RunError(
                f"none of {len(nodes)} nodes describes a cluster: {NO_CLUSTER}, and look into the "
                "clients' logs"
            )

    def plan_evaluation(
        self, server_round: int, nodes: Sequence[int], arrays: ArrayRecord
    ) -> RoundPlan:
        rounds = self._known()
        before = rounds.state
        plan = rounds.plan(server_round, nodes, arrays)
        rounds.state = before
        return plan

    def plan(self, server_round: int, nodes: Sequence[int], arrays: ArrayRecord) -> RoundPlan:
        """See `RoundPlanner.plan`; nodes without a description take no part."""
        return self._known().plan(server_round, nodes, arrays)

    def settle(self, closed: ClosedRound) -> Outcome:
        rounds = self._known()
        outcome = rounds.settle(closed)
        self._profiles |= {profile.cluster_id: profile for profile in rounds.world.clusters}
        return outcome

    def dump(self) -> Memory:
        return self._rounds.dump() if self._rounds else self._loaded

    def load(self, memory: Memory) -> None:
        """Restore from a checkpoint, once the clusters are known."""
        self._rounds, self._loaded = None, memory

    def _welcome(self, found: Mapping[int, ClusterProfile]) -> None:
        for node, profile in found.items():
            name = profile.cluster_id
            for before in [n for n, known in self._names.items() if known == name]:
                del self._names[before]
            self._names[node] = name
            if name not in self._profiles:
                self._profiles[name], self._loaded = profile, self.dump()
                self._rounds = None

    def _known(self) -> ScheduledRounds:
        if self._rounds is None:
            profiles = [self._profiles[name] for name in sorted(self._profiles)]
            self._rounds = self._planning.rounds(profiles, self._names, self._model())
            self._rounds.load(self._loaded)
        return self._rounds

"""What a run settles about planning before its first round: policy, budgets, world and edge."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from collapipe_flwr.core.domain import (
    ClusterProfile,
    ModelProfile,
)
from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.scheduler.base import Policy
from collapipe_flwr.scheduler.edges import divide_memory
from collapipe_flwr.scheduler.policies import make_scheduler
from collapipe_flwr.scheduler.protocol import Scheduler, SchedulerConfig
from collapipe_flwr.simulation.world import (
    EnergyBudget,
    World,
    budgeted,
    make_world,
    with_demands,
    with_some_edge,
)

MOST_MICRO_BATCHES = 8  # of a user's batch: the overhead of each is unknown in the first rounds


@dataclass(frozen=True, slots=True, kw_only=True)
class Planning:
    """How rounds are planned: the policy, its settings, and the simulated surroundings.

    ``policy`` is a scheduler or its name. ``radio``, ``channel`` and ``seed`` place simulated
    clusters around the edge. Every device may spend ``budget`` per round on average. ``paced`` says
    that senders keep to planned rates. Simulated devices deviate from their profiles by
    ``truth_error`` (`simulation.world.World`). With ``labels_at_home`` every control unit is its
    cluster's edge. The first ``trusted_blocks`` are on trusted devices alone. Clusters reply in the
    codec ``updates``. The run's edge at ``edge_address``, if it has one, serves machines whose
    cluster files name none. Of ``ranks``, if there are some, clusters without a rank of adapters of
    their own get one (`scheduler.ranks`).
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
    updates: str = "fp32"
    edge_address: str = ""
    ranks: tuple[int, ...] = ()

    def for_batches(self, size: int, *, cut: bool = True) -> Planning:
        """Fix steps at ``size`` examples, of which plans choose only the micro-batches."""
        most = min(size, MOST_MICRO_BATCHES) if cut else 1
        counts = tuple(n for n in range(1, most + 1) if size % n == 0)
        sizes = tuple(size // count for count in reversed(counts))
        settings = replace(
            self.settings, batch_size=size, micro_batch_sizes=sizes, micro_batches=counts
        )
        return replace(self, settings=settings)

    def recomputing(self) -> Planning:
        """Plan for devices that compute forward passes again instead of keeping activations."""
        settings, policy = replace(self.settings, recompute=True), self.policy
        if isinstance(policy, Policy):
            policy = replace(policy, settings=replace(policy.settings, recompute=True))
        return replace(self, settings=settings, policy=policy)

    def check(self, model: ModelProfile) -> ModelProfile:
        """Return the model; raises ConfigError where it has fewer blocks than are to be trusted."""
        if self.trusted_blocks > len(model.blocks):
            raise ConfigError(
                f"privacy.trusted-blocks is {self.trusted_blocks}, but the model has "
                f"{len(model.blocks)} blocks: set it to {len(model.blocks)} at most"
            )
        return model

    def described(self, profile: ClusterProfile, model: ModelProfile | None) -> ClusterProfile:
        """Adapt a cluster for plans: its edges, trust, memory and energy budgets."""
        profile = with_demands(
            profile,
            labels_at_home=self.labels_at_home,
            trusted_blocks=self.trusted_blocks,
            updates=self.updates,
        )
        profile = budgeted(with_some_edge(profile, self.edge_address), self.budget, model)
        return profile if model is None else divide_memory(profile, model)

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

"""The planner of a run: the chosen policy over the simulated world of the described clusters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from collapipe_flwr.config.schema import AppConfig
from collapipe_flwr.core.domain import ClusterProfile, ModelProfile
from collapipe_flwr.core.errors import blaming
from collapipe_flwr.federation.planner import ScheduledRounds
from collapipe_flwr.scheduler.policies import make_scheduler
from collapipe_flwr.simulation.world import EnergyBudget, World, budgeted, make_world


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """The planner of a run, and the energy that each device may spend per round on average."""

    rounds: ScheduledRounds
    energy_budget_j: dict[str, float]


def make_planner(
    config: AppConfig,
    model: ModelProfile,
    clusters: Mapping[int, ClusterProfile],
    names: Mapping[int, str],
) -> Planned:
    """DSSDA (or the chosen policy) for the described clusters.

    ``names`` are the clusters' by node, as they are at any time.

    Raises ConfigError for unknown names and InfeasibleError when no plan fits the devices.
    """
    settings = config.scheduling
    profiles = sorted(clusters.values(), key=lambda profile: profile.cluster_id)
    world = _world(config, model, profiles)
    with blaming("scheduler.policy"):
        scheduler = make_scheduler(config.scheduler.policy, settings)
    with blaming("world.devices, world.memory-share"):
        scheduler.step(scheduler.init(snapshot := world.snapshot(1, model)), snapshot)
    return Planned(
        rounds=ScheduledRounds(
            scheduler,
            world,
            model,
            names,
            options=settings,
            paced=config.links.paced,
        ),
        energy_budget_j={
            device.device_id: device.energy_budget_j
            for profile in world.clusters
            for device in profile.members
        },
    )


def _world(config: AppConfig, model: ModelProfile, profiles: Sequence[ClusterProfile]) -> World:
    """The described clusters, placed around the edge, with energy budgets to suit the model."""
    budget = EnergyBudget(share=config.world.energy_share, radio_s=0.0)
    world = make_world(
        cluster_devices=[[m.kind for m in p.members] for p in profiles],
        examples=[profile.examples for profile in profiles],
        cluster_ids=[profile.cluster_id for profile in profiles],
        radio=config.world.radio,
        channel=config.world.channel,
        seed=config.run.seed,
    )
    return replace(world, clusters=tuple(budgeted(p, budget, model) for p in profiles))

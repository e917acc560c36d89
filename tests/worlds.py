"""Worlds, snapshots and first plans, small enough to search completely where a test needs it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest

from collapipe_flwr.core.domain import (
    ClusterSnapshot,
    DeviceProfile,
    ModelProfile,
    Plan,
    Snapshot,
)
from collapipe_flwr.core.outcome import ClusterOutcome, RoundOutcome
from collapipe_flwr.costs.arrays import Array
from collapipe_flwr.costs.price import PricedPlan, price
from collapipe_flwr.costs.tables import Tables
from collapipe_flwr.costs.work import PricingOptions
from collapipe_flwr.scheduler.dssda import Dssda
from collapipe_flwr.scheduler.outcomes import simulate_cluster
from collapipe_flwr.scheduler.policies import make_scheduler
from collapipe_flwr.scheduler.protocol import Nested, SchedulerConfig, SchedulerState
from collapipe_flwr.simulation.setting import ModelShape, Setting
from collapipe_flwr.simulation.world import EnergyBudget, World, make_world, mixed_devices

BOARDS = ("raspberry-pi-4", "raspberry-pi-5", "jetson-nano", "phone")
KINDS = (*BOARDS, "jetson-orin-nano")


@dataclass(frozen=True, slots=True)
class QueuesAlone(Dssda):
    """Plain drift plus penalty: queues start empty, and no account limits a round."""

    def _start(self, state: SchedulerState, snapshot: Snapshot) -> SchedulerState:
        del snapshot
        return replace(state, weight=self.settings.penalty_weight)

    def _settle_placeholders(self, state: SchedulerState, accounts_j: Nested) -> Nested:
        del accounts_j
        return state.placeholder_j

    def _compute_room(self, tables: Tables, state: SchedulerState) -> Array:
        del state
        return np.full_like(tables.members.budget_mi, np.inf)


def equal_ends(blocks: int, width: int = 128, tokens: int = 32, **sizes: int) -> ModelProfile:
    """A model with as many blocks behind the chain as in it."""
    shape = ModelShape(blocks=blocks, decoder_blocks=blocks, width=width, tokens=tokens, **sizes)
    return shape.profile()


def draw_world(
    seed: int, clusters: int = 2, devices: int = 3, blocks: int = 6, **options: str
) -> tuple[World, ModelProfile]:
    """Any devices, channel and model, whose blocks differ."""
    rng = np.random.default_rng(seed)
    width, tokens = int(rng.choice([64, 128, 256])), int(rng.choice([16, 64]))
    model = equal_ends(blocks, width, tokens)
    scale = rng.uniform(0.4, 2.0, blocks)
    uneven = tuple(
        replace(b, forward_flop=b.forward_flop * f, backward_flop=b.backward_flop * f)
        for b, f in zip(model.blocks, scale, strict=True)
    )
    model = replace(model, blocks=uneven)
    world = make_world(
        cluster_devices=mixed_devices(clusters, devices, seed, KINDS),
        examples=[int(x) for x in rng.integers(50, 1000, clusters)],
        radio=options.get("radio", str(rng.choice(["wifi", "5g"]))),
        channel=options.get("channel", "block-fading"),
        budget=EnergyBudget(share=0.4, radio_s=3.0),
        model=model,
        seed=seed,
    )
    return world, model


def draw_snapshot(seed: int, **shape: int) -> Snapshot:
    """The first round of a drawn world."""
    world, model = draw_world(seed, **shape)
    return world.snapshot(1, model)


def four_boards(share: float) -> tuple[World, ModelProfile]:
    """One cluster in a static channel, with so tight a budget."""
    model = equal_ends(6)
    world = make_world(
        cluster_devices=[["raspberry-pi-5", "raspberry-pi-4", "raspberry-pi-5", "jetson-nano"]],
        examples=[400],
        budget=EnergyBudget(share=share, radio_s=1.0),
        model=model,
    )
    return world, model


def first_round(
    kinds: Sequence[Sequence[str]], model: ModelProfile, examples: int | list[int], seed: int = 0
) -> Snapshot:
    """Of clusters with these devices, control units first."""
    each = [examples] * len(kinds) if isinstance(examples, int) else examples
    world = make_world(cluster_devices=[list(k) for k in kinds], examples=each, seed=seed)
    return world.snapshot(1, model)


@pytest.fixture(scope="session")
def small() -> Setting:
    """Two clusters of two devices, four narrow blocks, three rounds: any policy can plan it."""
    return Setting(
        clusters=2,
        devices=2,
        examples=200,
        rounds=3,
        policies=("dssda", "fedavg", "uniform"),
        model=ModelShape(blocks=4, width=128, tokens=32),
        settings=SchedulerConfig(micro_batch_sizes=(2, 4), micro_batches=(2, 4)),
    )


def with_devices(cluster: ClusterSnapshot, devices: Iterable[DeviceProfile]) -> ClusterSnapshot:
    """The same cluster with other devices in the same places."""
    return replace(cluster, profile=replace(cluster.profile, devices=tuple(devices)))


def without_device(snapshot: Snapshot, cluster: int, device: int) -> Snapshot:
    """The snapshot after one device has vanished."""
    old, gone = snapshot.clusters[cluster], device + 1
    gains = tuple(
        tuple(g for j, g in enumerate(row) if j != gone)
        for i, row in enumerate(old.channel.d2d_gain)
        if i != gone
    )
    edge = tuple(g for i, g in enumerate(old.channel.edge_gain) if i != gone)
    left = with_devices(old, (d for n, d in enumerate(old.profile.devices) if n != device))
    lost = replace(left, channel=replace(old.channel, d2d_gain=gains, edge_gain=edge))
    clusters = list(snapshot.clusters)
    clusters[cluster] = lost
    return replace(snapshot, clusters=tuple(clusters))


def first_step(
    snapshot: Snapshot, settings: SchedulerConfig | None = None, policy: str = "dssda"
) -> tuple[Plan, SchedulerState]:
    """The plan of a policy that begins with this snapshot, and what it knows then."""
    scheduler = make_scheduler(policy, settings)
    return scheduler.step(scheduler.init(snapshot), snapshot)


def planned(
    snapshot: Snapshot, settings: SchedulerConfig | None = None, policy: str = "dssda"
) -> Plan:
    """The plan of a policy that begins with this snapshot."""
    return first_step(snapshot, settings, policy)[0]


def outcome_of(plan: Plan, snapshot: Snapshot, settings: SchedulerConfig) -> RoundOutcome:
    """What a round with this plan costs where the snapshot is true."""
    priced = price(plan, snapshot, settings)
    clusters = tuple(
        ClusterOutcome(cluster_id=c.cluster_id, latency_s=c.latency_s, energy_j=c.energy_j)
        for c in priced.clusters
    )
    return RoundOutcome(round_index=plan.round_index, latency_s=priced.latency_s, clusters=clusters)


def simulated_outcome(
    plan: Plan, priced: PricedPlan, truth: Snapshot, seen: Snapshot, options: PricingOptions
) -> RoundOutcome:
    """What a round with this plan costs in the true world, where its price is known."""
    profiles = {c.profile.cluster_id: c.profile for c in truth.clusters}
    clusters = tuple(
        simulate_cluster(part, found, profiles[part.cluster_id], truth, seen, options)
        for part, found in zip(plan.clusters, priced.clusters, strict=True)
    )
    return RoundOutcome(round_index=plan.round_index, latency_s=priced.latency_s, clusters=clusters)

"""Random snapshots of every shape, small enough to search completely where a test needs it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest

from collapipe_flwr.core.domain import ModelProfile, Snapshot
from collapipe_flwr.costs.arrays import Array
from collapipe_flwr.costs.tables import Tables
from collapipe_flwr.scheduler.dssda import Dssda
from collapipe_flwr.scheduler.protocol import Nested, SchedulerState
from collapipe_flwr.simulation.models import ModelShape
from collapipe_flwr.simulation.world import EnergyBudget, World, make_world, mixed_devices

KINDS = ("raspberry-pi-4", "raspberry-pi-5", "jetson-nano", "phone", "jetson-orin-nano")


@dataclass(frozen=True, slots=True)
class QueuesAlone(Dssda):
    """Plain drift plus penalty: queues start empty, and no account limits a round."""

    def _started(self, state: SchedulerState, snapshot: Snapshot) -> SchedulerState:
        del snapshot
        return replace(state, weight=self.settings.penalty_weight)

    def _placeholders(self, state: SchedulerState, accounts_j: Nested) -> Nested:
        del accounts_j
        return state.placeholder_j

    def _room(self, tables: Tables, state: SchedulerState) -> Array:
        del state
        return np.full_like(tables.members.budget_mi, np.inf)


MakeWorld = Callable[..., tuple[World, ModelProfile]]
MakeSnapshot = Callable[..., Snapshot]


def build_world(
    seed: int, clusters: int = 2, devices: int = 3, blocks: int = 6, **options: str
) -> tuple[World, ModelProfile]:
    rng = np.random.default_rng(seed)
    model = ModelShape(
        blocks=blocks,
        decoder_blocks=blocks,
        width=int(rng.choice([64, 128, 256])),
        tokens=int(rng.choice([16, 64])),
    ).profile()
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


@pytest.fixture
def a_world() -> MakeWorld:
    """A builder of worlds: (seed, clusters, devices, blocks) -> (world, model)."""
    return build_world


@pytest.fixture
def a_snapshot() -> MakeSnapshot:
    """A builder of first rounds."""

    def build(seed: int, **shape: int) -> Snapshot:
        world, model = build_world(seed, **shape)
        return world.snapshot(1, model)

    return build

"""One simulated setting: clusters, model, radio, budgets and how policies may plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace

from collapipe_flwr.core.domain import ClusterProfile, DeviceProfile, ModelProfile
from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.experiments.budget import EnergyBudget
from collapipe_flwr.experiments.distortion import Distortion
from collapipe_flwr.experiments.fleet import FleetCluster
from collapipe_flwr.experiments.model import ModelShape
from collapipe_flwr.scheduler.policies import POLICIES
from collapipe_flwr.scheduler.protocol import SchedulerConfig
from collapipe_flwr.simulation.devices import device_preset
from collapipe_flwr.simulation.world import Budgets, World, make_world, mixed_devices

CONTROL_UNIT = "raspberry-pi-5"
SEED_LIMIT = 2**63
_STAND_IN = CONTROL_UNIT  # replaced by the fleet's own boards


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Everything but the policy and the seed; ``fleet`` replaces clusters, devices and kinds."""

    clusters: int = 4
    devices: int = 6  # of every cluster, the control unit not counted
    kinds: tuple[str, ...] = ("raspberry-pi-4", "raspberry-pi-5", "jetson-nano", "phone")
    examples: int = 1000  # of every cluster, each used once per round
    rounds: int = 50
    seeds: tuple[int, ...] = (0,)
    policies: tuple[str, ...] = POLICIES
    model: ModelShape = field(default_factory=ModelShape)
    radio: str = "wifi"
    channel: str = "block-fading"
    budget: EnergyBudget = field(default_factory=lambda: EnergyBudget(equal_shares=1.8))
    settings: SchedulerConfig = field(
        default_factory=lambda: SchedulerConfig(
            micro_batches=(1, 2, 4, 8, 16), max_model_share=1 / 3
        )
    )
    distortion: Distortion = field(default_factory=Distortion)
    fleet: tuple[FleetCluster, ...] = ()

    def __post_init__(self) -> None:
        for name in ("clusters", "devices", "examples", "rounds"):
            value = getattr(self, name)
            if value < 1:
                raise ConfigError(f"--{name} must be >= 1, got {value}")
        _check_names(self.policies)
        if not self.seeds or not all(0 <= seed < SEED_LIMIT for seed in self.seeds):
            raise ConfigError(f"--seeds needs at least one seed, all >= 0, got {self.seeds}")

    def world(self, seed: int, profile: ModelProfile) -> World:
        """The world of one seed; raises ConfigError for unknown kinds, radios and channels."""
        rows = self.fleet or _drawn(self, seed)
        world = make_world(
            cluster_devices=[[_STAND_IN] * len(row.members) for row in rows],
            examples=[row.examples or self.examples for row in rows],
            radio=self.radio,
            channel=self.channel,
            seed=seed,
            cluster_ids=[row.cluster_id for row in rows],
        )
        return replace(world, clusters=_equipped(self, world, rows, profile))

    def as_json(self) -> dict[str, object]:
        """Plain data that states the setting."""
        fleet = [{**asdict(row), "members": [*map(_kind_json, row.members)]} for row in self.fleet]
        return {**asdict(self), "budget": str(self.budget), "fleet": fleet}


def _kind_json(kind: DeviceProfile) -> dict[str, object]:
    """A class of board, which has neither an id nor a budget."""
    unnamed = asdict(kind)
    return {k: v for k, v in unnamed.items() if k not in ("device_id", "energy_budget_j")}


def _check_names(policies: Sequence[str]) -> None:
    if not policies:
        raise ConfigError(f"--policies needs at least one of {', '.join(POLICIES)}")
    for name in policies:
        if name not in POLICIES:
            raise ConfigError(f"--policies: unknown policy {name!r}; choose {', '.join(POLICIES)}")
    if len(set(policies)) < len(policies):
        raise ConfigError(f"--policies names one twice: {', '.join(policies)}")


def _drawn(setting: Setting, seed: int) -> tuple[FleetCluster, ...]:
    """Random kinds behind a fixed control unit."""
    for kind in setting.kinds:
        device_preset(kind)
    rows = mixed_devices(setting.clusters, setting.devices, seed, setting.kinds)
    return tuple(
        FleetCluster(
            cluster_id=f"cluster-{m}",
            members=tuple(device_preset(str(kind)) for kind in row),
            examples=None,
        )
        for m, row in enumerate(rows)
    )


def _equipped(
    setting: Setting, world: World, rows: Sequence[FleetCluster], profile: ModelProfile
) -> tuple[ClusterProfile, ...]:
    """The world's clusters with every member made the board that its row names."""
    result = []
    for cluster, row in zip(world.clusters, rows, strict=True):
        budgets = setting.budget.budgets(profile, len(cluster.devices))
        places = (cluster.control_unit, *cluster.devices)
        members = [
            _board(place, kind, budgets, cluster.examples)
            for place, kind in zip(places, row.members, strict=True)
        ]
        result.append(replace(cluster, control_unit=members[0], devices=tuple(members[1:])))
    return tuple(result)


def _board(
    place: DeviceProfile, kind: DeviceProfile, budgets: Budgets, examples: int
) -> DeviceProfile:
    device = replace(kind, device_id=place.device_id)
    return replace(device, energy_budget_j=budgets.of(device, examples))

"""A world of clusters: profiles with energy budgets, and channels; snapshots follow from both.

Profiles are what plans believe. With a ``truth_error`` the devices really are different
(`World.truth`), as boards are from data sheets: every member's speed and its power while computing
are those of its profile times exp(truth_error z), with a standard normal z for each, drawn once for
a world's seed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np

from collapipe_flwr.core.domain import (
    ClusterProfile,
    ClusterSnapshot,
    DeviceProfile,
    EdgeProfile,
    ModelProfile,
    RadioProfile,
    Snapshot,
)
from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.costs.arrays import Array
from collapipe_flwr.simulation.channel import ChannelModel, MemberPositions, channel_model
from collapipe_flwr.simulation.devices import RadioPreset, device_preset, radio_preset, scaled

EDGE_FLOP_PER_S = 5e12  # what one cluster sees of a server-class GPU in fp32
EDGE_BYTES_PER_CLUSTER = 8 * 2**30
EDGE_TX_POWER_W = 1.0  # an access point's 30 dBm
SERVER_RATE_BIT_PER_S = 100e6
CLUSTER_DISTANCE_M = (30.0, 120.0)
DEVICE_DISTANCE_M = (3.0, 15.0)
ORBIT_M = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Clusters, edge, radio and how channels change; every round is a function of the seed.

    ``truth_error`` is the standard deviation of ln(true / believed) speed and power of devices.
    """

    clusters: tuple[ClusterProfile, ...]
    placements: tuple[MemberPositions, ...]
    edge: EdgeProfile
    radio: RadioProfile
    channel: ChannelModel
    seed: int
    truth_error: float = 0.0

    def snapshot(
        self,
        round_index: int,
        model: ModelProfile,
        present: Sequence[str] | None = None,
        models: Mapping[int, ModelProfile] = MappingProxyType({}),
    ) -> Snapshot:
        """Return the scheduler's view of that round; ``present`` restricts it to those clusters.

        ``models`` are those with adapters of other ranks than ``model``.
        """
        clusters = tuple(
            _with_its_edge(
                ClusterSnapshot(
                    profile=profile, channel=self.channel(place, self.seed, round_index)
                )
            )
            for profile, place in zip(self.clusters, self.placements, strict=True)
            if present is None or profile.cluster_id in present
        )
        return Snapshot(
            round_index=round_index,
            model=model,
            edge=self.edge,
            radio=self.radio,
            clusters=clusters,
            models=models,
        )

    def with_cluster(self, profile: ClusterProfile) -> World:
        """With other devices in the cluster of that id; those that stay keep their places."""
        index = [cluster.cluster_id for cluster in self.clusters].index(profile.cluster_id)
        before = [member.device_id for member in self.clusters[index].members]
        place = self.placements[index]

        def of(member: DeviceProfile) -> Array:
            if member.device_id in before:
                return np.asarray(place.member_m[before.index(member.device_id)])
            rng = np.random.default_rng([self.seed, 37, *map(ord, member.device_id)])
            return np.asarray(place.member_m[0] + _around(rng, DEVICE_DISTANCE_M, 1)[0])

        members = profile.members
        moved = replace(
            place,
            member_m=np.stack([of(member) for member in members]),
            orbit_m=np.full(len(members), ORBIT_M),
        )
        return replace(
            self,
            clusters=(*self.clusters[:index], profile, *self.clusters[index + 1 :]),
            placements=(*self.placements[:index], moved, *self.placements[index + 1 :]),
        )

    def with_places(self, placements: Sequence[MemberPositions]) -> World:
        """With these places of clusters; those of others stay."""
        known = {place.cluster_id: place for place in placements}
        places = tuple(known.get(place.cluster_id, place) for place in self.placements)
        return replace(self, placements=places)

    @property
    def true(self) -> World:
        """The world whose profiles are the truth about this one; itself where they are."""
        if not self.truth_error:
            return self
        clusters = (cluster.with_members(self._true_device) for cluster in self.clusters)
        return replace(self, clusters=tuple(clusters), truth_error=0.0)

    def truth(self, snapshot: Snapshot) -> Snapshot:
        """Return the snapshot with devices as they really are; itself where profiles are true."""
        if not self.truth_error:
            return snapshot
        clusters = (
            replace(each, profile=each.profile.with_members(self._true_device))
            for each in snapshot.clusters
        )
        return replace(snapshot, clusters=tuple(clusters))

    def _true_device(self, device: DeviceProfile) -> DeviceProfile:
        rng = np.random.default_rng([self.seed, 31, *map(ord, device.device_id)])
        speed, power = map(float, np.exp(self.truth_error * rng.standard_normal(2)))
        return scaled(device, speed=speed, power=power)


@dataclass(frozen=True, slots=True, kw_only=True)
class EnergyBudget:
    """The long-term energy budget of every device: one of three, or none for unlimited energy.

    ``share`` is a part of what a device would spend on training the whole encoder alone on all the
    cluster's examples; ``equal_shares`` counts in its cluster's equal shares of that, 1 over
    the number of devices. Both add full-power radio for ``radio_s`` seconds.
    """

    equal_shares: float | None = None
    share: float | None = None
    joule: float | None = None
    radio_s: float = 60.0

    def of(
        self, device: DeviceProfile, examples: int, model: ModelProfile | None, devices: int
    ) -> float:
        """Return the joules per round that one of so many devices training ``model`` may spend."""
        if self.joule is not None:
            return self.joule
        share = self.share if self.equal_shares is None else self.equal_shares / devices
        if share is None or model is None:
            return math.inf
        flop = sum(b.forward_flop + b.backward_flop for b in model.blocks)
        flop += model.embedding.forward_flop + model.embedding.backward_flop
        compute_j = device.energy_per_flop_j * flop * examples
        return share * compute_j + device.tx_power_max_w * self.radio_s

    def __str__(self) -> str:
        if self.equal_shares is not None:
            return f"{self.equal_shares:g}x"
        if self.share is not None:
            return f"{100 * self.share:g}%"
        return "none" if self.joule is None else f"{self.joule:g}"


def energy_budget(text: str) -> EnergyBudget:
    """``1.8x`` an equal share, ``30%`` of training alone, ``500`` joules or ``none``.

    Raises ConfigError for anything else.
    """
    word = text.strip()
    if word == "none":
        return EnergyBudget()
    try:
        value = float(word[:-1] if word.endswith(("%", "x")) else word)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise ConfigError(
            "--energy-budget must be joules per round (500), a share of training alone (30%), "
            f"a multiple of an equal share of it (1.8x) or none, got {text!r}"
        )
    if word.endswith("x"):
        return EnergyBudget(equal_shares=value)
    return EnergyBudget(share=value / 100) if word.endswith("%") else EnergyBudget(joule=value)


def make_world(
    *,
    cluster_devices: Sequence[Sequence[str | DeviceProfile]],
    examples: Sequence[int],
    radio: str = "wifi",
    channel: str = "static",
    seed: int = 0,
    budget: EnergyBudget | None = None,
    model: ModelProfile | None = None,
    cluster_ids: Sequence[str] | None = None,
    truth_error: float = 0.0,
) -> World:
    """Make a world of one cluster per entry of ``cluster_devices``: its boards, control unit first.

    Boards are names of presets or profiles without an id; ``model`` is what ``budget`` refers to.
    Raises ConfigError for unknown names, ValueError for lists of different lengths.
    """
    ids = cluster_ids or [f"cluster-{m}" for m in range(len(cluster_devices))]
    bands = radio_preset(radio)
    rng = np.random.default_rng([seed, len(ids)])
    rows = list(zip(ids, cluster_devices, examples, strict=True))
    return World(
        clusters=tuple(
            budgeted(_cluster(name, boards, count, bands), budget or EnergyBudget(), model)
            for name, boards, count in rows
        ),
        placements=tuple(_place(name, len(boards), bands, rng) for name, boards, _ in rows),
        edge=replace(assumed_edge(), memory_bytes=EDGE_BYTES_PER_CLUSTER * len(ids)),
        radio=RadioProfile(
            bandwidth_hz=bands.edge_bandwidth_hz, noise_w_per_hz=bands.noise_w_per_hz
        ),
        channel=channel_model(channel),
        seed=seed,
        truth_error=truth_error,
    )


def mixed_devices(clusters: int, devices: int, seed: int, kinds: Sequence[str]) -> list[list[str]]:
    """``devices`` random kinds per cluster behind a Raspberry Pi 5 as control unit."""
    rng = np.random.default_rng([seed, clusters, devices])
    return [["raspberry-pi-5", *rng.choice(list(kinds), size=devices)] for _ in range(clusters)]


def _cluster(
    cluster_id: str, boards: Sequence[str | DeviceProfile], examples: int, radio: RadioPreset
) -> ClusterProfile:
    members = []
    for index, board in enumerate(boards):
        name = "control-unit" if index == 0 else f"d{index}"
        preset = device_preset(board) if isinstance(board, str) else board
        members.append(replace(preset, device_id=f"{cluster_id}/{name}"))
    return ClusterProfile(
        cluster_id=cluster_id,
        examples=examples,
        control_unit=members[0],
        devices=tuple(members[1:]),
        d2d_bandwidth_hz=radio.d2d_bandwidth_hz,
        server_rate_bit_per_s=SERVER_RATE_BIT_PER_S,
    )


def budgeted(
    cluster: ClusterProfile, budget: EnergyBudget, model: ModelProfile | None
) -> ClusterProfile:
    """Set the energy budgets of members that train ``model``."""

    def member(device: DeviceProfile) -> DeviceProfile:
        joule = budget.of(device, cluster.examples, model, len(cluster.devices))
        return replace(device, energy_budget_j=joule)

    return cluster.with_members(member)


def _with_its_edge(cluster: ClusterSnapshot) -> ClusterSnapshot:
    """Put the cluster's edge where its device stands, unless there are several to choose from."""
    profile = cluster.profile
    if profile.edge is None or not profile.edge.device_id or profile.other_edges:
        return cluster
    return cluster.with_edge(profile.edge)


def assumed_edge(name: str = "") -> EdgeProfile:
    """Describe an edge of which nothing is known: a server with a GPU."""
    return EdgeProfile(
        speed_flop_per_s=EDGE_FLOP_PER_S,
        memory_bytes=EDGE_BYTES_PER_CLUSTER,
        tx_power_w=EDGE_TX_POWER_W,
        name=name,
    )


def with_demands(
    cluster: ClusterProfile, *, labels_at_home: bool, trusted_blocks: int, updates: str
) -> ClusterProfile:
    """Meet what a run demands besides the cluster itself: of blocks, the larger number counts."""
    if labels_at_home:
        chosen = None if cluster.other_edges else cluster.edge
        cluster = with_edge_at_home(replace(cluster, edge=chosen, other_edges=()))
    most = max(cluster.trusted_blocks, trusted_blocks)
    return replace(cluster, trusted_blocks=most, update_codec=updates)


def with_some_edge(cluster: ClusterProfile, address: str = "") -> ClusterProfile:
    """Give machines whose file names no edge that of the run at ``address``, else themselves."""
    if cluster.edge is not None or not cluster.real_links:
        return cluster
    if address:
        return replace(cluster, edge=assumed_edge(address))
    return with_edge_at_home(cluster)


def with_edge_at_home(cluster: ClusterProfile) -> ClusterProfile:
    """Make the control unit the cluster's edge, with the measured links to it."""
    if cluster.edge_at_home:
        return cluster
    unit = cluster.control_unit
    rates = [link for link in cluster.link_rates if "" not in link.ends]
    for link in tuple(rates):
        if unit.device_id in link.ends:
            one, other = link.ends
            ends = ("", other if one == unit.device_id else one)
            rates.append(replace(link, ends=ends))
    return replace(cluster, edge=unit.as_edge, link_rates=tuple(rates))


def _place(
    cluster_id: str, members: int, radio: RadioPreset, rng: np.random.Generator
) -> MemberPositions:
    centre = _around(rng, CLUSTER_DISTANCE_M, 1)
    return MemberPositions(
        cluster_id=cluster_id,
        member_m=centre + _around(rng, DEVICE_DISTANCE_M, members),
        orbit_m=np.full(members, ORBIT_M),
        carrier_hz=radio.carrier_hz,
        exponent=radio.path_loss_exponent,
    )


def _around(
    rng: np.random.Generator, metres: tuple[float, float], count: int
) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    radius = rng.uniform(*metres, size=count)
    angle = rng.uniform(0.0, 2.0 * math.pi, size=count)
    return np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1)

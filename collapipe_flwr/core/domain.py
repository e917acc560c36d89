"""Frozen values that the scheduler, the pipeline and Flower share.

Names end in units: ``_s`` seconds, ``_j`` joules, ``_w`` watts, ``_hz`` hertz, ``_flop``
floating-point operations. Sizes are bytes, gains are linear (not dB). Costs are *per example*
unless a name says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Annotated

from collapipe_flwr.core import bounds
from collapipe_flwr.core.keys import at_least, one_of
from collapipe_flwr.core.links import CODECS, UPDATE_CODECS, LinkConfig
from collapipe_flwr.core.schedule import SCHEDULES

IGNORED_LABEL = -100  # transformers' mark for positions without a target
MOST_DEVICES = 1000  # of one cluster
MOST_EDGES = 16  # that may be a cluster's
MEMORY_MARGIN = 0.05  # share of every memory that plans leave free, unless told otherwise
Matrix = tuple[tuple[float, ...], ...]  # of numbers by pair of members


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCost:
    """The costs per example of one piece of the model: embedding, encoder block or decoder.

    ``state_bytes`` is independent of the batch: weights + gradients + optimizer state. A pass may
    go piece by piece where a micro-batch would take more memory at once.
    """

    forward_flop: float
    backward_flop: float
    parameter_bytes: int
    state_bytes: int
    stash_bytes: float  # activations kept between forward and backward
    output_bytes: float  # activations at the cut behind this piece, before a link codes them
    passing_bytes: float = 0.0  # temporary tensors of a pass, such as gradients
    piece_stash_bytes: float = 0.0  # instead of `stash_bytes`, where a pass goes piece by piece
    piece_bytes: float = inf  # temporary tensors of one piece, whatever the batch; inf: no pieces
    returns: bool = True  # whether a gradient comes back over that cut: not where nothing trains
    frozen_bytes: int = 0  # of the parameters: no optimizer's, and devices keep them over rounds

    @property
    def trained_bytes(self) -> int:
        """The bytes of the parameters that training changes."""
        return self.parameter_bytes - self.frozen_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelProfile:
    """The model as the scheduler sees it: embedding | blocks 0..L-1 | decoder."""

    embedding: BlockCost
    blocks: tuple[BlockCost, ...]
    decoder: BlockCost


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProfile:
    """One device: effective (measured) speed, usable memory, energy and radio limits.

    A micro-batch of s examples takes ``s FLOP / speed_flop_per_s`` plus ``overhead_s`` for every
    block, forward and backward together (`costs.work.price_computing`).
    """

    device_id: bounds.Name
    kind: bounds.Text
    speed_flop_per_s: bounds.Speed
    memory_bytes: bounds.Bytes
    energy_per_flop_j: bounds.JoulesPerFlop
    tx_power_max_w: bounds.Watts
    energy_budget_j: Annotated[float, at_least(0)]  # long-term average per round
    d2d_bandwidth_hz: bounds.Bandwidth | None = None  # widest of its radio; None: the cluster's
    overhead_s: bounds.Overhead = 0.0
    round_s: bounds.Seconds = (
        0.0  # to begin and end a round; of parallel devices the slowest one counts
    )
    trusted: bool = False  # may hold its cluster's `trusted_blocks`

    @property
    def as_edge(self) -> EdgeProfile:
        """This device as an edge, which computes the head."""
        return EdgeProfile(
            speed_flop_per_s=self.speed_flop_per_s,
            memory_bytes=self.memory_bytes,
            tx_power_w=self.tx_power_max_w,
            overhead_s=self.overhead_s,
            name=self.device_id,
            device_id=self.device_id,
            energy_per_flop_j=self.energy_per_flop_j,
            energy_budget_j=self.energy_budget_j,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeProfile:
    """An edge: decoder speed and transmit power towards the devices.

    Edges of the same ``name`` are one machine, whose speed and memory its clusters share. Where a
    cluster has several edges, ``id`` distinguishes them. ``device_id`` is set for an edge that is
    also a member; the energy of other edges is not counted.
    """

    speed_flop_per_s: bounds.Speed
    memory_bytes: bounds.Bytes
    tx_power_w: bounds.Watts
    overhead_s: bounds.Overhead = 0.0  # as a device's, for the decoder
    name: bounds.Text = ""
    id: bounds.Text = ""
    device_id: bounds.Text = ""
    energy_per_flop_j: bounds.JoulesPerFlop = 0.0
    energy_budget_j: Annotated[float, at_least(0)] = 0.0  # as a device's


@dataclass(frozen=True, slots=True, kw_only=True)
class RadioProfile:
    """The radio that all clusters share: edge bandwidth and noise density."""

    bandwidth_hz: float
    noise_w_per_hz: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRate:
    """The rate of a link as measured before a run, both directions together.

    ``ends`` are device ids, the control unit's included, and the id of an edge, which is "" where
    there is one.
    """

    ends: tuple[bounds.Text, bounds.Text]
    bit_per_s: bounds.Rate


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterProfile:
    """The static side of one cluster, as its control unit describes it."""

    cluster_id: bounds.MemberName
    examples: bounds.Examples
    control_unit: DeviceProfile
    devices: Annotated[tuple[DeviceProfile, ...], bounds.most_entries(MOST_DEVICES)]
    d2d_bandwidth_hz: bounds.Bandwidth  # of hops inside the cluster, as far as both radios go
    server_rate_bit_per_s: bounds.Rate  # control unit <-> Flower server
    link_codec: Annotated[str, one_of("", *CODECS)] = ""  # of all its links; empty: as the run says
    update_codec: Annotated[str, one_of(*UPDATE_CODECS)] = "fp32"  # of its replies, as the run says
    real_links: bool = False  # machines: measured traffic corrects the planned rates
    bundles: bool = False  # its app sends and receives arrays in bundles
    edge: EdgeProfile | None = None  # its own; None: the snapshot's
    other_edges: Annotated[tuple[EdgeProfile, ...], bounds.most_entries(MOST_EDGES)] = ()
    overhead_s: bounds.Overhead = 0.0  # of every round, besides transfers and steps
    link_rates: Annotated[
        tuple[LinkRate, ...], bounds.most_entries(MOST_DEVICES**2)
    ] = ()  # where plans begin; rounds teach better
    trusted_blocks: Annotated[int, at_least(0)] = 0  # the first so many are on trusted devices
    lora_rank: Annotated[int, at_least(0)] = 0  # of its adapters; 0: the run's

    @property
    def members(self) -> tuple[DeviceProfile, ...]:
        """The control unit and then the devices: the order of every member axis."""
        return (self.control_unit, *self.devices)

    @property
    def edges(self) -> tuple[EdgeProfile, ...]:
        """Its own edges in order of preference, of which one serves in a round."""
        return () if self.edge is None else (self.edge, *self.other_edges)

    @property
    def edge_at_home(self) -> bool:
        """Whether the control unit is the edge."""
        return self.edge is not None and self.edge.device_id == self.control_unit.device_id

    @property
    def edge_device(self) -> str:
        """The device that is the edge; empty where none is."""
        return "" if self.edge is None or self.edge_at_home else self.edge.device_id

    @property
    def budgets_j(self) -> dict[str, float]:
        """The energy budgets of all members, including one that is the edge."""
        edges = {edge.device_id: edge.energy_budget_j for edge in self.edges if edge.device_id}
        return edges | {member.device_id: member.energy_budget_j for member in self.members}

    @property
    def edge_id(self) -> str:
        """The id of its edge, or of the preferred one."""
        return "" if self.edge is None else self.edge.id

    def has_devices_beside(self, edge: EdgeProfile) -> bool:
        """Return whether a device is left to hold blocks if this is the edge."""
        return any(device.device_id != edge.device_id for device in self.devices)

    @property
    def can_train(self) -> bool:
        """Whether a device is left to hold blocks beside some edge."""
        return any(map(self.has_devices_beside, self.edges)) if self.edges else bool(self.devices)

    def with_members(self, change: Callable[[DeviceProfile], DeviceProfile]) -> ClusterProfile:
        """Return the same cluster with every member changed."""
        control_unit, *devices = map(change, self.members)
        return replace(self, control_unit=control_unit, devices=tuple(devices))


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelState:
    """Channel power gains of one cluster in one round.

    ``d2d_gain[i][j]`` is the gain between members i and j, where member 0 is the control unit
    and member n+1 is ``devices[n]``; ``edge_gain[i]`` is the gain between member i and the edge.
    """

    d2d_gain: Matrix
    edge_gain: tuple[float, ...]

    def to_member(self, place: int) -> ChannelState:
        """Return the channel to an edge that stands where a member does."""
        own = self.d2d_gain[place]
        return replace(self, edge_gain=(*own[:place], max(own), *own[place + 1 :]))


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkShares:
    """The share of its rate by gain, power and bandwidth that each link reaches; axes as of gains.

    A link of share f takes 1 / f as long, whatever its power and bandwidth.
    """

    d2d: Matrix
    edge: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSnapshot:
    """One cluster at the start of a round; without ``links`` every share is 1."""

    profile: ClusterProfile
    channel: ChannelState
    links: LinkShares | None = None

    def find_channel(self, edge: EdgeProfile) -> ChannelState:
        """Return the channel to this edge, which may be at a member's place."""
        names = [member.device_id for member in self.profile.members]
        if edge.device_id not in names:
            return self.channel
        return self.channel.to_member(names.index(edge.device_id))

    def with_edge(self, edge: EdgeProfile) -> ClusterSnapshot:
        """Return the cluster with this edge alone; a device that is the edge holds no blocks."""
        if edge.device_id:
            budget_j = self.profile.budgets_j.get(edge.device_id, edge.energy_budget_j)
            edge = replace(edge, energy_budget_j=budget_j)
        profile = replace(self.profile, edge=edge, other_edges=())
        one = replace(self, profile=profile, channel=self.find_channel(edge))
        return one.without({edge.device_id})

    def without(self, device_ids: Collection[str]) -> ClusterSnapshot:
        """Return the cluster without these devices; itself where it has none of them."""
        devices, channel, links = self.profile.devices, self.channel, self.links
        kept = [n for n, device in enumerate(devices) if device.device_id not in device_ids]
        if len(kept) == len(devices):
            return self
        members = [0, *(n + 1 for n in kept)]  # 0 is the control unit
        return replace(
            self,
            profile=replace(self.profile, devices=tuple(devices[n] for n in kept)),
            channel=ChannelState(
                d2d_gain=_select_members(channel.d2d_gain, members),
                edge_gain=tuple(channel.edge_gain[i] for i in members),
            ),
            links=links
            and LinkShares(
                d2d=_select_members(links.d2d, members), edge=tuple(links.edge[i] for i in members)
            ),
        )


def _select_members(matrix: Matrix, members: Sequence[int]) -> Matrix:
    return tuple(tuple(matrix[i][j] for j in members) for i in members)


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Everything a scheduler may look at when it plans round ``round_index`` (from 1)."""

    round_index: int
    model: ModelProfile
    edge: EdgeProfile  # of clusters without their own
    radio: RadioProfile
    clusters: tuple[ClusterSnapshot, ...]
    models: Mapping[int, ModelProfile] = field(default_factory=dict)  # of other ranks of adapters

    def find_model(self, profile: ClusterProfile) -> ModelProfile:
        """Return the model with adapters of a cluster's rank."""
        return self.models.get(profile.lora_rank, self.model)

    def find_edge(self, profile: ClusterProfile) -> EdgeProfile:
        """Return the edge of a cluster."""
        return profile.edge or self.edge


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Blocks ``first_block .. stop_block - 1`` on one device, or on it and its ``replicas``.

    Micro-batches alternate among them: m passes number m mod R of all R, the device being 0.
    """

    device_id: str
    first_block: int
    stop_block: int
    replicas: tuple[str, ...] = ()

    @property
    def device_ids(self) -> tuple[str, ...]:
        """All devices that hold the blocks, in the order of their turns."""
        return (self.device_id, *self.replicas)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedExecution:
    """Execution of a plan by stages: the order of passes, and whether devices recompute."""

    schedule: Annotated[str, one_of(*SCHEDULES)] = "1f1b"
    recompute: bool = False  # forward again in the backward pass instead of keeping activations


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterPlan:
    """The round of one cluster; segments are in pipeline order, depths are per replica.

    ``tx_power_w`` is the power of every member's activations (towards the next stage, the control
    unit included), ``gradient_power_w`` that of every device's gradients (towards the previous
    stage); ``energy_j`` covers both. Devices without a segment appear in none of them.
    """

    cluster_id: str
    segments: tuple[Segment, ...]
    micro_batch_size: int
    micro_batches: int
    warmup_depth: tuple[int, ...]  # micro-batches in flight, per pipeline stage (CU, devices, edge)
    local_steps: int
    bandwidth_hz: float
    tx_power_w: Mapping[str, float]
    gradient_power_w: Mapping[str, float]
    latency_s: float  # predicted, of the whole round for this cluster
    step_s: float  # predicted, of one optimizer step
    energy_j: Mapping[str, float]  # predicted, of the round
    memory_bytes: Mapping[str, int]  # predicted peak, of each device with a segment
    model_share: float | None = None  # of `whole_bytes`, kept by every device
    whole_bytes: int | None = None  # that training the whole model takes with these micro-batches
    memory_margin: float = MEMORY_MARGIN  # left free on every device
    hops: tuple[LinkConfig, ...] = ()  # control unit to the first device, ..., the last to the edge
    edge: bounds.Text = ""  # the id of the edge, where the cluster has several
    execution: PlannedExecution = PlannedExecution()

    @property
    def member_ids(self) -> tuple[str, ...]:
        """The control unit, which alone sends no gradients, and the devices in pipeline order."""
        control_unit = next(name for name in self.tx_power_w if name not in self.gradient_power_w)
        return (control_unit, *(segment.device_id for segment in self.segments))

    @property
    def device_ids(self) -> tuple[str, ...]:
        """Every device with a segment, in pipeline order, replicas next to each other."""
        return tuple(name for segment in self.segments for name in segment.device_ids)

    @property
    def fullest_share(self) -> float | None:
        """The largest share of ``whole_bytes`` on one device; None where that is unknown."""
        if not self.whole_bytes:
            return None
        return max(self.memory_bytes.get(name, 0) for name in self.device_ids) / self.whole_bytes

    @property
    def most_bytes(self) -> float:
        """The bytes that a device may hold under ``model_share``; infinite without one."""
        if self.model_share is None or self.whole_bytes is None:
            return inf
        return self.model_share * self.whole_bytes

    @property
    def replicas(self) -> tuple[int, ...]:
        """The number of workers of every stage: control unit, segments, edge."""
        return (1, *(len(segment.device_ids) for segment in self.segments), 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One round, all clusters; clusters that sit out have no entry."""

    round_index: int
    policy: str
    clusters: tuple[ClusterPlan, ...]
    latency_s: float
    rho: float  # rounds to the target relative to the reference plan
    fallback: str | None = None  # why this is not the solver's own plan
    left_out: Mapping[str, str] = field(default_factory=dict)  # why clusters could not be planned

    def find_cluster(self, cluster_id: str) -> ClusterPlan | None:
        """Return the plan of one cluster, or None where it sits this round out."""
        return next((c for c in self.clusters if c.cluster_id == cluster_id), None)

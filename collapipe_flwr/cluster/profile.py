"""Profiles of clusters for the planner: of a cluster file, or of a simulated cluster.

Figures of a real member are the declared ones, else those measured by `collapipe cluster check`,
else those of its kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import harmonic_mean

from collapipe_flwr.config.cluster_file import ClusterConfig, MemberConfig
from collapipe_flwr.config.schema import WorldConfig
from collapipe_flwr.core import bounds
from collapipe_flwr.core.domain import ClusterProfile, DeviceProfile, EdgeProfile, LinkRate
from collapipe_flwr.core.errors import ConfigError, ProtocolError, prefix_errors
from collapipe_flwr.core.json_codec import from_json
from collapipe_flwr.simulation.devices import device_preset, radio_preset
from collapipe_flwr.simulation.world import SERVER_RATE_BIT_PER_S, assumed_edge


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One member; a figure is None where it was not measured, ``fault`` is empty without any.

    Forward and backward passes of one block take ``overhead_s`` for any number of examples, and
    compute at ``speed_flop_per_s``, on the device that ``computes`` names with the ``torch`` build
    there. ``rate_bit_per_s`` and ``delay_s`` (one way) are those of the link from the control unit.
    ``idle_bytes`` is the memory of its daemon before the check made it load anything,
    ``clock_ahead_s`` how far its clock is ahead of the control unit's. ``power_w`` is the reading
    of its ``energy_sensor`` before the benchmark; without a sensor the energy is modelled. Of a
    ``busy`` member, which is at work, nothing was measured that would disturb it.
    """

    name: bounds.Name
    address: bounds.Address = ""
    speed_flop_per_s: bounds.Speed | None = None
    overhead_s: bounds.Overhead | None = None
    memory_bytes: bounds.Bytes | None = None
    computes: bounds.Text = ""
    torch: bounds.Text = ""
    rate_bit_per_s: bounds.Rate | None = None
    delay_s: bounds.Signed | None = None
    idle_bytes: bounds.Bytes | None = None
    clock_ahead_s: bounds.Moment | None = None
    energy_sensor: bounds.Text = ""
    power_w: bounds.Signed | None = None
    busy: bool = False
    fault: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredLink:
    """The link from one device to another, or to the edge; ``delay_s`` is one way."""

    source: bounds.Name
    target: bounds.Name
    rate_bit_per_s: bounds.Rate | None = None
    delay_s: bounds.Signed | None = None
    fault: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements:
    """All members of one cluster, in the order of its file, and the links between them.

    ``links_left_out`` counts links of a large cluster that the check did not try.
    """

    cluster_id: bounds.Name
    members: tuple[Measured, ...]
    links: tuple[MeasuredLink, ...] = ()
    links_left_out: int = 0

    @property
    def faults(self) -> tuple[str, ...]:
        """One sentence per member or link with a fault."""
        return (
            *(f"{m.name}: {m.fault}" for m in self.members if m.fault),
            *(f"{link.source} -> {link.target}: {link.fault}" for link in self.links if link.fault),
        )

    @property
    def busy(self) -> tuple[str, ...]:
        """The members that were not measured because they, or their cluster, were at work."""
        return tuple(member.name for member in self.members if member.busy)

    def find(self, name: str) -> Measured:
        """Look up the figures of a member; all are None if it is not listed."""
        return next((m for m in self.members if m.name == name), Measured(name=name))


def read_measurements(path: Path) -> Measurements:
    """Read the file of an earlier check; the ConfigError says how to write it again."""
    try:
        return from_json(Measurements, path.read_text(), path.name)
    except (OSError, UnicodeDecodeError, ProtocolError) as error:
        raise ConfigError(
            f"measured figures {path} cannot be used ({error}): write them with "
            f"`collapipe cluster check FILE --json {path.name}`"
        ) from error


_GIGA, _MEGA = 1e9, 1e6


def profile_cluster(config: ClusterConfig, examples: int) -> ClusterProfile:
    """Describe a file's cluster; raises ConfigError for an unknown kind or unreadable measurements.

    Energy budgets depend on the model and are set by the server.
    """
    if not config.devices:
        raise ConfigError(
            f"cluster {config.id} has no device yet: let a board join, by the token that "
            "`collapipe cluster token` prints"
        )
    measured = _read_measured(config)
    several = len(config.used_edges) > 1  # then their names are ids
    edge, *others = [_describe_edge(config, each, measured, several) for each in config.used_edges]
    return ClusterProfile(
        cluster_id=config.id,
        examples=examples,
        control_unit=_describe_device(
            config, config.control_unit, measured.find(config.control_unit.name)
        ),
        devices=tuple(_describe_device(config, d, measured.find(d.name)) for d in config.devices),
        d2d_bandwidth_hz=config.links.bandwidth_mhz * _MEGA,
        server_rate_bit_per_s=config.links.server_mbit_per_s * _MEGA,
        link_codec=config.links.codec,
        real_links=True,
        link_rates=_collect_link_rates(config, measured),
        edge=edge,
        other_edges=tuple(filter(None, others)),
        trusted_blocks=config.privacy.trusted_blocks,
        lora_rank=config.lora_rank or 0,
    )


def _read_measured(config: ClusterConfig) -> Measurements:
    nothing = Measurements(cluster_id=config.id, members=())
    return read_measurements(config.measured) if config.measured else nothing


def describe_unknown_edges(config: ClusterConfig) -> list[str]:
    """Say what plans assume of each edge without declared or measured figures."""
    measured = _read_measured(config)
    return [
        f"cluster {config.id}: nothing is known of the edge {edge.name} at {edge.address}, so "
        f"plans begin with {assumed_edge().speed_flop_per_s / _GIGA:g} GFLOP/s: give its "
        "speed-gflop-per-s, or measure it by `collapipe cluster check`"
        for edge in config.used_edges
        if edge.address and _is_unknown(config, edge, measured)
    ]


def _is_unknown(config: ClusterConfig, edge: MemberConfig, measured: Measurements) -> bool:
    known = edge.speed_gflop_per_s or measured.find(edge.name).speed_flop_per_s
    return not known and edge in config.edge_machines


def _describe_edge(
    config: ClusterConfig, edge: MemberConfig, measured: Measurements, several: bool
) -> EdgeProfile | None:
    """Describe an edge; None where its address is unknown. Equal addresses are one machine."""
    at_home = edge.name == config.control_unit.name
    is_machine = edge in config.edge_machines
    if is_machine and not edge.address:
        return None
    member = config.control_unit if at_home else edge
    device = _describe_device(config, member, measured.find(edge.name))
    profile = assumed_edge() if _is_unknown(config, edge, measured) else device.as_edge
    return replace(
        profile,
        name=device.device_id if at_home else member.fingerprint or member.address,
        id=edge.name if several else "",
        device_id="" if is_machine else device.device_id,
    )


def _collect_link_rates(config: ClusterConfig, measured: Measurements) -> tuple[LinkRate, ...]:
    """Collect the measured rates by device ids, the harmonic mean for links measured both ways."""
    members = (config.control_unit, *config.devices)
    ids = {member.name: [config.device_id(member)] for member in members}
    several = len(config.used_edges) > 1
    for edge in config.used_edges:  # its links are also those of the member that it is
        ids.setdefault(edge.name, []).append(edge.name if several else "")
    ways = [(config.control_unit.name, m.name, m.rate_bit_per_s) for m in measured.members]
    ways += [(link.source, link.target, link.rate_bit_per_s) for link in measured.links]
    found: dict[tuple[str, str], list[float]] = {}
    for source, target, rate in ways:
        if rate:
            for one, other in product(ids.get(source, ()), ids.get(target, ())):
                ends = (min(one, other), max(one, other))
                found.setdefault(ends, []).append(rate)
    return tuple(LinkRate(ends=e, bit_per_s=harmonic_mean(r)) for e, r in sorted(found.items()))


def _describe_device(
    config: ClusterConfig, member: MemberConfig, measured: Measured
) -> DeviceProfile:
    with prefix_errors(f"kind of {member.name} in cluster {config.id}"):
        preset = device_preset(member.kind)
    speed = member.speed_gflop_per_s * _GIGA or measured.speed_flop_per_s
    memory = member.memory_mb * _MEGA or measured.memory_bytes
    return DeviceProfile(
        device_id=config.device_id(member),
        overhead_s=0.0 if member.speed_gflop_per_s else measured.overhead_s or 0.0,
        kind=member.kind,
        speed_flop_per_s=speed or preset.speed_flop_per_s,
        memory_bytes=int(memory or preset.memory_bytes),
        energy_per_flop_j=member.energy_per_gflop_j / _GIGA or preset.energy_per_flop_j,
        tx_power_max_w=member.tx_power_w or preset.tx_power_max_w,
        energy_budget_j=0.0,
        trusted=member.trusted,
    )


def describe_cluster(config: WorldConfig, index: int, examples: int) -> ClusterProfile:
    """Describe simulated cluster ``index``; lists of devices repeat when there are too few of them.

    Energy budgets depend on the model and are set by the server.
    """
    if not config.devices:
        raise ConfigError('world.devices is empty: list presets, for example "phone,jetson-nano"')
    kinds = config.devices[index % len(config.devices)]
    name = f"cluster-{index}"
    with prefix_errors("world.control-unit"):
        device_preset(config.control_unit)
    with prefix_errors("world.devices"):
        cluster = build_cluster(
            kinds, config.control_unit, examples, cluster_id=name, radio=config.radio
        )

    def shared(member: DeviceProfile) -> DeviceProfile:
        memory_bytes = int(member.memory_bytes * config.memory_share)
        return replace(member, energy_budget_j=0.0, memory_bytes=memory_bytes)

    cluster = cluster.with_members(shared)
    devices = (replace(d, trusted=n < config.trusted) for n, d in enumerate(cluster.devices))
    ranks = config.lora_ranks or (0,)
    return replace(cluster, devices=tuple(devices), lora_rank=ranks[index % len(ranks)])


def build_cluster(
    kinds: Sequence[str],
    control_unit: str,
    examples: int,
    *,
    cluster_id: str = "these-devices",
    radio: str = "wifi",
) -> ClusterProfile:
    """Build a cluster of presets, without energy budgets; raises ConfigError for an unknown one."""
    return ClusterProfile(
        cluster_id=cluster_id,
        examples=examples,
        control_unit=replace(device_preset(control_unit), device_id=f"{cluster_id}/control-unit"),
        devices=tuple(
            replace(device_preset(kind), device_id=f"{cluster_id}/{number}-{kind}")
            for number, kind in enumerate(kinds, start=1)
        ),
        d2d_bandwidth_hz=radio_preset(radio).d2d_bandwidth_hz,
        server_rate_bit_per_s=SERVER_RATE_BIT_PER_S,
    )

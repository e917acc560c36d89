"""A real cluster as the planner sees it: declared figures, else measured, else of its kind."""

from __future__ import annotations

from collapipe_flwr.core.cluster_file import ClusterConfig, MemberConfig
from collapipe_flwr.core.domain import ClusterProfile, DeviceProfile
from collapipe_flwr.core.errors import blaming
from collapipe_flwr.core.measurements import Measured, Measurements, read_measurements
from collapipe_flwr.simulation.devices import device_preset

_GIGA, _MEGA = 1e9, 1e6


def profile_of(config: ClusterConfig, examples: int) -> ClusterProfile:
    """The cluster of a file; raises ConfigError for an unknown kind or unreadable measurements.

    Energy budgets depend on the model, so the server sets them.
    """
    nothing = Measurements(cluster_id=config.id, members=())
    measured = read_measurements(config.measured) if config.measured else nothing
    return ClusterProfile(
        cluster_id=config.id,
        examples=examples,
        control_unit=_device(config, config.control_unit, measured.of(config.control_unit.name)),
        devices=tuple(_device(config, d, measured.of(d.name)) for d in config.devices),
        d2d_bandwidth_hz=config.links.bandwidth_mhz * _MEGA,
        server_rate_bit_per_s=config.links.server_mbit_per_s * _MEGA,
        link_codec=config.links.codec,
        real_links=True,
    )


def _device(config: ClusterConfig, member: MemberConfig, measured: Measured) -> DeviceProfile:
    with blaming(f"kind of {member.name} in cluster {config.id}"):
        preset = device_preset(member.kind)
    speed = member.speed_gflop_per_s * _GIGA or measured.speed_flop_per_s
    memory = member.memory_mb * _MEGA or measured.memory_bytes
    return DeviceProfile(
        device_id=config.device_id(member),
        kind=member.kind,
        speed_flop_per_s=speed or preset.speed_flop_per_s,
        memory_bytes=int(memory or preset.memory_bytes),
        energy_per_flop_j=member.energy_per_gflop_j / _GIGA or preset.energy_per_flop_j,
        tx_power_max_w=member.tx_power_w or preset.tx_power_max_w,
        energy_budget_j=0.0,
    )

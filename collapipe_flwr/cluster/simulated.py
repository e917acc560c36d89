"""What a simulated cluster says about itself: its devices, from presets in the run-config."""

from __future__ import annotations

from dataclasses import replace

from collapipe_flwr.cluster.local_data import Place
from collapipe_flwr.config.schema import WorldConfig
from collapipe_flwr.core.domain import ClusterProfile, DeviceProfile
from collapipe_flwr.core.errors import ConfigError, blaming
from collapipe_flwr.simulation.devices import device_preset, radio_preset
from collapipe_flwr.simulation.world import SERVER_RATE_BIT_PER_S


def describe_cluster(config: WorldConfig, place: Place, examples: int) -> ClusterProfile:
    """Cluster ``place.index``; lists of devices repeat when there are more clusters than lists.

    Energy budgets depend on the model, so the server sets them.
    """
    if not config.devices:
        raise ConfigError('world.devices is empty: list presets, for example "phone,jetson-nano"')
    kinds = config.devices[place.index % len(config.devices)]
    cluster_id = f"cluster-{place.index}"
    return ClusterProfile(
        cluster_id=cluster_id,
        examples=examples,
        control_unit=_device(config, "control-unit", config.control_unit, f"{cluster_id}/cu"),
        devices=tuple(
            _device(config, "devices", kind, f"{cluster_id}/{number}-{kind}")
            for number, kind in enumerate(kinds, start=1)
        ),
        d2d_bandwidth_hz=radio_preset(config.radio).d2d_bandwidth_hz,
        server_rate_bit_per_s=SERVER_RATE_BIT_PER_S,
    )


def _device(config: WorldConfig, key: str, kind: str, device_id: str) -> DeviceProfile:
    with blaming(f"world.{key}"):
        preset = device_preset(kind)
    memory_bytes = int(preset.memory_bytes * config.memory_share)
    return replace(preset, device_id=device_id, energy_budget_j=0.0, memory_bytes=memory_bytes)

"""Device and radio presets: rounded public figures, not measurements.

``speed`` is the *effective* fp32 training speed, taken as 25-40 % of the vendor's or published
peak, because small-batch transformer training reaches no more. ``energy_per_flop`` is the board
power under load less idle, divided by that speed. ``memory`` leaves room for the operating
system. Measure your own boards where it matters; these are for planning experiments.

Clusters may also be written by hand (`read_fleet`): a JSON or TOML file of device kinds and what
each cluster consists of.

    {"kinds": {"my-board": {"speed_gflop_per_s": 20, "memory_gib": 3, "load_w": 4,
                            "tx_power_w": 0.1}},
     "clusters": [{"devices": ["raspberry-pi-5", "my-board", "phone"], "examples": 800}]}

The first device of a cluster is its control unit. Kinds that are not defined in the file are
presets; ``examples`` and ``id`` may be left out. A kind's ``d2d_mhz`` narrows every hop inside the
cluster that it takes part in.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeGuard

from collapipe_flwr.core.domain import DeviceProfile
from collapipe_flwr.core.errors import ConfigError

GIGA, MEGA = 1e9, 1e6


def _make_board(
    kind: str, gflop_per_s: float, gib: float, load_w: float, tx_power_w: float
) -> DeviceProfile:
    """Make a class of board: a profile without a name and without an energy budget."""
    return DeviceProfile(
        device_id="",
        kind=kind,
        speed_flop_per_s=gflop_per_s * GIGA,
        memory_bytes=int(gib * 2**30),
        energy_per_flop_j=load_w / (gflop_per_s * GIGA),
        tx_power_max_w=tx_power_w,
        energy_budget_j=math.inf,
    )


_PRESETS = (
    # 4x Cortex-A72 at 1.5 GHz: 24 GFLOP/s HPL-class fp32 peak 48; 4 GB board; 3.5 W over idle
    # (raspberrypi.com product brief; published Linpack and power reviews). Wi-Fi about 20 dBm.
    _make_board("raspberry-pi-4", 12.0, 3.0, 3.5, 0.1),
    # 4x Cortex-A76 at 2.4 GHz: fp32 peak 154, HPL 30 fp64; 8 GB board; 6 W over idle
    # (raspberrypi.com product brief; published Linpack and power reviews).
    _make_board("raspberry-pi-5", 35.0, 6.5, 6.0, 0.1),
    # 128-core Maxwell: 236 GFLOP/s fp32 peak; 4 GB shared; 10 W mode (NVIDIA data sheet).
    _make_board("jetson-nano", 80.0, 2.8, 6.5, 0.1),
    # 1024-core Ampere: 1.28 TFLOP/s fp32 peak; 8 GB shared; 15 W mode (NVIDIA data sheet).
    _make_board("jetson-orin-nano", 450.0, 6.0, 10.0, 0.1),
    # Mid-range phone SoC on its big CPU cores: 100-200 fp32 peak, thermally limited to about
    # 3.5 W; 3GPP power class 3 is 23 dBm = 0.2 W.
    _make_board("phone", 50.0, 2.0, 3.5, 0.2),
)

PRESETS: dict[str, DeviceProfile] = {preset.kind: preset for preset in _PRESETS}


def device_preset(kind: str) -> DeviceProfile:
    """Return a board by name, without id and budget; raises ConfigError with the known names."""
    if kind not in PRESETS:
        raise ConfigError(f"unknown device kind {kind!r}: choose one of {', '.join(PRESETS)}")
    return PRESETS[kind]


def scaled(device: DeviceProfile, *, speed: float, power: float) -> DeviceProfile:
    """Scale a device's speed, and its power while computing."""
    return replace(
        device,
        speed_flop_per_s=device.speed_flop_per_s * speed,
        overhead_s=device.overhead_s / speed,
        energy_per_flop_j=device.energy_per_flop_j * power / speed,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RadioPreset:
    """Bands of one kind of uplink and its path loss."""

    kind: str
    edge_bandwidth_hz: float  # shared by all clusters
    d2d_bandwidth_hz: float  # each hop inside a cluster
    carrier_hz: float
    path_loss_exponent: float
    # Thermal noise -174 dBm/Hz and a receiver's noise figure of 7 dB: -167 dBm/Hz = 2e-20 W/Hz.
    noise_w_per_hz: float = 2e-20


_RADIOS = (
    # 802.11ac: 80 MHz channels at 5.2 GHz to the access point, 20 MHz Wi-Fi Direct between devices.
    RadioPreset(
        kind="wifi",
        edge_bandwidth_hz=80e6,
        d2d_bandwidth_hz=20e6,
        carrier_hz=5.2e9,
        path_loss_exponent=3.0,
    ),
    # 5G NR n78: 100 MHz at 3.5 GHz (3GPP TS 38.101-1); 10 MHz sidelink between devices.
    RadioPreset(
        kind="5g",
        edge_bandwidth_hz=100e6,
        d2d_bandwidth_hz=10e6,
        carrier_hz=3.5e9,
        path_loss_exponent=3.2,
    ),
)

RADIOS: dict[str, RadioPreset] = {preset.kind: preset for preset in _RADIOS}


def radio_preset(kind: str) -> RadioPreset:
    """Return the preset of that name; raises ConfigError with the list of known names."""
    if kind not in RADIOS:
        raise ConfigError(f"unknown radio {kind!r}: choose one of {', '.join(RADIOS)}")
    return RADIOS[kind]


FIELDS = ("speed_gflop_per_s", "memory_gib", "load_w", "tx_power_w")


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetCluster:
    """One cluster: its members' kinds, control unit first."""

    cluster_id: str
    members: tuple[DeviceProfile, ...]
    examples: int | None


def read_fleet(path: Path) -> tuple[FleetCluster, ...]:
    """Read the clusters in ``path``; raises ConfigError that names file and entry."""
    try:
        text = path.read_text(encoding="utf-8-sig")
        values = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except OSError as error:
        raise ConfigError(
            f"--devices-from {path} cannot be read ({error.strerror}): correct its path"
        ) from error
    except ValueError as error:
        raise ConfigError(f"--devices-from {path}: neither JSON nor TOML ({error})") from error
    try:
        return _read_clusters(values)
    except ConfigError as error:
        raise ConfigError(f"--devices-from {path}: {error}") from error


def _read_clusters(values: object) -> tuple[FleetCluster, ...]:
    clusters = values.get("clusters") if isinstance(values, Mapping) else None
    if not isinstance(values, Mapping) or not isinstance(clusters, list) or not clusters:
        raise ConfigError('needs a list "clusters" with at least one entry')
    own = values.get("kinds", {})
    if not isinstance(own, Mapping):
        raise ConfigError('"kinds" must map names to boards')
    kinds = PRESETS | {name: _read_kind(str(name), board) for name, board in own.items()}
    fleet = tuple(_read_cluster(m, entry, kinds) for m, entry in enumerate(clusters))
    if len({cluster.cluster_id for cluster in fleet}) < len(fleet):
        raise ConfigError('every cluster needs an "id" of its own')
    return fleet


def _read_kind(name: str, board: Any) -> DeviceProfile:
    numbers: list[Any] = [board.get(f) for f in FIELDS] if isinstance(board, Mapping) else [None]
    if not all(map(_is_positive, numbers)):
        raise ConfigError(f"kind {name!r} needs numbers > 0 for {', '.join(FIELDS)}")
    narrow = board.get("d2d_mhz")
    if narrow is not None and not _is_positive(narrow):
        raise ConfigError(f"kind {name!r}: d2d_mhz must be a number > 0, got {narrow!r}")
    kind = _make_board(name, *map(float, numbers))
    return kind if narrow is None else replace(kind, d2d_bandwidth_hz=narrow * MEGA)


def _is_positive(value: object) -> bool:
    return _is_number(value) and 0 < value < math.inf


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _read_cluster(m: int, entry: Any, kinds: Mapping[str, DeviceProfile]) -> FleetCluster:
    devices = entry.get("devices") if isinstance(entry, Mapping) else None
    if not isinstance(devices, list) or len(devices) < 2:
        raise ConfigError(f'clusters[{m}] needs "devices": a control unit and at least one more')
    examples = entry.get("examples")
    if examples is not None and not (_is_number(examples) and 1 <= examples < math.inf):
        raise ConfigError(f"clusters[{m}].examples must be >= 1, got {examples!r}")
    return FleetCluster(
        cluster_id=str(entry.get("id", f"cluster-{m}")),
        members=tuple(kinds[k] if k in kinds else device_preset(str(k)) for k in map(str, devices)),
        examples=None if examples is None else int(examples),
    )

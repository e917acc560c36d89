"""Clusters written by hand: a JSON or TOML file of device kinds and what each cluster consists of.

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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from collapipe_flwr.core.domain import DeviceProfile
from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.simulation.devices import GIGA, PRESETS, device_preset

MEGA = 1e6
FIELDS = ("speed_gflop_per_s", "memory_gib", "load_w", "tx_power_w")


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetCluster:
    """One cluster: its members' kinds, control unit first."""

    cluster_id: str
    members: tuple[DeviceProfile, ...]
    examples: int | None


def read_fleet(path: Path) -> tuple[FleetCluster, ...]:
    """The clusters in ``path``; raises ConfigError that names file and entry."""
    try:
        text = path.read_text(encoding="utf-8")
        values = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except OSError as error:
        raise ConfigError(f"--devices-from {path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise ConfigError(f"--devices-from {path}: neither JSON nor TOML ({error})") from error
    try:
        return _fleet(values)
    except ConfigError as error:
        raise ConfigError(f"--devices-from {path}: {error}") from error


def _fleet(values: object) -> tuple[FleetCluster, ...]:
    if not isinstance(values, Mapping) or not _is_list(values.get("clusters")):
        raise ConfigError('needs a list "clusters" with at least one entry')
    own = values.get("kinds", {})
    if not isinstance(own, Mapping):
        raise ConfigError('"kinds" must map names to boards')
    kinds = PRESETS | {name: _kind(str(name), board) for name, board in own.items()}
    clusters = tuple(_cluster(m, entry, kinds) for m, entry in enumerate(values["clusters"]))
    if len({c.cluster_id for c in clusters}) < len(clusters):
        raise ConfigError('every cluster needs an "id" of its own')
    return clusters


def _is_list(value: object) -> bool:
    return isinstance(value, list) and bool(value)


def _kind(name: str, board: Any) -> DeviceProfile:
    numbers: list[Any] = [board.get(f) for f in FIELDS] if isinstance(board, Mapping) else [None]
    if not all(_is_number(n) and 0 < n < float("inf") for n in numbers):
        raise ConfigError(f"kind {name!r} needs numbers > 0 for {', '.join(FIELDS)}")
    speed, memory, load, power = (float(n) for n in numbers)
    narrow = board.get("d2d_mhz")
    if narrow is not None and not (_is_number(narrow) and 0 < narrow < float("inf")):
        raise ConfigError(f"kind {name!r}: d2d_mhz must be a number > 0, got {narrow!r}")
    return DeviceProfile(
        device_id="",
        kind=name,
        speed_flop_per_s=speed * GIGA,
        memory_bytes=int(memory * 2**30),
        energy_per_flop_j=load / (speed * GIGA),
        tx_power_max_w=power,
        energy_budget_j=math.inf,
        d2d_bandwidth_hz=None if narrow is None else narrow * MEGA,
    )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _cluster(m: int, entry: Any, kinds: Mapping[str, DeviceProfile]) -> FleetCluster:
    devices = entry.get("devices") if isinstance(entry, Mapping) else None
    if not isinstance(devices, list) or len(devices) < 2:
        raise ConfigError(f'clusters[{m}] needs "devices": a control unit and at least one more')
    examples = entry.get("examples")
    if examples is not None and not (_is_number(examples) and examples >= 1):
        raise ConfigError(f"clusters[{m}].examples must be >= 1, got {examples!r}")
    return FleetCluster(
        cluster_id=str(entry.get("id", f"cluster-{m}")),
        members=tuple(kinds[k] if k in kinds else device_preset(str(k)) for k in map(str, devices)),
        examples=None if examples is None else int(examples),
    )

"""Measured profiles are noisy: plan with their moving averages.

Speed and energy per operation are averaged in the logarithm, per device. A value that differs from
its average by more than a factor of two is a change (throttling, another load), not noise: the
average starts again there. Channels are not averaged: they really change.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from collapipe_flwr.core.domain import ClusterSnapshot, DeviceProfile, Snapshot

CHANGE = math.log(2.0)

Averages = Mapping[str, Mapping[str, tuple[float, float]]]
"""cluster -> device -> (ln speed, ln energy per operation)."""


def smoothed(
    snapshot: Snapshot, averages: Averages, memory: float
) -> tuple[Snapshot, dict[str, dict[str, tuple[float, float]]]]:
    """The snapshot with averaged devices, and the averages after it.

    ``memory`` is the weight of the past; 0 leaves everything as it is. Unusable numbers pass
    through unaveraged, so that the planner can refuse them.
    """
    if memory <= 0.0:
        return snapshot, {}
    after = {cluster: dict(devices) for cluster, devices in averages.items()}
    clusters = tuple(_cluster(c, after, memory) for c in snapshot.clusters)
    return replace(snapshot, clusters=clusters), after


def _cluster(
    cluster: ClusterSnapshot, averages: dict[str, dict[str, tuple[float, float]]], memory: float
) -> ClusterSnapshot:
    profile = cluster.profile
    known = averages.setdefault(profile.cluster_id, {})
    control = _device(profile.control_unit, known, memory)
    devices = tuple(_device(d, known, memory) for d in profile.devices)
    if control is profile.control_unit and all(
        new is old for new, old in zip(devices, profile.devices, strict=True)
    ):
        return cluster
    return replace(cluster, profile=replace(profile, control_unit=control, devices=devices))


def _device(
    device: DeviceProfile, known: dict[str, tuple[float, float]], memory: float
) -> DeviceProfile:
    speed, joule = device.speed_flop_per_s, device.energy_per_flop_j
    if not (0 < speed < math.inf and 0 < joule < math.inf):
        return device
    fresh = (math.log(speed), math.log(joule))
    old = known.get(device.device_id, fresh)
    mean = tuple(
        new if abs(new - past) > CHANGE else memory * past + (1.0 - memory) * new
        for new, past in zip(fresh, old, strict=True)
    )
    known[device.device_id] = (mean[0], mean[1])
    if mean == fresh or max(abs(a - b) for a, b in zip(mean, fresh, strict=True)) < 1e-12:
        return device
    return replace(device, speed_flop_per_s=math.exp(mean[0]), energy_per_flop_j=math.exp(mean[1]))

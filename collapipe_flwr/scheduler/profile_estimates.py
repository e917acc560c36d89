"""Profiles are noisy, biased or old: plan with what rounds really showed, else with averages.

Speed and energy per operation are averaged in the logarithm, per device, in two books: what
profiles claim (``claimed``) and what devices showed while they worked (``shown``). A device that
worked is planned with what it showed, because training is a better measurement of training than
any benchmark before it. A value that differs from its average by more than a factor of two is a
change (throttling, another load), not noise: that average starts again there, and a claim that
moves so far also outdates what was shown. Channels are not averaged: they really change.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from collapipe_flwr.core.domain import (
    ClusterProfile,
    ClusterSnapshot,
    DeviceProfile,
    RoundOutcome,
    Snapshot,
)

CHANGE = math.log(2.0)
SHOWN_MEMORY = 0.5  # weight of the past in what devices show: a round averages over many steps
Pair = tuple[float, float]
"""ln speed, ln energy per operation."""
Averages = Mapping[str, Mapping[str, Pair]]
"""cluster -> device -> pair."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileEstimates:
    """What is known about the devices besides today's profiles."""

    claimed: Averages = field(default_factory=dict)
    shown: Averages = field(default_factory=dict)


def with_profiles(
    snapshot: Snapshot, estimates: ProfileEstimates, memory: float
) -> tuple[Snapshot, ProfileEstimates]:
    """The snapshot with estimated devices, and the estimates after it.

    ``memory`` is the weight of the past in claims; 0 leaves everything as it is. Unusable numbers
    pass through, so that the planner can refuse them.
    """
    if memory <= 0.0:
        return snapshot, ProfileEstimates()
    books = _Averages(estimates, memory)
    clusters = tuple(books.cluster(c) for c in snapshot.clusters)
    return replace(snapshot, clusters=clusters), books.estimates()


def profiles_learned(estimates: ProfileEstimates, outcome: RoundOutcome) -> ProfileEstimates:
    """Fold in what devices showed in a round; whoever measured nothing changes nothing."""
    shown = _copied(estimates.shown)
    for cluster in outcome.clusters:
        known = shown.setdefault(cluster.cluster_id, {})
        for device, speed in (cluster.speed_flop_per_s or {}).items():
            joule = (cluster.energy_per_flop_j or {}).get(device, math.nan)
            if _usable(speed) and _usable(joule):
                fresh = (math.log(speed), math.log(joule))
                known[device] = _blend(known.get(device, fresh), fresh, SHOWN_MEMORY)
    return replace(estimates, shown=shown)


class _Averages:
    """Both books while a snapshot is read."""

    def __init__(self, estimates: ProfileEstimates, memory: float) -> None:
        self.claimed, self.shown = _copied(estimates.claimed), _copied(estimates.shown)
        self.memory = memory

    def estimates(self) -> ProfileEstimates:
        return ProfileEstimates(claimed=self.claimed, shown=self.shown)

    def cluster(self, cluster: ClusterSnapshot) -> ClusterSnapshot:
        """The cluster with estimated members; itself where nothing differs."""
        old = cluster.profile
        control = self._device(old, old.control_unit)
        devices = tuple(self._device(old, device) for device in old.devices)
        if control is old.control_unit and all(map(_same, devices, old.devices)):
            return cluster
        return replace(cluster, profile=replace(old, control_unit=control, devices=devices))

    def _device(self, profile: ClusterProfile, device: DeviceProfile) -> DeviceProfile:
        name, speed, joule = device.device_id, device.speed_flop_per_s, device.energy_per_flop_j
        if not (_usable(speed) and _usable(joule)):
            return device
        claimed = self.claimed.setdefault(profile.cluster_id, {})
        shown = self.shown.get(profile.cluster_id, {})
        fresh = (math.log(speed), math.log(joule))
        before = claimed.get(name, fresh)
        if before != fresh and _apart(before, fresh) > CHANGE:
            shown.pop(name, None)
        claimed[name] = fresh if before == fresh else _blend(before, fresh, self.memory)
        return _estimated(device, fresh, shown.get(name, claimed[name]))


def _estimated(device: DeviceProfile, fresh: Pair, mean: Pair) -> DeviceProfile:
    if mean == fresh or _apart(mean, fresh) < 1e-12:
        return device
    return replace(device, speed_flop_per_s=math.exp(mean[0]), energy_per_flop_j=math.exp(mean[1]))


def _blend(old: Pair, new: Pair, memory: float) -> Pair:
    """The moving average of both, started again where a value has changed."""
    mean = [
        fresh if abs(fresh - past) > CHANGE else memory * past + (1.0 - memory) * fresh
        for fresh, past in zip(new, old, strict=True)
    ]
    return mean[0], mean[1]


def _apart(one: Pair, other: Pair) -> float:
    return max(abs(one[0] - other[0]), abs(one[1] - other[1]))


def _usable(value: float) -> bool:
    return 0 < value < math.inf


def _same(one: DeviceProfile, other: DeviceProfile) -> bool:
    return one is other


def _copied(averages: Averages) -> dict[str, dict[str, Pair]]:
    return {cluster: dict(devices) for cluster, devices in averages.items()}

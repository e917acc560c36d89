"""Devices that plans do without: those that do not answer, and those in quarantine.

A control unit reports at the end of a round which of its devices do not answer. They are left out
of snapshots until it reports them back, so a device that returns takes part one round later.

A device that answered but was at fault (`cluster.suspects`) would be at fault again in the next
round, at the price of a replay. It is left out of the next plans, of twice as many after every
further offence, and then tried again. To die is an offence, too: a device that dies of the work
itself, as for want of memory, is back by the end of the round. The first time it goes unpunished,
for most that die are only started again.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from collapipe_flwr.core.domain import ClusterSnapshot, Snapshot
from collapipe_flwr.core.measurements import ClusterMeasurement

log = logging.getLogger("flwr.collapipe")
FIRST_ROUNDS, MOST_ROUNDS = 2, 64
Absent = Mapping[str, Collection[str]]  # device ids by cluster id


@dataclass(frozen=True, slots=True, kw_only=True)
class Quarantine:
    """A device that is left out up to round ``until``, after this number of ``offences``."""

    until: int
    offences: int = 1


@dataclass(slots=True)
class Absence:
    """The devices that do not answer, and those in quarantine, by cluster."""

    absent: dict[str, tuple[str, ...]] = field(default_factory=dict)
    quarantines: dict[str, dict[str, Quarantine]] = field(default_factory=dict)

    def devices(self, server_round: int) -> dict[str, tuple[str, ...]]:
        """List the devices that are left out of a round, by cluster."""
        found = dict(self.absent)
        for name, quarantines in self.quarantines.items():
            held = tuple(
                d for d, quarantine in quarantines.items() if quarantine.until >= server_round
            )
            found[name] = (*found.get(name, ()), *held)
        return found

    def learn(
        self, server_round: int, cluster_id: str, measured: ClusterMeasurement, edge: str = ""
    ) -> None:
        """Record absences and offences that a cluster reports, and devices that worked.

        Its ``edge`` did, too, at the end.
        """
        self.absent[cluster_id] = measured.absent
        found = self.quarantines.setdefault(cluster_id, {})
        reasons = {**dict.fromkeys(measured.lost, "it died again"), **measured.quarantined}
        for name in (edge, *(report.name for report in measured.reports)):
            if name not in reasons:
                found.pop(name, None)
        for device_id, why in reasons.items():
            offences = found[device_id].offences + 1 if device_id in found else 1
            rounds = min(FIRST_ROUNDS * 2 ** min(offences - 1, 30), MOST_ROUNDS)
            if offences == 1 and device_id not in measured.quarantined:
                rounds = 0
            found[device_id] = Quarantine(until=server_round + rounds, offences=offences)
            if not rounds:
                continue
            log.warning(
                "%s is quarantined, and planned with again in round %d: %s",
                device_id,
                server_round + rounds + 1,
                why,
            )

    def lift(self, cluster_ids: Collection[str]) -> None:
        """Use all devices of these clusters next time: without them they cannot take part."""
        for name in cluster_ids:
            self.absent.pop(name, None)
            for device_id, quarantine in self.quarantines.get(name, {}).items():
                self.quarantines[name][device_id] = replace(quarantine, until=0)


def without_absent(snapshot: Snapshot, absent: Absent) -> Snapshot:
    """Remove absent devices, and clusters that have no device left, from the snapshot.

    Absent edges are removed too, where a cluster has another.
    """
    left = [_without(c, absent.get(c.profile.cluster_id, ())) for c in snapshot.clusters]
    return replace(snapshot, clusters=tuple(c for c in left if c.profile.can_train))


def _without(cluster: ClusterSnapshot, missing: Collection[str]) -> ClusterSnapshot:
    profile = cluster.profile
    edges = [e for e in profile.edges if not {e.id, e.device_id}.intersection(missing)]
    if edges and len(edges) < len(profile.edges):
        one, *others = edges
        profile = replace(profile, edge=one, other_edges=tuple(others))
        cluster = replace(cluster, profile=profile)
    return cluster.without(missing)

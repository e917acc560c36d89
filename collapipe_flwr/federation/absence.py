"""Devices that do not answer, between two rounds: what a planner must not count on.

A control unit says at the end of a round which of its devices are missing. They are left out of
snapshots until it reports them back, so a device that returns takes part one round later.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from collapipe_flwr.core.domain import ChannelState, ClusterSnapshot, LinkShares, Snapshot

Absent = Mapping[str, Collection[str]]  # device ids by cluster id


def without_absent(snapshot: Snapshot, absent: Absent) -> Snapshot:
    """The snapshot of those who are there; a cluster without any device is left out."""
    left = [_without(c, absent.get(c.profile.cluster_id, ())) for c in snapshot.clusters]
    return replace(snapshot, clusters=tuple(c for c in left if c.profile.devices))


def without_clusters(snapshot: Snapshot, cluster_ids: Collection[str]) -> Snapshot:
    """The snapshot without some clusters."""
    left = (c for c in snapshot.clusters if c.profile.cluster_id not in cluster_ids)
    return replace(snapshot, clusters=tuple(left))


def _without(cluster: ClusterSnapshot, missing: Collection[str]) -> ClusterSnapshot:
    devices, channel = cluster.profile.devices, cluster.channel
    kept = [n for n, device in enumerate(devices) if device.device_id not in missing]
    if len(kept) == len(devices):
        return cluster
    members = [0, *(n + 1 for n in kept)]  # 0 is the control unit
    return replace(
        cluster,
        profile=replace(cluster.profile, devices=tuple(devices[n] for n in kept)),
        channel=ChannelState(
            d2d_gain=tuple(tuple(channel.d2d_gain[i][j] for j in members) for i in members),
            edge_gain=tuple(channel.edge_gain[i] for i in members),
        ),
        links=None if cluster.links is None else _of_members(cluster.links, members),
    )


def _of_members(links: LinkShares, members: Sequence[int]) -> LinkShares:
    return LinkShares(
        d2d=tuple(tuple(links.d2d[i][j] for j in members) for i in members),
        edge=tuple(links.edge[i] for i in members),
    )

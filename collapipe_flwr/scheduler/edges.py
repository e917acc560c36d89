"""Snapshots in which every cluster has one edge, where it may have one of several."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from operator import is_

from collapipe_flwr.core.domain import ClusterProfile, ClusterSnapshot, ModelProfile, Plan, Snapshot
from collapipe_flwr.scheduler.link_estimates import LinkEstimates, with_links

Chosen = Mapping[str, str]
"""cluster -> id of its edge."""


def edges_in(plan: Plan | None) -> dict[str, str]:
    """Map each cluster of a plan to its edge."""
    return {} if plan is None else {each.cluster_id: each.edge for each in plan.clusters}


def on_edges(snapshot: Snapshot, chosen: Chosen, links: LinkEstimates) -> Snapshot:
    """Give every cluster one edge: the chosen one, else its first.

    ``links`` are what is known of its links. The snapshot itself where nobody has a choice.
    """
    model = snapshot.model
    clusters = tuple(
        _on_edge(c, chosen.get(c.profile.cluster_id), model) for c in snapshot.clusters
    )
    if all(map(is_, clusters, snapshot.clusters)):
        return snapshot
    return with_links(replace(snapshot, clusters=clusters), links)


def _on_edge(cluster: ClusterSnapshot, name: str | None, model: ModelProfile) -> ClusterSnapshot:
    """Return the cluster with one edge; a device that is the edge holds no blocks."""
    profile = cluster.profile
    if not profile.other_edges:
        return cluster
    usable = [edge for edge in profile.edges if profile.has_devices_beside(edge)]
    edge = next((edge for edge in usable if edge.id == name), usable[0])
    one = cluster.with_edge(edge)
    return replace(one, profile=with_divided_memory(one.profile, model))


def with_divided_memory(cluster: ClusterProfile, model: ModelProfile) -> ClusterProfile:
    """Divide the control unit's memory among its two parts, if it is the edge.

    Each gets the state of its part and half of what is left.
    """
    unit, edge = cluster.control_unit, cluster.edge
    if edge is None or cluster.other_edges or not cluster.edge_at_home:
        return cluster
    if edge.memory_bytes != unit.memory_bytes:  # it is divided already
        return cluster
    own, last = model.embedding.state_bytes, model.decoder.state_bytes
    here = max(own + (unit.memory_bytes - own - last) // 2, 1)
    there = max(unit.memory_bytes - here, 1)
    return replace(
        cluster,
        control_unit=replace(unit, memory_bytes=here),
        edge=replace(edge, memory_bytes=there),
    )

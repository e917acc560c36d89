"""The work of a plan's stages, and the price of a plan with stages as they were measured."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace
from typing import TypeVar

from collapipe_flwr.core.domain import (
    ClusterPlan,
    ClusterProfile,
    ClusterSnapshot,
    DeviceProfile,
    EdgeProfile,
    ModelProfile,
    Plan,
    Snapshot,
)
from collapipe_flwr.core.outcome import StageSample
from collapipe_flwr.costs.price import price
from collapipe_flwr.costs.tables import compute_round_trip_bit_per_s
from collapipe_flwr.costs.work import AHEAD, PricingOptions

Profile = TypeVar("Profile", DeviceProfile, EdgeProfile)
EDGE = ""  # in place of a device's id, where there is one edge


def count_stage_parts(plan: ClusterPlan, model: ModelProfile) -> dict[str, tuple[float, float]]:
    """Count passes and operations of one example in every stage, forward and backward.

    Control unit, devices and the edge by its id; see `StageSample` for what counts as a pass.
    """
    ends = {plan.member_ids[0]: model.embedding, plan.edge: model.decoder}
    recompute = plan.execution.recompute
    parts = {n: (1.0, cost.forward_flop + cost.backward_flop) for n, cost in ends.items()}
    for segment in plan.segments:
        blocks = model.blocks[segment.first_block : segment.stop_block]
        again = sum(block.forward_flop for block in blocks) if recompute else 0.0
        flop = sum(block.forward_flop + block.backward_flop for block in blocks) + again
        own = (len(blocks) * (1.0 + AHEAD * recompute), flop)
        parts |= dict.fromkeys(segment.device_ids, own)
    return parts


def compute_pass_s(profile: DeviceProfile | EdgeProfile, passes: float, flop: float) -> float:
    """Compute the seconds of one micro-batch by a profile."""
    return passes * profile.overhead_s + flop / profile.speed_flop_per_s


def compute_server_s(profile: ClusterProfile, model: ModelProfile) -> float:
    """Compute the seconds of a round's weights from the Flower server and back; see `tables`."""
    whole = model.embedding.parameter_bytes + sum(b.parameter_bytes for b in model.blocks)
    far = profile.real_links or profile.edge_at_home
    whole += model.decoder.parameter_bytes if far else 0
    return 16.0 * whole / compute_round_trip_bit_per_s(profile)


def apply_samples(
    snapshot: Snapshot, cluster_id: str, samples: Collection[StageSample]
) -> Snapshot:
    """Return the snapshot with one cluster's members and edge at the speeds of the samples."""
    known = {sample.device_id: sample for sample in samples if 0 < sample.busy_s < math.inf}

    def measured(profile: Profile, name: str) -> Profile:
        if name not in known:
            return profile
        speed, overhead_s = _fit_speed(profile, known[name])
        return replace(profile, speed_flop_per_s=speed, overhead_s=overhead_s)

    def seen(cluster: ClusterSnapshot) -> ClusterSnapshot:
        if cluster.profile.cluster_id != cluster_id:
            return cluster
        profile = cluster.profile.with_members(lambda member: measured(member, member.device_id))
        own = profile.edge and measured(profile.edge, profile.edge.id)
        return replace(cluster, profile=replace(profile, edge=own))

    has_own = any(c.profile.edge for c in snapshot.clusters if c.profile.cluster_id == cluster_id)
    edge = snapshot.edge if has_own else measured(snapshot.edge, EDGE)
    return replace(snapshot, clusters=tuple(map(seen, snapshot.clusters)), edge=edge)


def _fit_speed(profile: DeviceProfile | EdgeProfile, sample: StageSample) -> tuple[float, float]:
    """Scale speed and overhead by the sample's slowness; without work all of it is overhead."""
    expected_s = compute_pass_s(profile, sample.passes, sample.flop)
    if expected_s <= 0:
        return profile.speed_flop_per_s, sample.busy_s / sample.passes
    slower = sample.busy_s / expected_s
    return profile.speed_flop_per_s / slower, profile.overhead_s * slower


def explain_latency_s(
    plan: ClusterPlan,
    samples: Collection[StageSample],
    snapshot: Snapshot,
    options: PricingOptions | None,
) -> float:
    """Price one cluster's round, in seconds, by the snapshot's links and the measured stages."""
    alone = Plan(round_index=0, policy="", clusters=(plan,), latency_s=0.0, rho=1.0)
    shown = apply_samples(snapshot, plan.cluster_id, samples)
    return price(alone, _take_own_part(shown, plan.cluster_id, options), options).latency_s


def _take_own_part(snapshot: Snapshot, cluster_id: str, options: PricingOptions | None) -> Snapshot:
    """Replace an edge that others share by the cluster's own part of it."""
    profile = next(c.profile for c in snapshot.clusters if c.profile.cluster_id == cluster_id)
    edge = snapshot.find_edge(profile)
    shared = profile.edge is not None or (options is not None and options.edge_shared)
    others = [c.profile.edge for c in snapshot.clusters]
    sharing = sum((o and o.name) == (profile.edge and edge.name) for o in others)
    if not shared or sharing < 2:
        return snapshot
    own = replace(
        edge, speed_flop_per_s=edge.speed_flop_per_s / sharing, name=f"{edge.name} {cluster_id}"
    )
    clusters = tuple(
        replace(c, profile=replace(c.profile, edge=own)) if c.profile is profile else c
        for c in snapshot.clusters
    )
    return replace(snapshot, clusters=clusters)

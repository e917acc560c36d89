"""The rules that a cluster's plan obeys, wherever it comes from."""

from __future__ import annotations

from math import isfinite

from collapipe_flwr.core.domain import ClusterPlan, ClusterProfile, Segment
from collapipe_flwr.core.errors import ScheduleError
from collapipe_flwr.core.links import CODECS
from collapipe_flwr.core.replay import build_unchecked


def check_cluster_plan(plan: ClusterPlan, num_blocks: int | None = None) -> None:
    """Raise ScheduleError unless segments are contiguous, start at 0 and sizes are positive.

    With ``num_blocks`` they must also cover exactly that many blocks.
    """
    where = f"plan of cluster {plan.cluster_id!r}"
    _check_segments(where, plan.segments, num_blocks)
    for name in ("micro_batch_size", "micro_batches", "local_steps"):
        value = getattr(plan, name)
        if value < 1:
            raise ScheduleError(f"{where}: {name} must be >= 1, got {value}")
    if not plan.bandwidth_hz > 0:
        raise ScheduleError(f"{where}: bandwidth_hz must be > 0, got {plan.bandwidth_hz}")
    if len(plan.warmup_depth) != len(plan.segments) + 2 or min(plan.warmup_depth) < 1:
        raise ScheduleError(
            f"{where}: warmup_depth needs one entry >= 1 per stage "
            f"({len(plan.segments) + 2}), got {plan.warmup_depth}"
        )
    if max(plan.replicas) > plan.micro_batches:
        raise ScheduleError(
            f"{where}: a stage has {max(plan.replicas)} replicas, but a step has "
            f"{plan.micro_batches} micro-batches: plan no more replicas than micro-batches"
        )
    if plan.hops:
        _check_hops(where, plan)


def list_strangers(plan: ClusterPlan, profile: ClusterProfile) -> list[str]:
    """List the untrusted devices that would hold some of the cluster's trusted blocks."""
    trusted = {device.device_id for device in profile.devices if device.trusted}
    held = (s.device_ids for s in plan.segments if s.first_block < profile.trusted_blocks)
    return [name for names in held for name in names if name not in trusted]


def check_privacy(plan: ClusterPlan, profile: ClusterProfile) -> None:
    """Raise ScheduleError, whoever made the plan, where it takes blocks or labels to strangers."""
    where = f"plan of cluster {plan.cluster_id!r}"
    if names := list_strangers(plan, profile):
        raise ScheduleError(
            f"{where} gives blocks below privacy.trusted-blocks={profile.trusted_blocks} to "
            f"{', '.join(names)}, which its cluster does not trust: plan it again, or write "
            "trusted = true for the device in the cluster file"
        )
    if profile.edge_at_home and not profile.other_edges and plan.edge:
        raise ScheduleError(
            f"{where} has its head on the edge {plan.edge!r}, but the control unit is the "
            "cluster's only edge, as with privacy.labels = home: plan it again"
        )


def dry_run_plan(plan: ClusterPlan, queue_frames: int | None = None) -> None:
    """Play the schedule that the plan's stages will execute, without computing.

    Raises ScheduleError if it would block over links that hold `queue_frames` frames, or if a stage
    would keep more micro-batches in flight than the plan states.
    """
    where, schedule = f"plan of cluster {plan.cluster_id!r}", plan.execution.schedule
    depths, count = plan.warmup_depth, plan.micro_batches
    found = build_unchecked(schedule, depths, count, plan.replicas)
    for worker, most in zip(found.workers, found.count_in_flight(), strict=True):
        if most > (depth := depths[worker.stage]):
            raise ScheduleError(
                f"{where}: {schedule} keeps {most} micro-batches in flight on {worker}, but "
                f"warmup_depth allows {depth}"
            )
    try:
        found.dry_run(queue_frames)
    except ScheduleError as error:
        raise ScheduleError(f"{where}: {error}") from error


def _check_hops(where: str, plan: ClusterPlan) -> None:
    if len(plan.hops) != len(plan.segments) + 1:
        raise ScheduleError(
            f"{where}: hops needs one entry per hop ({len(plan.segments) + 1}), "
            f"got {len(plan.hops)}"
        )
    for hop in plan.hops:
        if hop.codec not in CODECS:
            raise ScheduleError(f"{where}: a hop's codec must be one of {CODECS}, got {hop.codec}")
        rates = (hop.forward_bit_per_s, hop.backward_bit_per_s)
        if not all(rate is None or (isfinite(rate) and rate > 0) for rate in rates):
            raise ScheduleError(f"{where}: rates of hops must be finite and > 0, got {rates}")


def _check_segments(where: str, segments: tuple[Segment, ...], num_blocks: int | None) -> None:
    if not segments:
        raise ScheduleError(f"{where}: no device has a segment; every block needs a device")
    at = 0
    for segment in segments:
        if segment.first_block != at or segment.stop_block <= at:
            raise ScheduleError(
                f"{where}: device {segment.device_id!r} has blocks "
                f"[{segment.first_block}, {segment.stop_block}) where block {at} comes next; "
                "segments must cover every block exactly once, in order"
            )
        at = segment.stop_block
    if num_blocks is not None and at != num_blocks:
        raise ScheduleError(f"{where}: segments cover {at} blocks, the model has {num_blocks}")
    ids = [name for segment in segments for name in segment.device_ids]
    if len(set(ids)) != len(ids):
        raise ScheduleError(f"{where}: a device has two segments in {ids}; give it one")

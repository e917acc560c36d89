"""A plan without devices that are lost, where every stage keeps one of its replicas.

No block moves: the others take the lost ones' micro-batches. Each may then have more of them in
flight, as far as its memory goes, so that the stages behind find as much to do as before.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import TypeVar

from collapipe_flwr.core.domain import ClusterPlan, Segment
from collapipe_flwr.core.errors import ScheduleError
from collapipe_flwr.core.schedule import ReplicaIndex
from collapipe_flwr.costs.tables import block_table
from collapipe_flwr.costs.work import segment_bytes
from collapipe_flwr.scheduler.plans import dry_run_plan
from collapipe_flwr.scheduler.replan import ReplanInput

Value = TypeVar("Value")


def without_lost(plan: ClusterPlan, rest: ReplanInput) -> ClusterPlan | None:
    """Return the plan for the devices of ``rest``; None where that needs blocks to move.

    A step is predicted to take as much longer as the stage that lost most.
    """
    segments = tuple(_keep_present(segment, rest.present) for segment in plan.segments)
    if any(segment is None for segment in segments):
        return None
    thinned = replace(plan, segments=tuple(segment for segment in segments if segment is not None))
    for depths in _propose_depths(plan, thinned.replicas):
        candidate = _predict(plan, replace(thinned, warmup_depth=depths), rest)
        if candidate is not None and _can_run(candidate, rest.options.schedule):
            return candidate
    return None


def _keep_present(segment: Segment, present: Collection[str]) -> Segment | None:
    names = [name for name in segment.device_ids if name in present]
    return replace(segment, device_id=names[0], replicas=tuple(names[1:])) if names else None


def _propose_depths(plan: ClusterPlan, left: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Propose depths: as many in flight per stage as before, else as many on each device."""
    stages = tuple(zip(plan.warmup_depth, plan.replicas, left, strict=True))
    yield tuple(min(-(-depth * had // has), plan.micro_batches) for depth, had, has in stages)
    yield plan.warmup_depth


def _can_run(plan: ClusterPlan, schedule: str) -> bool:
    try:
        dry_run_plan(plan, schedule)
    except ScheduleError:
        return False
    return True


def _predict(before: ClusterPlan, plan: ClusterPlan, rest: ReplanInput) -> ClusterPlan | None:
    """Predict for the devices that are left; None where a memory is too small."""
    blocks, margin = block_table(rest.model), 1.0 - rest.options.memory_margin
    most = before.most_bytes
    room = {device.device_id: min(device.memory_bytes * margin, most) for device in rest.devices}
    need: dict[str, float] = {}
    more: dict[str, float] = {}
    for stage, (segment, had) in enumerate(
        zip(plan.segments, before.replicas[1:-1], strict=True), 1
    ):
        has = len(segment.device_ids)
        own = len(ReplicaIndex(replicas=has).own(plan.micro_batches))
        flight = min(plan.warmup_depth[stage], own)
        sizes = segment_bytes(blocks, rest.options, plan.micro_batch_size, flight)
        size = float(sizes[segment.first_block, segment.stop_block])
        need |= dict.fromkeys(segment.device_ids, size)
        more |= dict.fromkeys(segment.device_ids, had / has)
    if any(need[name] > room[name] for name in need):
        return None
    longer = max(more.values())
    return replace(
        plan,
        tx_power_w=_drop_gone(plan.tx_power_w, before, plan),
        gradient_power_w=_drop_gone(plan.gradient_power_w, before, plan),
        latency_s=plan.latency_s * longer,
        step_s=plan.step_s * longer,
        energy_j={
            name: joule * more.get(name, 1.0)
            for name, joule in _drop_gone(plan.energy_j, before, plan).items()
        },
        memory_bytes={name: int(size) for name, size in need.items()},
    )


def _drop_gone(
    values: Mapping[str, Value], before: ClusterPlan, plan: ClusterPlan
) -> dict[str, Value]:
    gone = set(before.device_ids) - set(plan.device_ids)
    return {name: value for name, value in values.items() if name not in gone}

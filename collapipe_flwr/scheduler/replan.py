"""A new plan for the rest of a round, when devices of one cluster were lost in the middle of it.

Micro-batches and the edge's warm-up depth stay as planned, so that every step computes what it
would have computed; only segments move. They minimise the step's compute time exactly
(``segment_dp``) over the devices that are left, within their memories. Links are not priced: no
fresh channel states are known in the middle of a round, and the next one is planned in full again.

Where every stage keeps one of its replicas no block moves: the others take the lost ones'
micro-batches. Each may then have more of them in flight, as far as its memory goes, so that the
stages behind find as much to do as before.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypeVar

import numpy as np

from collapipe_flwr.core.domain import (
    ClusterPlan,
    ClusterProfile,
    DeviceProfile,
    EdgeProfile,
    ModelProfile,
    Segment,
)
from collapipe_flwr.core.errors import InfeasibleError, ScheduleError
from collapipe_flwr.core.links import CODECS, LinkConfig
from collapipe_flwr.core.schedule import ReplicaIndex
from collapipe_flwr.costs.arrays import Array
from collapipe_flwr.costs.layouts import sum_spans
from collapipe_flwr.costs.tables import tabulate_blocks
from collapipe_flwr.costs.work import AHEAD, BACK, PricingOptions, count_segment_bytes
from collapipe_flwr.scheduler.plans import dry_run_plan
from collapipe_flwr.scheduler.refusal import compare_sizes
from collapipe_flwr.scheduler.segment_dp import (
    Path,
    SegmentProblem,
    Shortest,
    any_order,
    best_path,
    in_order,
)

MOST_IN_ANY_ORDER = 8  # beyond, all orders take too long: trusted ones, then fastest first
Value = TypeVar("Value")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplanInput:
    """What is left of a cluster whose devices were lost."""

    profile: ClusterProfile
    model: ModelProfile
    present: Collection[str]  # device ids that answer

    @property
    def devices(self) -> tuple[DeviceProfile, ...]:
        """The devices that may hold segments."""
        return tuple(d for d in self.profile.devices if d.device_id in self.present)

    @property
    def first_blocks(self) -> list[int]:
        """The first block that each device may hold."""
        return [0 if device.trusted else self.profile.trusted_blocks for device in self.devices]


def replan(plan: ClusterPlan, rest: ReplanInput) -> ClusterPlan:
    """Plan new segments; raise InfeasibleError if the devices in ``rest`` cannot hold the model.

    Where they can only beyond the plan's share of the model, it has none any more.
    """
    if plan.model_share is not None:
        try:
            return _replan_once(plan, rest)
        except InfeasibleError:
            plan = replace(plan, model_share=None)
    return _replan_once(plan, rest)


def _replan_once(plan: ClusterPlan, rest: ReplanInput) -> ClusterPlan:
    devices = rest.devices
    if not devices:
        raise InfeasibleError(_explain_refusal(plan, rest))
    problem = _make_problem(plan, rest)
    order: Shortest = any_order
    if len(devices) > MOST_IN_ANY_ORDER:
        speeds = [-device.speed_flop_per_s for device in devices]
        order = in_order([int(n) for n in np.lexsort((speeds, rest.first_blocks))])
    try:
        path = best_path(problem, order)
    except InfeasibleError as error:
        raise InfeasibleError(_explain_refusal(plan, rest)) from error
    found = _set_segments(plan, rest, path, path.value(problem))
    dry_run_plan(found)
    return found


def _make_problem(plan: ClusterPlan, rest: ReplanInput) -> SegmentProblem:
    """Price one step in seconds, per device, first block and block behind."""
    devices, blocks, size = rest.devices, tabulate_blocks(rest.model), plan.micro_batch_size
    speed = np.array([d.speed_flop_per_s for d in devices])[:, None, None]
    overhead = np.array([d.overhead_s for d in devices])[:, None, None]
    overhead = overhead * sum_spans(blocks.count_l)
    ahead = size * sum_spans(blocks.forward_flop_l) / speed + AHEAD * overhead
    back = size * sum_spans(blocks.backward_flop_l) / speed + BACK * overhead
    if plan.execution.recompute:
        back = back + ahead
    room = np.array([d.memory_bytes for d in devices])[:, None, None]
    room = np.minimum(room * (1.0 - plan.memory_margin), plan.most_bytes)
    need = _count_segment_bytes(plan, rest)
    allowed = np.tri(len(need), k=-1, dtype=bool).T
    allowed = allowed & (need <= room)
    allowed &= np.arange(len(need))[:, None] >= np.array(rest.first_blocks)[:, None, None]
    hops = np.zeros((len(devices) + 1, len(devices) + 2, len(need)))
    overlaps = plan.execution.schedule == "1f1b"
    embedding, own = rest.model.embedding, rest.profile.control_unit.speed_flop_per_s
    ends = (size * embedding.forward_flop / own, size * embedding.backward_flop / own)
    return SegmentProblem(
        stage_cost_nlk=np.where(allowed, ahead + back, np.inf),
        stage_forward_nlk=ahead + back if overlaps else ahead,
        stage_backward_nlk=np.zeros_like(back) if overlaps else back,
        hop_cost_ijl=hops,
        hop_forward_ijl=hops,
        hop_backward_ijl=hops,
        pace=plan.micro_batches - 1.0,
        floor=(sum(ends), 0.0) if overlaps else ends,
        fixed_cost=sum(ends),
    )


def _count_segment_bytes(plan: ClusterPlan, rest: ReplanInput) -> Array:
    """Count peak bytes of spans of blocks, (L + 1, L + 1), with all micro-batches in flight."""
    flight = plan.micro_batches
    if plan.execution.schedule == "1f1b":
        flight = min(flight, plan.warmup_depth[-1] + len(rest.devices))
    options = PricingOptions.from_plan(plan)
    return count_segment_bytes(tabulate_blocks(rest.model), options, plan.micro_batch_size, flight)


def _set_segments(plan: ClusterPlan, rest: ReplanInput, path: Path, step_s: float) -> ClusterPlan:
    """Put the path's segments into the plan, by name; predictions count computing alone."""
    chosen = [rest.devices[n] for n in path.devices]
    spans = list(zip((0, *path.stops[:-1]), path.stops, strict=True))
    need = _count_segment_bytes(plan, rest)
    members = (rest.profile.control_unit, *chosen)
    # One more per stage upstream of the edge, whose depth is fixed while its session is open.
    edge = plan.warmup_depth[-1]
    return replace(
        plan,
        segments=tuple(
            Segment(device_id=device.device_id, first_block=first, stop_block=stop)
            for device, (first, stop) in zip(chosen, spans, strict=True)
        ),
        warmup_depth=tuple(range(edge + len(members), edge - 1, -1)),
        tx_power_w={
            m.device_id: plan.tx_power_w.get(m.device_id, m.tx_power_max_w) for m in members
        },
        gradient_power_w={
            d.device_id: plan.gradient_power_w.get(d.device_id, d.tx_power_max_w) for d in chosen
        },
        latency_s=plan.local_steps * step_s,
        step_s=step_s,
        energy_j=_compute_energy_j(plan, rest, members, spans),
        memory_bytes={
            device.device_id: int(need[span]) for device, span in zip(chosen, spans, strict=True)
        },
        hops=_choose_hops(plan, [d.device_id for d in chosen]),
    )


def _choose_hops(plan: ClusterPlan, device_ids: Sequence[str]) -> tuple[LinkConfig, ...]:
    """Keep hops between parties that were neighbours; others are coarse and of unknown rate."""
    if not plan.hops:
        return ()
    known = dict(zip(_list_hops([s.device_id for s in plan.segments]), plan.hops, strict=True))
    coarsest = max((hop.codec for hop in plan.hops), key=CODECS.index)
    return tuple(known.get(pair, LinkConfig(codec=coarsest)) for pair in _list_hops(device_ids))


def _list_hops(device_ids: Sequence[str]) -> list[tuple[str, str]]:
    """List the hops of a chain between control unit and edge, both without a name."""
    return list(pairwise(["", *device_ids, ""]))


def _compute_energy_j(
    plan: ClusterPlan,
    rest: ReplanInput,
    members: Sequence[DeviceProfile],
    spans: Sequence[tuple[int, int]],
) -> dict[str, float]:
    """Compute the joules of computing in the whole round; the control unit comes first."""
    examples = _count_examples(plan)
    blocks, embedding = tabulate_blocks(rest.model), rest.model.embedding
    work = sum_spans(blocks.forward_flop_l) + sum_spans(blocks.backward_flop_l)
    flops = [embedding.forward_flop + embedding.backward_flop, *(float(work[s]) for s in spans)]
    pairs = zip(members, flops, strict=True)
    spent = {m.device_id: m.energy_per_flop_j * flop * examples for m, flop in pairs}
    edge = next((each for each in rest.profile.edges if each.id == plan.edge), None)
    return add_head(spent, plan, edge, rest.model)


def add_head(
    energy_j: Mapping[str, float],
    plan: ClusterPlan,
    edge: EdgeProfile | None,
    model: ModelProfile,
    share: float = 1.0,
) -> dict[str, float]:
    """Add a share of the joules of computing the head, if a member of the cluster is the edge."""
    if edge is None or not edge.device_id:
        return dict(energy_j)
    flop = (model.decoder.forward_flop + model.decoder.backward_flop) * _count_examples(plan)
    joules = energy_j.get(edge.device_id, 0.0) + share * edge.energy_per_flop_j * flop
    return {**energy_j, edge.device_id: max(joules, 0.0)}


def _count_examples(plan: ClusterPlan) -> int:
    return plan.local_steps * plan.micro_batches * plan.micro_batch_size


def _explain_refusal(plan: ClusterPlan, rest: ReplanInput) -> str:
    gone = [d.device_id for d in rest.profile.devices if d.device_id not in rest.present]
    if not rest.devices:
        return (
            f"cluster {plan.cluster_id!r} lost all its devices ({', '.join(gone)}): bring one "
            "back; `collapipe cluster check` says which of them answer"
        )
    most = rest.profile.trusted_blocks
    if most and all(rest.first_blocks):
        return (
            f"cluster {plan.cluster_id!r}: without {', '.join(gone)} no trusted device is left to "
            f"hold the first of the blocks, and privacy.trusted-blocks is {most}: bring it back, "
            "or trust another one"
        )
    need = float(_count_segment_bytes(plan, rest)[0, -1])
    room = (1.0 - plan.memory_margin) * sum(d.memory_bytes for d in rest.devices)
    why = f"all blocks need {compare_sizes(need, room, 'they have')}"
    if need <= room:
        why += ", but no cut into contiguous segments keeps every device within its own"
        why += f" and the first {most} of them on trusted ones" if most else ""
    count = len(rest.devices)
    left = "device that is" if count == 1 else f"{count} devices that are"
    return (
        f"cluster {plan.cluster_id!r}: without {', '.join(gone)} no plan fits the "
        f"{left} left ({why}): bring the device back, add one, or "
        "lower the micro-batches"
    )


def drop_lost(plan: ClusterPlan, rest: ReplanInput) -> ClusterPlan | None:
    """Return the plan for the devices of ``rest``; None where that needs blocks to move.

    A step is predicted to take as much longer as the stage that lost most.
    """
    segments = tuple(_keep_present(segment, rest.present) for segment in plan.segments)
    if any(segment is None for segment in segments):
        return None
    thinned = replace(plan, segments=tuple(segment for segment in segments if segment is not None))
    for depths in _propose_depths(plan, thinned.replicas):
        candidate = _predict(plan, replace(thinned, warmup_depth=depths), rest)
        if candidate is not None and _can_run(candidate):
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


def _can_run(plan: ClusterPlan) -> bool:
    try:
        dry_run_plan(plan)
    except ScheduleError:
        return False
    return True


def _predict(before: ClusterPlan, plan: ClusterPlan, rest: ReplanInput) -> ClusterPlan | None:
    """Predict for the devices that are left; None where a memory is too small."""
    blocks, margin = tabulate_blocks(rest.model), 1.0 - plan.memory_margin
    most, options = before.most_bytes, PricingOptions.from_plan(plan)
    room = {device.device_id: min(device.memory_bytes * margin, most) for device in rest.devices}
    need: dict[str, float] = {}
    more: dict[str, float] = {}
    for stage, (segment, had) in enumerate(
        zip(plan.segments, before.replicas[1:-1], strict=True), 1
    ):
        has = len(segment.device_ids)
        own = len(ReplicaIndex(replicas=has).list_own(plan.micro_batches))
        flight = min(plan.warmup_depth[stage], own)
        sizes = count_segment_bytes(blocks, options, plan.micro_batch_size, flight)
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

"""Audits: the control unit computes an interval again by itself, and compares.

It draws the interval before the interval begins and tells nobody, so a dishonest member does not
know which of its steps are audited. It has the weights from which the interval began, the batches
and the seeds, and needs nothing of any member: even all members together cannot hide a wrong
result.

Every stage reports notes of the frames that it took and gave (`pipeline.notes`). The first wrong
note, in the order in which frames cause each other, shows the stage at fault: one that, by its own
notes, took right frames and gave wrong ones. Where a stage notes that it gave a right frame, and
the next one that it took another, one of the two lies, and nobody can tell which: both are named.
The control unit and the edge are trusted.

Machines that round alike must agree bit by bit. On others, frames and learned changes of weights
may differ by `TOLERANCE`, relative.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from collapipe_flwr.cluster.order import CONTROL_UNIT, EDGE, Segments, TrainingOrder
from collapipe_flwr.core.domain import ClusterPlan, ClusterProfile, ModelProfile
from collapipe_flwr.core.errors import AuditFailed, ConfigError, ScheduleError
from collapipe_flwr.models.any_splitter import AnySplitter
from collapipe_flwr.pipeline.notes import CAUSES, GIVEN, TAKEN, agree, make_note_key
from collapipe_flwr.scheduler.refusal import compare_sizes

log = logging.getLogger(__name__)
TOLERANCE = 0.02
MOST_STEPS = 1000  # of an interval: notes of each must fit into a report
MOST_ROUNDED = 50  # the same where members round differently: differences grow with every step
_BELIEVED = (CONTROL_UNIT, EDGE)


def check_audited(order: TrainingOrder) -> None:
    """Raise ScheduleError for a plan whose devices audits could not tell apart.

    Raises ConfigError for intervals that are too long.
    """
    if not order.learning.audit_share:
        return
    _check_length(order.learning.snapshot_every or order.batches, MOST_STEPS)
    if max(order.plan.replicas) > 1:
        raise ScheduleError(
            f"the plan has replicas of a stage, among which trust.audit-share="
            f"{order.learning.audit_share:g} cannot find a liar: set scheduler.replicas=false"
        )


def _check_length(steps: int, most: int) -> None:
    if steps > most:
        raise ConfigError(
            f"trust.audit-share can audit at most {most} steps at once in this cluster, and its "
            f"intervals have {steps}: set train.snapshot-every={most}, or a divisor of it"
        )


def check_room(plan: ClusterPlan, profile: ClusterProfile, model: ModelProfile) -> None:
    """Raise ConfigError where the control unit's machine has no room for the whole model."""
    parts = (model.embedding, *model.blocks, model.decoder)
    flight = plan.micro_batch_size * max(plan.warmup_depth)
    need = sum(part.state_bytes + part.stash_bytes * flight for part in parts)
    room = profile.control_unit.memory_bytes
    if profile.real_links and need > room:
        raise ConfigError(
            "trust.audit-share needs a control unit that holds the whole model, which takes "
            f"{compare_sizes(need, room, 'it has')}: set trust.audit-share=0, or give the cluster "
            "a larger one"
        )


def audit(
    splitter: AnySplitter, order: TrainingOrder, steps: range, told: Segments, due: Segments
) -> None:
    """Compare what all parts ``told`` of an interval of these ``steps`` with what is ``due``.

    Raises AuditFailed with the device to blame, or two of which one lies, and ConfigError where
    this machine does not compute the same bits twice.
    """
    start_s, pairs = time.monotonic(), zip(told.reports, due.reports, strict=True)
    alike = all(said.rounding == right.rounding for said, right in pairs)
    _check_length(len(steps), MOST_STEPS if alike else MOST_ROUNDED)
    tolerance = 0.0 if alike else TOLERANCE
    found = next(_find_wrong_frames(order, steps, told, due, tolerance), None)
    found = found or next(_find_wrong_weights(splitter, order, told, due, tolerance), None)
    log.info(
        "audited steps %d-%d in %.2f s", steps.start, steps.stop - 1, time.monotonic() - start_s
    )
    if found is None:
        return
    names, what = found
    accused = tuple(name for name in names if name not in _BELIEVED)
    if accused:
        doubt = "" if len(accused) == 1 else f", or {accused[1]} claims so falsely"
        raise AuditFailed(accused, f"an audit found that {accused[0]} {what}{doubt}")
    if CONTROL_UNIT in names:
        raise ConfigError(
            "trust.audit-share needs a control unit that computes the same bits twice, but an "
            f"audit found that this one {what}: set train.compute=cpu, or trust.audit-share=0"
        )
    raise AuditFailed((EDGE,), f"an audit found that the edge {what}")


_Finding = tuple[tuple[str, ...], str]  # who, and what they did


def _find_wrong_frames(
    order: TrainingOrder, steps: range, told: Segments, due: Segments, tolerance: float
) -> Iterator[_Finding]:
    """Yield the wrong frames, causes before effects."""
    chain = (CONTROL_UNIT, *order.plan.device_ids, EDGE)
    # By place, because a dishonest member may report under another's name.
    said, right = (
        dict(zip(chain, (report.notes for report in part.reports), strict=True))
        for part in (told, due)
    )
    for step in steps:
        for cause, (kind, down) in enumerate(CAUSES):
            sender = ""
            for name in chain if down else reversed(chain):
                for side in (TAKEN, GIVEN):
                    key = make_note_key(step, cause, side)
                    wanted, note = right[name].get(key), said[name].get(key, "")
                    if wanted is None or agree(note, wanted, tolerance):
                        continue
                    if not note:
                        yield (name,), f"reports no {kind.name} frames of step {step}"
                    elif side == TAKEN:
                        yield (sender, name), f"sent wrong {kind.name} frames in step {step}"
                    yield (name,), f"computed wrong {kind.name} frames in step {step}"
                sender = name


def _find_wrong_weights(
    splitter: AnySplitter, order: TrainingOrder, told: Segments, due: Segments, tolerance: float
) -> Iterator[_Finding]:
    """Yield parts that returned wrong weights, given that their frames are right."""
    owners = {CONTROL_UNIT: splitter.embedding_keys(), EDGE: splitter.edge_keys()}
    for each in order.plan.segments:
        owners[each.device_id] = splitter.segment_keys(each.first_block, each.stop_block)
    for name, owned in owners.items():
        keys = [key for key in owned if key in due.state.weights]
        wanted = due.state.select(keys).flatten()
        found = told.state.flatten()
        if not all(key in found for key in wanted):
            yield (name,), "did not return all that it trained"
        elif not (
            _are_equal(found, wanted) if not tolerance else _are_near(found, wanted, order.weights)
        ):
            yield (name,), "returned other weights than its steps give"


def _are_equal(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> bool:
    return all(torch.equal(found[key], tensor) for key, tensor in wanted.items())


def _are_near(
    found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], before: Mapping[str, Tensor]
) -> bool:
    """Return whether weights have moved alike; optimizer state follows from the frames."""
    off = moved = 0.0
    for key, tensor in wanted.items():
        if key in before and tensor.is_floating_point():
            off += float((found[key].double() - tensor.double()).square().sum())
            moved += float((tensor.double() - before[key].double()).square().sum())
    return off <= TOLERANCE**2 * moved

"""A replica that is lost costs its micro-batches, and no block a new place."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch import Tensor

from collapipe_flwr.cluster.control_unit import ClusterResult, train_round
from collapipe_flwr.cluster.fleet import ThreadFleet
from collapipe_flwr.cluster.hosted import ThreadEdge
from collapipe_flwr.core.domain import PlannedExecution
from collapipe_flwr.models.splitter import Splitter
from collapipe_flwr.scheduler.replan import ReplanInput, drop_lost
from tests.closeness import assert_near, assert_same
from tests.cluster.faults import Fault, failing
from tests.cluster.recovered import STEPS, order
from tests.rounds import Replicated, micro_batches, recovery, steps_of
from tests.thorough import few

CUT = Replicated(
    stops=(2, 5), replicas=(2, 1), micro_batches=(2, 1, 2), schedule="1f1b", depths=(3, 1, 2, 1)
)
BEHIND = Replicated(
    stops=(2, 5), replicas=(1, 2), micro_batches=(2, 1, 2), schedule="1f1b", depths=(3, 3, 1, 1)
)


def plan_of(cut: Replicated):
    """On the devices of `profile`, in order."""
    plan, names = cut.plan(), iter(("A/d0", "A/d1", "A/d2"))
    segments = []
    for segment in plan.segments:
        first, *others = (next(names) for _ in segment.device_ids)
        segments.append(replace(segment, device_id=first, replicas=tuple(others)))
    return replace(plan, segments=tuple(segments))


def run(
    splitter: Splitter, first: dict[str, Tensor], plan, *faults: Fault, every: int = 0
) -> tuple[ClusterResult, dict[str, Tensor]]:
    fleet = ThreadFleet(ThreadEdge(), failing(*faults))
    batches = micro_batches(splitter, steps_of(splitter, CUT, STEPS))
    asked, plans = order(first, plan, every=every), recovery(splitter)
    result = train_round(splitter, asked, iter(batches), fleet, recovery=plans)
    return result, dict(result.weights)


@pytest.mark.parametrize(
    ("cut", "lost", "phase", "every"),
    few(
        [
            (CUT, "A/d1", "forward", 0),
            (CUT, "A/d1", "applied", 1),
            (CUT, "A/d0", "begin", 1),
            (CUT, "A/d1", "apply", 1),
            (BEHIND, "A/d2", "backward", 0),
            (BEHIND, "A/d1", "apply", 1),
        ],
        *(0, 2, 5),
    ),
)
def test_the_weights_are_those_of_the_plan_without_it(
    splitter: Splitter, first, cut: Replicated, lost: str, phase: str, every: int
) -> None:
    plan = plan_of(cut)
    fault = Fault(step=1, device_id=lost, phase=phase)
    result, weights = run(splitter, first, plan, fault, every=every)
    (incident,) = result.incidents
    assert incident.lost == (lost,)
    assert set(result.plan.device_ids) == {"A/d0", "A/d1", "A/d2"} - {lost}
    spans = [(s.first_block, s.stop_block) for s in plan.segments]
    assert [(s.first_block, s.stop_block) for s in result.plan.segments] == spans
    _, undisturbed = run(splitter, first, result.plan)
    if every:  # the first step's gradients were added up by more replicas
        assert_near(weights, undisturbed, depth=STEPS)
    else:
        assert_same(weights, undisturbed)


def test_a_stage_that_loses_its_only_device_is_planned_again(splitter: Splitter, first) -> None:
    fault = Fault(step=1, device_id="A/d2", phase="forward")
    result, weights = run(splitter, first, plan_of(CUT), fault)
    assert "A/d2" not in result.plan.device_ids
    assert result.plan.segments[-1].stop_block == 5
    _, undisturbed = run(splitter, first, result.plan)
    assert_same(weights, undisturbed)


def _rest(splitter: Splitter, memory_bytes: int) -> ReplanInput:
    plans = recovery(splitter, memory_bytes=memory_bytes)
    return ReplanInput(
        profile=plans.profile,
        model=plans.model(),
        present=("A/d0", "A/d2"),
    )


def test_one_that_cannot_hold_the_others_micro_batches_keeps_its_own_depth(
    splitter: Splitter,
) -> None:
    """Under GPipe every micro-batch is in flight, so there blocks have to move."""
    deep = replace(plan_of(CUT), micro_batches=64, warmup_depth=(64, 20, 20, 1))
    roomy = drop_lost(deep, _rest(splitter, 2**30))
    assert roomy is not None and roomy.warmup_depth == (64, 40, 20, 1)
    most = max(roomy.memory_bytes.values())
    tight = drop_lost(deep, _rest(splitter, most - 1000))
    assert tight is not None and tight.warmup_depth == deep.warmup_depth
    gpipe = replace(deep, warmup_depth=(64,) * 4, execution=PlannedExecution(schedule="gpipe"))
    assert drop_lost(gpipe, _rest(splitter, most - 1000)) is None


def test_predictions_are_of_those_that_are_left(splitter: Splitter) -> None:
    watts = dict.fromkeys(("A/cu", "A/d0", "A/d1", "A/d2"), 0.1)
    plan = replace(plan_of(CUT), tx_power_w=watts, energy_j=watts)
    found = drop_lost(plan, _rest(splitter, 2**30))
    assert found is not None
    assert found.energy_j == {"A/cu": 0.1, "A/d0": 0.2, "A/d2": 0.1}
    assert found.tx_power_w.keys() == {"A/cu", "A/d0", "A/d2"}
    assert found.step_s == 2 * plan.step_s

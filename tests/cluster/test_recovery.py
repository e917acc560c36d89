"""Devices die at every point of a round: what comes out is an undisturbed run on the new plan."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from typing import Any

import pytest

from collapipe_flwr.cluster.control_unit import evaluate_batches, train_round
from collapipe_flwr.cluster.fleet import ThreadFleet
from collapipe_flwr.cluster.hosted import ThreadEdge
from collapipe_flwr.cluster.recovery import MOST_REPLAYS, RecoveringPipeline, Recovery
from collapipe_flwr.core.domain import ClusterPlan
from collapipe_flwr.core.errors import EdgeLost, InfeasibleError, LinkError, ScheduleError
from collapipe_flwr.models.splitter import Splitter
from tests.closeness import assert_near, assert_same, near
from tests.cluster.faults import PHASES, Fault, PowerCut, failing
from tests.cluster.recovered import CUT, STEPS, order, run
from tests.rounds import (
    costs_of,
    micro_batches,
    profile,
    recovery,
    steps_of,
    tiny_batch,
    without_labels,
)

SLOW = pytest.mark.slow
DEVICES = ("A/d0", "A/d1", "A/d2")


def deaths() -> Iterator[Any]:
    """Every device in every phase, in one step or more; each phase and each device once quickly."""
    quick = set(zip(PHASES, itertools.cycle(DEVICES), strict=False))
    for place in itertools.product(PHASES, DEVICES):
        where = "-".join(reversed(place))
        marks = () if place in quick else SLOW
        yield pytest.param(*place, 0, (1,), id=f"whole-round-{where}", marks=marks)
        yield pytest.param(*place, 0, (0, 2), id=f"whole-round-more-{where}", marks=SLOW)
        yield pytest.param(*place, 1, range(STEPS), id=f"each-step-{where}", marks=SLOW)


@pytest.mark.parametrize(("phase", "device_id", "every", "steps"), list(deaths()))
def test_whatever_dies_whenever_the_weights_are_those_of_the_new_plan(
    splitter: Splitter, first, undisturbed, phase: str, device_id: str, every: int, steps
) -> None:
    for step in steps:
        fault = Fault(step=step, device_id=device_id, phase=phase)
        result, weights = run(splitter, first, fault, every=every)
        assert device_id not in {s.device_id for s in result.plan.segments}
        assert_same(weights, undisturbed(result.plan))
        assert len(result.losses) == STEPS
        (incident,) = result.incidents
        assert incident.lost == (device_id,)
        assert incident.from_step == (step if every else 0)
        assert incident.resumed_s > incident.noticed_s
        assert not [t for t in threading.enumerate() if t.name.startswith("device ")]


def trusting(splitter: Splitter, *names: str) -> Recovery:
    """Recovery in a cluster whose first block is for these devices alone."""
    known = profile()
    devices = tuple(replace(d, trusted=d.device_id in names) for d in known.devices)
    known = replace(known, devices=devices, trusted_blocks=1)
    return Recovery(profile=known, model=lambda: costs_of(splitter))


@pytest.mark.parametrize("work", [train_round, evaluate_batches])
def test_a_plan_that_its_own_cluster_does_not_trust_reaches_no_device(
    splitter: Splitter, first, work: Callable[..., Any]
) -> None:
    """Whatever the server believes of the cluster's devices."""
    fleet = ThreadFleet(ThreadEdge(), lambda *_: pytest.fail("a device was opened"))
    batches = micro_batches(splitter, steps_of(splitter, CUT, STEPS))
    with pytest.raises(ScheduleError, match="A/d0, which its cluster does not trust"):
        work(splitter, order(first), batches, fleet, recovery=trusting(splitter, "A/d1"))


def test_the_first_block_moves_to_a_trusted_device_or_to_none(
    splitter: Splitter, first, undisturbed
) -> None:
    """The others are faster."""
    for others, fault in ((("A/d1",), None), ((), InfeasibleError)):
        fleet = ThreadFleet(ThreadEdge(), failing(Fault(step=1, device_id="A/d0", phase="forward")))
        batches = micro_batches(splitter, steps_of(splitter, CUT, STEPS))
        plans = trusting(splitter, "A/d0", *others)
        if fault is not None:
            with pytest.raises(fault, match="no trusted device is left"):
                train_round(splitter, order(first), batches, fleet, recovery=plans)
            continue
        result = train_round(splitter, order(first), batches, fleet, recovery=plans)
        assert result.plan.segments[0].device_id == "A/d1"
        assert_same(dict(result.weights), undisturbed(result.plan))


def test_a_loss_leaves_the_optimiser_that_an_undisturbed_round_leaves(
    splitter: Splitter, first
) -> None:
    """Over two rounds; the second begins with the optimiser of the first."""
    ends = []
    for fault in ((), (Fault(step=1, device_id="A/d1", phase="backward"),)):
        slots, plan = {}, None
        weights = dict(first)
        for faults in ((), fault):
            batches = micro_batches(splitter, steps_of(splitter, CUT, STEPS))
            asked = replace(order(weights, plan), slots=slots, keep_optimizer=True)
            fleet = ThreadFleet(ThreadEdge(), failing(*faults))
            plans = recovery(splitter)
            result = train_round(splitter, asked, batches, fleet, recovery=plans)
            weights, slots = {**weights, **result.weights}, result.slots
        ends.append((weights, slots))
    (calm, calm_slots), (hit, hit_slots) = ends
    assert calm_slots.keys() == hit_slots.keys() and calm_slots
    for tensors in calm_slots.values():
        assert float(tensors[0]) == 2 * STEPS  # AdamW's own count of steps
    for number in range(3):
        assert_near(
            *({k: t[number] for k, t in found.items()} for found in (hit_slots, calm_slots))
        )
    assert_near(hit, calm)


def test_snapshots_change_nothing(splitter: Splitter, first, undisturbed) -> None:
    for every in (1, 2):
        result, weights = run(splitter, first, every=every)
        assert not result.incidents
        assert_same(weights, undisturbed(CUT.plan()))
        assert [r.name for r in result.reports] == ["control-unit", *DEVICES, "edge"]
        assert all(report.steps == STEPS for report in result.reports)


@pytest.mark.parametrize("every", [0, 1, 2])
@pytest.mark.parametrize("breaks", ["nothing", "a device"])
def test_the_edge_reports_each_step_once(splitter: Splitter, first, every, breaks: str) -> None:
    faults = [Fault(step=1, device_id="A/d1", phase="backward")] if breaks == "a device" else []
    fleet = ThreadFleet(ThreadEdge(), failing(*faults))
    batches = micro_batches(splitter, steps_of(splitter, CUT, STEPS))
    asked = order(first, every=every)
    course = RecoveringPipeline(splitter, asked, fleet, recovery(splitter))
    course.run(batches)
    assert len(course.incidents) == (breaks != "nothing")
    ends = [interval.held.reports[-2:] for interval in course.intervals]
    assert sum(edge.steps for _, edge in ends) == STEPS
    for last, report in ends:
        assert report.received_up.bytes == last.sent_down.bytes > 0
        assert report.sent_up.bytes == last.received_down.bytes > 0


def test_steps_without_labels_are_none_for_snapshots_either(splitter: Splitter, first) -> None:
    steps = steps_of(splitter, CUT, 4)
    steps[::2] = [[without_labels(batch) for batch in step] for step in steps[::2]]
    ends = []
    for every in (0, 1):
        batches = micro_batches(splitter, steps)
        asked, plans = order(first, every=every), recovery(splitter)
        fleet = ThreadFleet(ThreadEdge())
        result = train_round(splitter, asked, batches, fleet, recovery=plans)
        assert len(result.losses) == 2
        ends.append(dict(result.weights))
    assert_same(*ends)


def test_two_devices_one_after_the_other(splitter: Splitter, first, undisturbed) -> None:
    faults = (
        Fault(step=0, device_id="A/d2", phase="applied"),
        Fault(step=2, device_id="A/d1", phase="backward"),
    )
    result, weights = run(splitter, first, *faults, every=2)
    assert [i.lost for i in result.incidents] == [("A/d2",), ("A/d1",)]
    assert [i.from_step for i in result.incidents] == [0, 2]
    assert {s.device_id for s in result.plan.segments} == {"A/d0"}
    assert_same(weights, undisturbed(result.plan))


def test_devices_lost_one_by_one_before_the_first_step_is_done_are_all_in_the_records(
    splitter: Splitter, first, undisturbed
) -> None:
    faults = (
        Fault(step=0, device_id="A/d2", phase="forward"),
        Fault(step=1, device_id="A/d1", phase="backward"),
    )
    result, weights = run(splitter, first, *faults)
    assert [i.lost for i in result.incidents] == [("A/d2",), ("A/d1",)]
    assert [i.from_step for i in result.incidents] == [0, 0]
    before, after = result.incidents
    assert before.noticed_s < after.noticed_s < after.resumed_s == before.resumed_s
    assert_same(weights, undisturbed(result.plan))


def test_a_link_that_breaks_behind_the_loss_of_a_device_does_not_hide_it(
    splitter: Splitter, first, undisturbed
) -> None:
    kinds: list[BaseException] = [PowerCut("lost"), LinkError("the radio stuttered")]

    def strike() -> None:
        raise kinds.pop(0)

    faults = (
        Fault(step=0, device_id="A/d2", phase="forward"),
        Fault(step=1, device_id="A/d1", phase="backward"),
    )
    result, weights = run(splitter, first, *faults, die=strike)
    assert [i.lost for i in result.incidents] == [("A/d2",), ()]
    assert "the radio stuttered" in result.incidents[1].reason
    assert "A/d2" not in {s.device_id for s in result.plan.segments}
    assert_same(weights, undisturbed(result.plan))


class Flickering(ThreadFleet):
    """Whose devices answer again as soon as somebody else was lost."""

    def find_missing(self, device_ids: Collection[str]) -> frozenset[str]:
        lost = super().find_missing(device_ids)
        self._crashed.clear()
        return lost


def test_a_device_that_was_lost_stays_out_until_the_round_is_over(
    splitter: Splitter, first
) -> None:
    lost = enumerate(("A/d1", "A/d2"))  # one after the other: nobody begins step 1 without step 0
    faults = [Fault(step=step, device_id=name, phase="begin") for step, name in lost]
    fleet = Flickering(ThreadEdge(), failing(*faults))
    batches = micro_batches(splitter, steps_of(splitter, CUT, STEPS))
    result = train_round(splitter, order(first), batches, fleet, recovery=recovery(splitter))
    assert [i.lost for i in result.incidents] == [("A/d1",), ("A/d2",)]
    assert {s.device_id for s in result.plan.segments} == {"A/d0"}


def test_a_new_plan_computes_what_the_old_one_would_have(
    splitter: Splitter, first, undisturbed
) -> None:
    result, weights = run(
        splitter, first, Fault(step=1, device_id="A/d1", phase="backward"), every=1
    )
    assert_near(weights, undisturbed(CUT.plan()))
    assert result.plan.segments != CUT.plan().segments


def test_a_link_that_breaks_while_all_live_is_replayed_on_the_same_plan(
    splitter: Splitter, first, undisturbed
) -> None:

    def hiccup() -> None:
        raise LinkError("the radio stuttered")

    stages = failing(Fault(step=1, device_id="A/d1", phase="send"), die=hiccup)
    batches = micro_batches(splitter, steps_of(splitter, CUT, STEPS))
    fleet = ThreadFleet(ThreadEdge(), stages)
    result = train_round(splitter, order(first), batches, fleet, recovery=recovery(splitter))
    assert result.plan.segments == CUT.plan().segments
    assert result.incidents[0].lost == ()
    assert "the radio stuttered" in result.incidents[0].reason
    weights = dict(result.weights)
    assert_same(weights, undisturbed(CUT.plan()))


class LosesEdge(ThreadEdge):
    """Which is gone when a second chain begins."""

    begun = 0

    def open(self, splitter, order):
        self.begun += 1
        if self.begun > 1:
            raise EdgeLost("edge at 10.0.0.9:50061 cannot be reached")
        return super().open(splitter, order)


def test_an_edge_that_is_gone_does_not_hide_what_broke_first(splitter: Splitter, first) -> None:
    def hiccup() -> None:
        raise LinkError("the radio stuttered")

    stages = failing(Fault(step=1, device_id="A/d1", phase="send"), die=hiccup)
    batches = micro_batches(splitter, steps_of(splitter, CUT, STEPS))
    fleet = ThreadFleet(LosesEdge(), stages)
    told = "the radio stuttered.*; the round cannot be replayed: edge at 10.0.0.9:50061 cannot"
    with pytest.raises(LinkError, match=told):
        train_round(splitter, order(first), batches, fleet, recovery=recovery(splitter))


def test_a_round_that_fails_names_all_that_it_lost(splitter: Splitter, first) -> None:
    edge, fault = LosesEdge(), Fault(step=0, device_id="A/d2", phase="forward")
    edge.begun = -1  # there for one replay more
    fleet, plans = ThreadFleet(edge, failing(fault)), recovery(splitter)
    batches = micro_batches(splitter, steps_of(splitter, CUT, STEPS))
    with pytest.raises(EdgeLost, match=r"cannot be reached; the round lost A/d2$"):
        train_round(splitter, order(first, every=1), batches, fleet, recovery=plans)


def test_what_breaks_for_ever_is_given_up(splitter: Splitter, first) -> None:
    tries = []

    def hiccup() -> None:
        tries.append(1)
        raise LinkError("the radio is broken")

    faults = [Fault(step=0, device_id="A/d1", phase="begin")] * 9
    fleet = ThreadFleet(ThreadEdge(), _one_at_a_time(faults, hiccup))
    batches = micro_batches(splitter, steps_of(splitter, CUT, STEPS))
    with pytest.raises(LinkError, match="the radio is broken"):
        train_round(splitter, order(first), batches, fleet, recovery=recovery(splitter))
    assert len(tries) == MOST_REPLAYS + 1


def _one_at_a_time(faults: list[Fault], die):
    """Stages of each interval share one fault; the next interval gets the next."""
    makers = iter([failing(fault, die=die) for fault in faults])
    made: list = []

    def make(*args, **more):
        if len(made) % len(DEVICES) == 0:
            made_by.append(next(makers))
        made.append(1)
        return made_by[-1](*args, **more)

    made_by: list = []
    return make


def test_a_replayed_round_tests_its_probe_again_and_counts_it_once(
    splitter: Splitter, first
) -> None:
    results = []
    for faults in ((), (Fault(step=3, device_id="A/d1", phase="backward"),)):
        batches = micro_batches(splitter, steps_of(splitter, CUT, STEPS))
        probe = (step for step in batches[:2])
        fleet = ThreadFleet(ThreadEdge(), failing(*faults))
        asked, plans = order(first, every=2), recovery(splitter)
        results.append(train_round(splitter, asked, batches, fleet, probe, recovery=plans))
    calm, hit = results
    assert (
        hit.incidents[0].from_step == 0
    )  # the fourth frame is the second step of the first interval
    assert hit.probe == calm.probe and calm.probe.targets > 0
    assert hit.losses == near(calm.losses)


def test_without_room_for_the_rest_the_round_fails_with_one_sentence(
    splitter: Splitter, first
) -> None:
    fleet = ThreadFleet(ThreadEdge(), failing(Fault(step=0, device_id="A/d1", phase="forward")))
    batches = micro_batches(splitter, steps_of(splitter, CUT, STEPS))
    tight = recovery(splitter, memory_bytes=60_000)
    with pytest.raises(InfeasibleError, match=r"'A': without A/d1 no plan fits the 2 devices"):
        train_round(splitter, order(first), batches, fleet, recovery=tight)


def test_the_rest_leaves_as_much_memory_free_as_the_plan_did(splitter: Splitter, first) -> None:
    def without(margin: float, memory_bytes: int = 2**30) -> ClusterPlan:
        fleet = ThreadFleet(ThreadEdge(), failing(Fault(step=0, device_id="A/d1", phase="forward")))
        batches = micro_batches(splitter, steps_of(splitter, CUT, STEPS))
        asked = order(first, replace(CUT.plan(), memory_margin=margin))
        rest = recovery(splitter, memory_bytes=memory_bytes)
        return train_round(splitter, asked, batches, fleet, recovery=rest).plan

    fullest = max(without(0.05).memory_bytes.values())
    without(0.05, memory_bytes=round(1.1 * fullest))
    with pytest.raises(InfeasibleError, match="without A/d1 no plan fits"):
        without(0.5, memory_bytes=round(1.1 * fullest))


@pytest.mark.parametrize("device_id", DEVICES)
def test_an_evaluation_goes_on_without_a_device_that_dies(
    splitter: Splitter, first, device_id: str
) -> None:
    batches = micro_batches(splitter, steps_of(splitter, CUT, STEPS))
    loss = evaluate_batches(splitter, order(first), batches, ThreadFleet(ThreadEdge()))
    stages = failing(Fault(step=1, device_id=device_id, phase="forward"))
    hit = evaluate_batches(
        splitter,
        order(first),
        iter(batches),
        ThreadFleet(ThreadEdge(), stages),
        recovery=recovery(splitter),
    )
    assert hit.targets == loss.targets
    assert hit.loss == near(loss.loss)


def test_without_recovery_a_lost_device_fails_the_round(splitter: Splitter, first) -> None:
    fleet = ThreadFleet(ThreadEdge(), failing(Fault(step=0, device_id="A/d1", phase="forward")))
    batches = micro_batches(splitter, [[tiny_batch(splitter, 2, 0)] * 2])
    with pytest.raises(LinkError, match="A/d1"):
        train_round(splitter, replace(order(first)), batches, fleet)

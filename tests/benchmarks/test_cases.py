"""The bench compares like with like, and its bound is the event simulator's."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.data_plane.cases import (
    Terms,
    loopback_cases,
    slow_device_cases,
    slow_link_cases,
    textbook_cases,
)
from benchmarks.data_plane.duel import bound_s
from benchmarks.data_plane.job import Job, StageSeconds, StepSeconds
from benchmarks.data_plane.model import BenchPart, Shape, make_batch, mean_loss
from tests.closeness import near

SHAPE = Shape(width=32, tokens=8, micro_batch=2, micro_batches=4)
SPEED = 1e9


def test_on_loopback_both_sides_do_the_same_but_warm_up():
    cases = loopback_cases(Terms(shape=SHAPE), SPEED)
    assert all(replace(case.ours, depths=()) == case.theirs for case in cases)
    assert all(case.ours == case.theirs for case in cases if case.ours.schedule == "gpipe")
    textbook = textbook_cases(Terms(shape=SHAPE))
    assert all(case.ours == case.theirs for case in textbook)
    assert {case.theirs.split for case in textbook} == {case.theirs.split for case in cases}
    assert {case.ours.stages for case in cases} == {2, 3}
    assert len({(case.ours.schedule, case.ours.split) for case in cases}) == 8


def test_a_slow_device_gets_fewer_blocks_and_keeps_its_slowness():
    for case in slow_device_cases(Terms(shape=SHAPE), SPEED):
        blocks = dict(zip(case.ours.slow, case.ours.split, strict=True))
        assert sum(case.ours.split) == sum(case.theirs.split)
        assert 3.0 not in case.ours.slow or blocks[3.0] < 3
        assert case.theirs.split == (0, 3, 3, 0)


def test_a_slow_link_deepens_the_warm_up_and_a_codec_shortens_its_hops():
    cases = slow_link_cases(Terms(schedules=("1f1b",)), 70e9)
    exact, halved = cases
    assert exact.ours.planned_depths[0] > len(exact.ours.split)
    assert halved.hop_s == pytest.approx(exact.hop_s / 2)
    assert exact.ours.shape == exact.theirs.shape


def test_a_slower_first_stage_is_not_kept_waiting_for_its_first_gradient():
    jobs = [case.ours for case in loopback_cases(Terms(shape=SHAPE), SPEED)]
    depths = {job.split: job.planned_depths for job in jobs if job.schedule == "1f1b"}
    assert depths[4, 2] == (3, 1)
    assert all(job.planned_depths == (4,) * job.stages for job in jobs if job.schedule == "gpipe")


def test_any_cut_computes_the_same_loss():
    ids, labels = make_batch(SHAPE)
    losses = []
    for split in ((3, 3), (1, 3, 2), (0, 6, 0)):
        hidden = ids
        for stage in range(len(split)):
            hidden = BenchPart(SHAPE, split, stage)(hidden)
        losses.append(mean_loss(hidden, labels).item())
    assert losses == near([losses[0]] * 3)


def test_the_bound_of_two_equal_stages_is_the_closed_form():
    stage = StageSeconds(forward_s=1.0, backward_s=2.0, weights_s=0.0, optimizer_s=0.5)
    job = Job(schedule="gpipe", split=(3, 3), shape=SHAPE)
    step = StepSeconds(step_s=20.0, stages=(stage, stage))
    micro_batches = SHAPE.micro_batches
    assert bound_s(job, step, 0.0) == pytest.approx((micro_batches + 1) * 3.0 + 0.5)
    assert bound_s(job, step, 0.25) == pytest.approx((micro_batches + 1) * 3.0 + 0.5 + 0.5)


def test_gradients_of_weights_are_awaited_by_nobody_but_their_stage():
    stage = StageSeconds(forward_s=1.0, backward_s=1.0, weights_s=1.0, optimizer_s=0.5)
    job = Job(schedule="gpipe", split=(3, 3), shape=SHAPE)
    step = StepSeconds(step_s=20.0, stages=(stage, stage))
    assert bound_s(job, step, 0.0) == pytest.approx((SHAPE.micro_batches + 1) * 3.0 - 1.0 + 0.5)

"""Laws of schedules: complete, in order, bounded, never blocked, and honest when they block."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from collapipe_flwr.core.errors import ScheduleError
from collapipe_flwr.core.replay import Schedule, build_schedule, gpipe, one_f_one_b
from collapipe_flwr.core.schedule import Action, Op, list_stage_actions

falling_depths = st.lists(st.integers(1, 9), min_size=1, max_size=6).map(
    lambda depths: sorted(depths, reverse=True)
)


@given(
    depths=falling_depths, micro_batches=st.integers(1, 12), name=st.sampled_from(["gpipe", "1f1b"])
)
def test_each_micro_batch_goes_forward_and_backward_once_per_stage(depths, micro_batches, name):
    schedule = build_schedule(name, depths, micro_batches)
    once = Counter(Action(op, m) for op in Op for m in range(micro_batches))
    for actions in schedule.actions:
        assert Counter(actions) == once
        for m in range(micro_batches):
            assert actions.index(Action(Op.FORWARD, m)) < actions.index(Action(Op.BACKWARD, m))


@given(depths=falling_depths, micro_batches=st.integers(1, 12))
def test_1f1b_never_holds_more_than_its_depth(depths, micro_batches):
    schedule = one_f_one_b(depths, micro_batches)
    assert schedule.count_in_flight() == tuple(min(d, micro_batches) for d in depths)


@given(stages=st.integers(1, 5), micro_batches=st.integers(1, 8))
def test_gpipe_does_all_forwards_first_and_meets_the_bubble_bound(stages, micro_batches):
    schedule = gpipe(stages, micro_batches)
    for actions in schedule.actions:
        assert [a.op for a in actions] == [Op.FORWARD] * micro_batches + [
            Op.BACKWARD
        ] * micro_batches
    assert schedule.dry_run() == 2 * (micro_batches + stages - 1)


def test_classic_1f1b_is_as_short_as_gpipe():
    assert one_f_one_b([4, 3, 2, 1], 8).dry_run() == gpipe(4, 8).dry_run()


def test_a_depth_that_grows_along_the_chain_blocks_and_is_refused():
    with pytest.raises(
        ScheduleError, match="stage 0 waits with B0 for stage 1; stage 1 waits with F1"
    ):
        one_f_one_b([1, 3], 5)


def test_swapped_order_between_two_stages_blocks():
    good = gpipe(2, 2).actions
    swapped = (good[0][1], good[0][0], *good[0][2:])
    with pytest.raises(ScheduleError, match="blocks"):
        Schedule("odd", (swapped, good[1])).dry_run()


def test_backward_before_forward_is_refused():
    odd = (Action(Op.BACKWARD, 0), Action(Op.FORWARD, 0))
    with pytest.raises(ScheduleError, match="B0 before its forward"):
        Schedule("odd", (odd,)).dry_run()


def test_short_queues_block_a_deep_schedule_and_the_dry_run_says_where():
    schedule = one_f_one_b([8, 1], 8)
    assert schedule.dry_run(queue_frames=8) == schedule.dry_run()
    with pytest.raises(
        ScheduleError, match="stage 0 cannot send F5 to stage 1, whose queue is full"
    ):
        schedule.dry_run(queue_frames=2)


def test_grid():
    assert one_f_one_b([2, 1], 3).grid().splitlines() == [
        "stage 0 | F0 F1 ·  B0 F2 B1 ·  B2",
        "stage 1 | ·  F0 B0 F1 B1 F2 B2 ·",
    ]


@pytest.mark.parametrize(
    ("name", "depth", "micro_batches", "said"),
    [("pipedream", 1, 4, "gpipe, 1f1b"), ("1f1b", 0, 4, "got 0"), ("gpipe", 1, 0, "got 0")],
)
def test_bad_values_are_named(name, depth, micro_batches, said):
    with pytest.raises(ScheduleError, match=said):
        list_stage_actions(name, depth, micro_batches)


def test_schedules_need_the_standard_library_only():
    code = (
        "import sys; import collapipe_flwr.core.replay; "
        "print([m for m in ('torch', 'numpy', 'grpc', 'flwr') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr

"""Laws of links in memory: order, bounds, deadlines, and news of a failure at once."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest

from collapipe_flwr.core.errors import Blame, LinkError, LinkTimeout, MemberFailed
from collapipe_flwr.core.schedule import ALONE
from collapipe_flwr.pipeline.link import (
    Frame,
    FrameKind,
    LinkClosed,
    Mailbox,
    join_links,
    make_error_frame,
    make_memory_pair,
    read_error,
)
from collapipe_flwr.pipeline.soundness import blame
from tests.pipeline.chains import DEADLINE_S


def frame(step: int) -> Frame:
    return Frame(kind=FrameKind.ACTIVATION, step=step)


def test_frames_arrive_in_order_both_ways():
    left, right = make_memory_pair("a", "b")
    for step in range(5):
        left.send(frame(step), deadline_s=1)
        right.send(frame(10 + step), deadline_s=1)
    assert [right.receive(deadline_s=1).step for _ in range(5)] == [0, 1, 2, 3, 4]
    assert [left.receive(deadline_s=1).step for _ in range(5)] == [10, 11, 12, 13, 14]


def test_silence_ends_at_the_deadline():
    left, _right = make_memory_pair("a", "device b")
    start = time.monotonic()
    with pytest.raises(LinkTimeout, match=r"device b sent nothing within 0\.1 s"):
        left.receive(deadline_s=0.1)
    assert time.monotonic() - start < 20


def test_a_full_queue_ends_at_the_deadline():
    left, _right = make_memory_pair("a", "b", queue_frames=2)
    left.send(frame(0), deadline_s=0.1)
    left.send(frame(1), deadline_s=0.1)
    with pytest.raises(LinkTimeout, match=r"took nothing within 0\.1 s"):
        left.send(frame(2), deadline_s=0.1)


def test_an_orderly_close_delivers_what_was_sent_before():
    left, right = make_memory_pair("a", "b")
    left.send(frame(7), deadline_s=1)
    left.close()
    left.close()
    assert right.receive(deadline_s=1).step == 7
    with pytest.raises(LinkClosed, match="a closed the link"):
        right.receive(deadline_s=1)
    with pytest.raises(LinkError, match="closed"):
        right.send(frame(0), deadline_s=1)


def test_an_error_overtakes_what_was_sent_before():
    left, right = make_memory_pair("device a", "b")
    left.send(frame(7), deadline_s=1)
    left.close("out of memory")
    with pytest.raises(LinkError, match="device a failed: out of memory"):
        right.receive(deadline_s=1)
    with pytest.raises(LinkError, match="device a failed: out of memory"):
        right.send(frame(8), deadline_s=1)


def test_a_waiting_receiver_hears_of_a_close_at_once():
    left, right = make_memory_pair("a", "b")
    timer = threading.Timer(0.1, left.close, args=("gone",))
    timer.start()
    start = time.monotonic()
    with pytest.raises(LinkError, match="gone"):
        right.receive(deadline_s=DEADLINE_S)
    assert time.monotonic() - start < DEADLINE_S / 2
    timer.join()


def test_a_mailbox_is_bounded_in_bytes_but_takes_one_item_of_any_size():
    box: Mailbox[int] = Mailbox(9, "peer", most_bytes=10)
    box.put(0, 0.05, size_bytes=99)
    with pytest.raises(LinkTimeout):
        box.put(1, 0.05, size_bytes=1)
    assert box.get(1) == 0
    for item in range(2):
        box.put(item, 0.05, size_bytes=5)
    with pytest.raises(LinkTimeout):
        box.put(2, 0.05, size_bytes=1)
    assert [box.get(1) for _ in range(2)] == [0, 1]


def test_the_first_failure_stays():
    box: Mailbox[int] = Mailbox(4, "peer")
    box.fail(LinkError("first"))
    box.fail(LinkError("second"))
    with pytest.raises(LinkError, match="first"):
        box.get(1)


@pytest.mark.parametrize("text", ["\x1b[2J", "a\u202eb", "x\ud800", "\0" * 5000])
def test_the_words_of_a_failed_peer_are_fit_for_a_log_on_both_sides(text: str) -> None:
    ours = make_error_frame(LinkError(text))
    ours.text.encode()
    theirs = Frame(kind=FrameKind.ERROR, text=text, scalars={"blame": 0.0, "side": 0.0})
    for frame_ in (ours, theirs, replace(theirs, scalars={})):
        assert str(read_error(frame_, "pi-1")).isprintable()


@pytest.mark.parametrize("accused", ["A/1", ""])
def test_a_failure_arrives_with_its_witness_and_whom_it_accuses(accused):
    told = MemberFailed("A/0", "1\nof 3 is wrong", Blame.MALFORMED, MemberFailed.UPSTREAM, accused)
    assert read_error(make_error_frame(told), "2").args == told.args


def test_the_replica_that_is_silent_is_accused_not_the_one_that_answers():
    (to_one, one), (to_other, _other) = (
        make_memory_pair("edge", "A/1"),
        make_memory_pair("edge", "A/2"),
    )
    link = join_links([to_one, to_other], ALONE)
    one.send(frame(0), deadline_s=1)
    with pytest.raises(MemberFailed) as failure, blame("edge", link, MemberFailed.UPSTREAM):
        link.receive(deadline_s=0.05)
    assert (failure.value.accused, failure.value.blame) == ("A/2", Blame.SILENT)

"""A link that moves no bytes waits as long as a wire of its rate would take."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from collapipe_flwr.core.errors import LinkError, LinkTimeout
from collapipe_flwr.core.links import LinkConfig, slower
from collapipe_flwr.pipeline.link import Frame, FrameKind, memory_pair
from collapipe_flwr.transport.simulated_link import Wire, rate_limited_pair

FRAME = Frame(kind=FrameKind.ACTIVATION, tensors={"hidden": torch.zeros(250)})  # 1000 bytes
PACE = LinkConfig(forward_bit_per_s=8_000.0, backward_bit_per_s=4_000.0)
DEADLINE_S = 60.0


def test_frames_arrive_when_the_wire_has_carried_them():
    left, right = rate_limited_pair(*memory_pair("left", "right"), PACE)
    for sender, receiver, rate in ((left, right, 1000.0), (right, left, 500.0)):
        started_s = time.monotonic()
        for _ in range(2):
            sender.send(FRAME, deadline_s=DEADLINE_S)
        assert time.monotonic() - started_s < 1000 / rate  # the sender computes on
        for _ in range(2):
            receiver.receive(deadline_s=DEADLINE_S)
        assert time.monotonic() - started_s >= 2000 / rate
        assert sender.sent.sending_s == pytest.approx(2000 / rate)


def test_a_frame_that_was_there_already_is_not_held_back():
    now_s, waited_s = [0.0], []
    wire = Wire(8_000.0, clock=lambda: now_s[0])
    wire.cut.wait = waited_s.append
    for _ in range(2):  # a second each
        wire.put(1000)
    now_s[0] = 1.1
    wire.await_frame("left", DEADLINE_S)
    assert waited_s == []
    wire.await_frame("left", DEADLINE_S)
    assert waited_s == [pytest.approx(0.9)]


def test_an_error_overtakes_what_is_on_its_way():
    slow = LinkConfig(forward_bit_per_s=80.0, backward_bit_per_s=80.0)
    left, right = rate_limited_pair(*memory_pair("left", "right"), slow)
    left.send(FRAME, deadline_s=1.0)
    threading.Timer(0.1, left.close, ("broken",)).start()
    started_s = time.monotonic()
    with pytest.raises(LinkError, match="broken"):
        for _ in range(2):
            right.receive(deadline_s=1.0)
    assert time.monotonic() - started_s < 50.0  # the wire would take 100 s


def test_links_without_a_rate_stay_as_they_are():
    pair = memory_pair("left", "right")
    assert rate_limited_pair(*pair, LinkConfig()) == pair


def test_a_wire_that_was_promised_a_frame_does_not_wait_for_ever():
    with pytest.raises(LinkTimeout, match="left"):
        Wire(80.0).await_frame("left", 0.01)


@pytest.mark.parametrize(("one", "other", "both"), [(None, None, None), (2, None, 2), (3, 2, 2)])
def test_of_two_limits_the_smaller_holds(one, other, both):
    assert slower(one, other) == slower(other, one) == both

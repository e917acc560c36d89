"""A link that moves no bytes waits as long as a wire of its rate would take."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest
import torch

from collapipe_flwr.core.errors import LinkError
from collapipe_flwr.core.links import LinkConfig, find_min_rate
from collapipe_flwr.pipeline.link import HIDDEN, Frame, FrameKind, MemoryLink
from collapipe_flwr.transport import simulated_link
from collapipe_flwr.transport.simulated_link import make_simulated_pair

FRAME = Frame(kind=FrameKind.ACTIVATION, tensors={HIDDEN: torch.zeros(250)})  # 1000 bytes
PACE = LinkConfig(forward_bit_per_s=8_000.0, backward_bit_per_s=4_000.0)
DEADLINE_S = 60.0


class Clock:
    """Stands still but for who waits."""

    now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def wait(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(simulated_link, "time", clock)
    monkeypatch.setattr(simulated_link, "threading", SimpleNamespace(Event=lambda: clock))
    return clock


def test_frames_arrive_when_the_wire_has_carried_them(clock: Clock):
    left, right = make_simulated_pair("left", "right", PACE)
    for sender, receiver, rate in ((left, right, 1000.0), (right, left, 500.0)):
        started_s = clock.now_s
        for _ in range(2):
            sender.send(FRAME, deadline_s=DEADLINE_S)
        assert clock.now_s == started_s  # the sender computes on
        for count in (1, 2):
            receiver.receive(deadline_s=DEADLINE_S)
            assert clock.now_s - started_s == pytest.approx(count * 1000 / rate)
        assert sender.sent.sending_s == pytest.approx(2000 / rate)


def test_a_frame_that_was_there_already_is_not_held_back(clock: Clock):
    left, right = make_simulated_pair("left", "right", PACE)
    left.send(FRAME, deadline_s=DEADLINE_S)
    clock.wait(1.1)
    right.receive(deadline_s=DEADLINE_S)
    assert clock.now_s == 1.1  # a second is what it was on its way


def test_an_error_overtakes_what_is_on_its_way():
    slow = LinkConfig(forward_bit_per_s=80.0, backward_bit_per_s=80.0)
    left, right = make_simulated_pair("left", "right", slow)
    left.send(FRAME, deadline_s=1.0)
    threading.Timer(0.1, left.close, ("broken",)).start()
    started_s = time.monotonic()
    with pytest.raises(LinkError, match="broken"):
        for _ in range(2):
            right.receive(deadline_s=1.0)
    assert time.monotonic() - started_s < 50.0  # the wire would take 100 s


def test_links_without_a_rate_stay_as_they_are():
    assert all(type(end) is MemoryLink for end in make_simulated_pair("a", "b", LinkConfig()))


@pytest.mark.parametrize(("one", "other", "both"), [(None, None, None), (2, None, 2), (3, 2, 2)])
def test_of_two_limits_the_smaller_holds(one, other, both):
    assert find_min_rate(one, other) == find_min_rate(other, one) == both

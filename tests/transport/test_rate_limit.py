"""A paced sender is as slow as its link, and never slower."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from collapipe_flwr.core.errors import ConfigError, LinkError
from collapipe_flwr.pipeline.link import Frame, FrameKind
from collapipe_flwr.transport import stream
from collapipe_flwr.transport.stream import RateLimiter, StreamLink


def test_messages_queue_up_behind_each_other():
    pacer = RateLimiter(800.0)
    assert pacer.compute_delay_s(50, now_s=10.0) == pytest.approx(0.5)
    assert pacer.compute_delay_s(50, now_s=10.0) == pytest.approx(1.0)
    assert pacer.compute_delay_s(50, now_s=20.0) == pytest.approx(0.5)


@given(st.lists(st.tuples(st.integers(0, 1000), st.floats(0, 5)), min_size=1, max_size=30))
def test_the_rate_is_never_exceeded(messages):
    pacer, now_s, left_s, carried = RateLimiter(800.0), 0.0, [], 0
    for size, pause_s in messages:
        now_s += pause_s
        left_s.append(now_s + pacer.compute_delay_s(size, now_s))
        carried += size
    assert all(b >= a - 1e-9 for a, b in pairwise(left_s))  # in order, to rounding
    assert left_s[-1] >= carried / 100.0 - 1e-6


def test_no_rate_means_no_delay():
    assert RateLimiter(None).compute_delay_s(10**9, 0.0) == 0.0


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan")])
def test_a_rate_must_be_positive(rate):
    with pytest.raises(ConfigError, match="rate of a link"):
        RateLimiter(rate)


@pytest.mark.parametrize("taken", [0.1, 0.9])  # by the transport, as a share of the pace
@pytest.mark.parametrize("at_once", [True, False])
def test_what_the_transport_takes_is_not_added_to_the_pace(
    monkeypatch: pytest.MonkeyPatch, taken: float, at_once: bool
) -> None:
    now_s, frames = 0.0, 4

    def wait(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    monkeypatch.setattr(stream, "time", SimpleNamespace(monotonic=lambda: now_s))
    link = StreamLink("peer", lambda _: LinkError("gone"), rate_bit_per_s=8000.0)
    monkeypatch.setattr(link, "_over", SimpleNamespace(wait=wait))
    outgoing = link.encode_outgoing()
    for number in range(frames):
        for _ in range(0 if number and at_once else frames if at_once else 1):
            link.send(Frame(kind=FrameKind.HELLO), deadline_s=1.0)
        paced_s = len(next(outgoing)) / 1000.0
        wait(taken * paced_s)
    link.close()
    assert next(outgoing, None) is None
    assert now_s == pytest.approx((frames + (taken if at_once else frames * taken)) * paced_s)
    assert link.sent.sending_s == pytest.approx(frames * paced_s)

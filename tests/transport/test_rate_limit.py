"""A paced sender is as slow as its link, and never slower."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.transport.stream import RateLimiter


def test_messages_queue_up_behind_each_other():
    pacer = RateLimiter(800.0)
    assert pacer.delay_s(50, now_s=10.0) == pytest.approx(0.5)
    assert pacer.delay_s(50, now_s=10.0) == pytest.approx(1.0)
    assert pacer.delay_s(50, now_s=20.0) == pytest.approx(0.5)


@given(st.lists(st.tuples(st.integers(0, 1000), st.floats(0, 5)), min_size=1, max_size=30))
def test_the_rate_is_never_exceeded(messages):
    pacer, now_s, left_s, carried = RateLimiter(800.0), 0.0, [], 0
    for size, pause_s in messages:
        now_s += pause_s
        left_s.append(now_s + pacer.delay_s(size, now_s))
        carried += size
    assert all(b >= a - 1e-9 for a, b in pairwise(left_s))  # in order, to rounding
    assert left_s[-1] >= carried / 100.0 - 1e-6


def test_no_rate_means_no_delay():
    assert RateLimiter(None).delay_s(10**9, 0.0) == 0.0


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan")])
def test_a_rate_must_be_positive(rate):
    with pytest.raises(ConfigError, match="rate of a link"):
        RateLimiter(rate)

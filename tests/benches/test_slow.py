"""An emulated slow device takes its factor longer in both directions and changes no number."""

from __future__ import annotations

import time

import pytest
import torch
from torch.autograd.graph import get_gradient_edge

from collapipe_flwr.benches.slow import Slowed
from collapipe_flwr.pipeline.backward import input_first


class Clock:
    """A processor that works a second per look, and sleeps as told."""

    def __init__(self, monkeypatch) -> None:
        self.now_s, self.slept_s = 0.0, []
        monkeypatch.setattr(time, "thread_time", self._look)
        monkeypatch.setattr(time, "sleep", self.slept_s.append)

    def _look(self) -> float:
        self.now_s += 1.0
        return self.now_s


@pytest.mark.parametrize(("factor", "slept"), [(1.0, []), (3.0, [2.0, 2.0])])
def test_forward_and_backward_sleep_for_the_rest(monkeypatch, factor, slept):
    clock, slowed = Clock(monkeypatch), Slowed(factor)
    tensor = torch.ones(3, requires_grad=True)
    with slowed.timed() as slow:
        result = slow.leave(slow.enter(tensor) * 2)
    result.sum().backward()
    assert tensor.grad.tolist() == [2.0, 2.0, 2.0]
    assert clock.slept_s == slept


def test_weights_whose_gradients_come_later_are_slow_as_well(monkeypatch):
    weight = torch.ones(3, 3, requires_grad=True)
    clock, slowed = Clock(monkeypatch), Slowed(3.0, [weight])
    hidden = torch.ones(2, 3, requires_grad=True)
    with slowed.timed() as slow:
        result = slow.leave(slow.enter(hidden) @ weight)
    rest = input_first(get_gradient_edge(result.sum()), None, hidden)
    assert clock.slept_s == [2.0, 2.0]
    rest.finish()
    assert clock.slept_s == [2.0, 2.0, 2.0]

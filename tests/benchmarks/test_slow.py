"""An emulated slow device takes its factor longer in both directions and changes no number."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

from benchmarks.data_plane.model import Slowed
from collapipe_flwr.pipeline.backward import defer_products, fuse_accumulation

pytestmark = pytest.mark.usefixtures("small_matrices_are_fused")


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


def test_the_weights_of_a_slow_device_are_never_left_for_later(monkeypatch):
    layer = nn.Linear(3, 3)
    clock, slowed = Clock(monkeypatch), Slowed(3.0, layer.parameters())
    fuse_accumulation(layer)
    with slowed.timed() as slow:
        result = slow.leave(layer(slow.enter(torch.ones(2, 3, requires_grad=True))))
    with defer_products() as deferred:
        result.sum().backward()
    assert clock.slept_s == [2.0, 2.0]
    assert not deferred.tensors
    assert layer.weight.grad is not None

"""What no order of a cluster's devices, and none of actions on them, undercuts under 1F1B.

Let y be the seconds of a device per micro-batch, both passes, h those of the hop into it, and d the
most micro-batches that memory lets it, and every stage ahead of it, have in flight. Of J ones, the
first has passed the stages ahead before a device begins, and the last gradient passes them after it
has ended: ``sum of (y + h)`` ahead. Between a forward pass and its backward pass lies ``tail``, the
way from there to the edge and back. So in between a device takes at least

    J y                                                      as it does all the work,
      + max(tail - (d - 1) forward, 0)                       idle before its first backward pass,
      + max(tail - (d - 1) backward, 0)                      and behind its last forward pass,
    ceil(J / d) (y + tail)                                   as no d + 1 are in flight at once;

of J <= d the larger idle time counts alone, as the two may be the same. What is ahead of a device
and behind it are sets: their order does not matter to it. The least over all orders of the largest
of these is found by dynamic programming over the sets of devices behind. Our own derivation, see
docs/theory.md, 5.5; `benchmarks/test_prices.py` holds it against plans as they are played.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from collapipe_flwr.costs.arrays import Array


@dataclass(frozen=True, slots=True)
class Way:
    """Seconds of one direction per micro-batch."""

    stage_s: Array  # (A, N) of devices
    hop_s: Array  # (A, N + 1) into devices, and to the edge
    end_s: Array  # (2,) control unit and edge


def least_step_s(ahead: Way, back: Way, count: int, flight: Array) -> Array:
    """Seconds of a step that no order undercuts, (A,).

    ``flight`` (A, N + 1) are the micro-batches that fit on control unit and devices.
    """
    stage, hop = ahead.stage_s + back.stage_s, ahead.hop_s + back.hop_s
    start, end = (float(both) for both in ahead.end_s + back.end_s)
    home = hop[:, -1] + end
    whole = start + (stage + hop[:, :-1]).sum(1) + home
    first = _Stage(ahead.end_s[0], back.end_s[0], flight[:, 0])
    least = np.maximum(first.least_s(count, whole - start), whole - end + count * end)
    for way in (ahead, back):  # no stage and no link is quicker than its own work
        busiest = np.maximum(way.stage_s.max(1), way.hop_s.max(1))
        least = np.maximum(least, whole + (count - 1) * np.maximum(busiest, way.end_s.max()))
    devices = stage.shape[1]
    behind = {0: (home, np.zeros_like(home))}  # of sets: seconds there and back, least so far
    for chosen in range(1, 2**devices):
        reached = np.full(len(stage), np.inf)
        for n in range(devices):
            if not chosen >> n & 1:
                continue
            tail, most = behind[chosen ^ (1 << n)]
            others = [i for i in range(devices) if not chosen >> i & 1]
            fits = np.min(flight[:, [0, n + 1, *(i + 1 for i in others)]], axis=1)
            device = _Stage(ahead.stage_s[:, n], back.stage_s[:, n], fits)
            begun = whole - tail - stage[:, n]
            own = np.where(stage[:, n] > 0, begun + device.least_s(count, tail), 0.0)
            reached = np.minimum(reached, np.maximum(most, own))
            passed = tail + stage[:, n] + hop[:, n]
        behind[chosen] = (passed, reached)
    return np.asarray(np.maximum(least, behind[2**devices - 1][1]))


@dataclass(frozen=True, slots=True)
class _Stage:
    """A stage of every row: its passes in seconds, and how many micro-batches it may hold."""

    forward_s: Array
    backward_s: Array
    flight: Array

    def least_s(self, count: int, tail: Array) -> Array:
        """From its first forward pass to its last backward pass, (A,)."""
        both = self.forward_s + self.backward_s
        held = np.clip(self.flight, 1.0, count)
        before = np.maximum(tail - (held - 1.0) * self.forward_s, 0.0)
        after = np.maximum(tail - (held - 1.0) * self.backward_s, 0.0)
        idle = np.where(held < count, before + after, np.maximum(before, after))
        rounds = np.ceil(count / held) * (both + tail)
        return np.asarray(np.maximum(count * both + idle, rounds))

"""What no order of a cluster's devices, and no warm-up depths, undercut under 1F1B.

Let f, b and y be the seconds of a device per micro-batch, of each pass and of both, h those of the
hop into it, F and B those of the slowest pass, there and back, of all stages and links ahead of it,
and D the most micro-batches that memory lets it, and every stage ahead of it, have in flight. Of J
ones, the first has passed the stages ahead before a device begins, and the last gradient passes
them after it has ended: ``sum of (y + h)`` ahead. Between a forward pass and its backward pass lies
``tail``, the way from there to the edge and back. With depth d a device makes d forward passes, one
per max(f, F) at most, before its first backward pass, and d backward passes, one per max(b, B) at
most, behind its last forward pass. So in between it takes at least

    J y                                                      as it does all the work,
      + max(tail - (d - 1) f, (d - 1) (F - f), 0)            idle before its first backward pass,
      + max(tail - (d - 1) b, (d - 1) (B - b), 0)            and behind its last forward pass,
    ceil(J / D) (y + tail)                                   as no D + 1 are in flight at once,
      + ((J - 1) mod D) y                                    of J > D, where D do not hide tail.

The least over d <= D counts; of d = J, all forward passes first, ``tail`` is waited for once. What
is ahead of a device and behind it are sets: their order does not matter to it. The least over all
orders of the largest of these is found by dynamic programming over the sets of devices behind. Our
own derivation, see docs/theory-appendix.md, 5.5; `benchmarks/test_prices.py` holds it against plans
as they are played.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from collapipe_flwr.costs.arrays import Array, Ints


@dataclass(frozen=True, slots=True)
class Way:
    """Seconds of one direction per micro-batch."""

    stage_s: Array  # (A, N) of devices
    hop_s: Array  # (A, N + 1) into devices, and to the edge
    end_s: Array  # (2,) control unit and edge

    def take(self, rows: Ints) -> Way:
        """The chosen rows."""
        return Way(self.stage_s[rows], self.hop_s[rows], self.end_s)


def least_step_s(
    ahead: Way, back: Way, count: int, flight: Array, limit_s: Array | None = None
) -> Array:
    """Seconds of a step that no order undercuts, (A,).

    ``flight`` (A, N + 1) are the micro-batches that fit on control unit and devices. Where single
    stages show that a step takes ``limit_s`` or more, orders are not looked at.
    """
    least = _alone_s(ahead, back, count, flight)
    rows = np.arange(len(least)) if limit_s is None else np.flatnonzero(least < limit_s)
    some = _ordered_s(ahead.take(rows), back.take(rows), count, flight[rows])
    least[rows] = np.maximum(least[rows], some)
    return least


def _alone_s(ahead: Way, back: Way, count: int, flight: Array) -> Array:
    """The part of `least_step_s` that no order changes."""
    stage, hop = ahead.stage_s + back.stage_s, ahead.hop_s + back.hop_s
    start, end = (float(both) for both in ahead.end_s + back.end_s)
    whole = start + stage.sum(1) + hop.sum(1) + end
    none = np.zeros(len(stage))
    first = Stage(none + ahead.end_s[0], none + back.end_s[0], flight[:, 0], none, none)
    least = np.maximum(first.least_s(count, whole - start), whole - end + count * end)
    for way in (ahead, back):  # no stage and no link is quicker than its own work
        busiest = np.maximum(way.stage_s.max(1), way.hop_s.max(1))
        least = np.maximum(least, whole + (count - 1) * np.maximum(busiest, way.end_s.max()))
    return np.asarray(np.maximum(least, count * stage.max(1)))


def _ordered_s(ahead: Way, back: Way, count: int, flight: Array) -> Array:
    """The least over all orders of what the stages of a chain need, (A,)."""
    stage, hop = ahead.stage_s + back.stage_s, ahead.hop_s + back.hop_s
    start, end = (float(both) for both in ahead.end_s + back.end_s)
    home = hop[:, -1] + end
    whole = start + (stage + hop[:, :-1]).sum(1) + home
    devices = stage.shape[1]
    feeding, draining = (
        [np.maximum(way.stage_s[:, i], way.hop_s[:, i]) for i in range(devices)]
        for way in (ahead, back)
    )
    behind = {0: (home, np.zeros_like(home))}  # of sets: seconds there and back, least so far
    # Of sets ahead: the slowest passes there and back, and the fewest micro-batches that fit.
    ends = (np.full(len(stage), end_s) for end_s in (ahead.end_s[0], back.end_s[0]))
    slowest = {0: (*ends, flight[:, 0])}
    every = 2**devices - 1
    for chosen in range(1, every):
        n = chosen.bit_length() - 1
        feed, drain, fits = slowest[chosen ^ (1 << n)]
        slowest[chosen] = (
            np.maximum(feed, feeding[n]),
            np.maximum(drain, draining[n]),
            np.minimum(fits, flight[:, n + 1]),
        )
    for chosen in range(1, every + 1):
        reached, (feed, drain, fits) = np.full(len(stage), np.inf), slowest[every ^ chosen]
        for n in range(devices):
            if not chosen >> n & 1:
                continue
            tail, most = behind[chosen ^ (1 << n)]
            device = Stage(
                forward_s=ahead.stage_s[:, n],
                backward_s=back.stage_s[:, n],
                flight=np.minimum(fits, flight[:, n + 1]),
                feed_s=np.maximum(feed, ahead.hop_s[:, n]),
                drain_s=np.maximum(drain, back.hop_s[:, n]),
            )
            begun = whole - tail - stage[:, n]
            own = np.where(stage[:, n] > 0, begun + device.least_s(count, tail), 0.0)
            reached = np.minimum(reached, np.maximum(most, own))
            passed = tail + stage[:, n] + hop[:, n]
        behind[chosen] = (passed, reached)
    return np.asarray(behind[every][1])


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage of every row: its passes in seconds, and how many micro-batches it may hold."""

    forward_s: Array
    backward_s: Array
    flight: Array
    feed_s: Array  # of the slowest forward pass ahead of it
    drain_s: Array  # of the slowest backward pass ahead of it

    def least_s(self, count: int, tail: Array) -> Array:
        """From its first forward pass to its last backward pass, (A,)."""
        held = np.clip(self.flight, 1.0, count)
        both = self.forward_s + self.backward_s
        least, paces = np.full(len(held), np.inf), self._paces()
        # Convex in the depth: the least lies beside a bend, or at the end of all depths.
        for pace in paces:
            bend = np.divide(tail, pace, out=np.zeros_like(pace), where=pace > 0.0)
            for further in (np.floor(bend), np.ceil(bend)):
                np.minimum(further, held - 1.0, out=further)
                least = np.minimum(least, self._idle_s(further, tail, paces))
        if (whole := held >= count).any():
            once = self._idle_once_s(held - 1.0, tail, paces)
            least = np.where(whole, np.minimum(least, once), least)
        turns = np.ceil(count / held) * (both + tail)
        left = (count - 1.0) % held * ((held < count) & (tail >= (held - 1.0) * both))
        return np.asarray(np.maximum(least + count * both, turns + left * both))

    def with_depth_s(self, depth: Array, count: int, tail: Array) -> Array:
        """The same with so many micro-batches in flight."""
        further, paces = depth - 1.0, self._paces()
        apart = self._idle_s(further, tail, paces)
        once = self._idle_once_s(further, tail, paces)
        work = count * (self.forward_s + self.backward_s)
        return np.asarray(work + np.where(depth < count, apart, once))

    def _idle_s(self, further: Array, tail: Array, paces: tuple[Array, Array]) -> Array:
        """Before its first backward pass and behind its last forward pass, both waited for.

        As F is at least f, max(tail - (d - 1) f, (d - 1) (F - f), 0) is max(tail, (d - 1) F) less
        (d - 1) f; the same goes for B and b.
        """
        ahead, back = (np.maximum(tail, further * pace) for pace in paces)
        return np.asarray(ahead + back - further * (self.forward_s + self.backward_s))

    def _idle_once_s(self, further: Array, tail: Array, paces: tuple[Array, Array]) -> Array:
        """The same if all forward passes come first: ``tail`` is waited for once."""
        own = np.minimum(self.forward_s, self.backward_s)
        slow = paces[0] + paces[1] - self.forward_s - self.backward_s
        return np.asarray(np.maximum(np.maximum(tail - further * own, 0.0), further * slow))

    def _paces(self) -> tuple[Array, Array]:
        return np.maximum(self.forward_s, self.feed_s), np.maximum(self.backward_s, self.drain_s)

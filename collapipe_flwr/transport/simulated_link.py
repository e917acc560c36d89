"""Pace on links that move no bytes: a simulated cluster waits as long as its radio would.

The sender never waits; what it sends arrives when a wire of the planned rate would have carried
it, and the receiver waits for that.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from queue import Empty, SimpleQueue

from collapipe_flwr.core.errors import LinkTimeout
from collapipe_flwr.core.links import LinkConfig, LinkTraffic
from collapipe_flwr.pipeline.frame import Frame
from collapipe_flwr.pipeline.link import Link
from collapipe_flwr.transport.rate_limit import RateLimiter

Clock = Callable[[], float]


class Wire:
    """One direction: when each frame in flight arrives."""

    def __init__(self, rate_bit_per_s: float | None, clock: Clock = time.monotonic) -> None:
        self.busy_s = 0.0  # of carrying
        self.cut = threading.Event()  # nothing arrives any more
        self._pacer = RateLimiter(rate_bit_per_s)
        self._clock = clock
        self._arrivals: SimpleQueue[float] = SimpleQueue()

    def put(self, size_bytes: int) -> None:
        """A frame of that size was sent."""
        now_s = self._clock()
        self._arrivals.put(now_s + self._pacer.delay_s(size_bytes, now_s))
        self.busy_s += self._pacer.carrying_s(size_bytes)

    def await_frame(self, peer: str, deadline_s: float) -> None:
        """Wait until the next frame is there, or the wire is cut; raises LinkTimeout."""
        try:
            due_s = self._arrivals.get(timeout=deadline_s)
        except Empty as error:
            raise LinkTimeout(f"{peer} announced a frame and did not send it") from error
        waits_s = due_s - self._clock()
        if waits_s > 0:
            self.cut.wait(waits_s)


class RateLimitedLink:
    """One end of `rate_limited_pair`."""

    def __init__(self, link: Link, there: Wire, back: Wire) -> None:
        self._link, self._there, self._back = link, there, back

    @property
    def peer(self) -> str:
        """See `Link.peer`."""
        return self._link.peer

    @property
    def sent(self) -> LinkTraffic:
        """See `Link.sent`."""
        return replace(self._link.sent, sending_s=self._there.busy_s)

    @property
    def received(self) -> LinkTraffic:
        """See `Link.received`."""
        return self._link.received

    def send(self, frame: Frame, *, deadline_s: float) -> None:
        """See `Link.send`."""
        before = self._link.sent.bytes
        self._link.send(frame, deadline_s=deadline_s)
        self._there.put(self._link.sent.bytes - before)

    def receive(self, *, deadline_s: float) -> Frame:
        """See `Link.receive`; the time that the wire takes is no silence of the peer."""
        frame = self._link.receive(deadline_s=deadline_s)
        self._back.await_frame(self.peer, deadline_s)
        return frame

    def close(self, error: str = "") -> None:
        """See `Link.close`."""
        if error:
            self._there.cut.set()
            self._back.cut.set()
        self._link.close(error)


def rate_limited_pair(left: Link, right: Link, link: LinkConfig) -> tuple[Link, Link]:
    """The same two joined ends with the rates of `link`, whose upstream end is `left`."""
    if link.forward_bit_per_s is None and link.backward_bit_per_s is None:
        return left, right
    ahead, back = Wire(link.forward_bit_per_s), Wire(link.backward_bit_per_s)
    return RateLimitedLink(left, ahead, back), RateLimitedLink(right, back, ahead)

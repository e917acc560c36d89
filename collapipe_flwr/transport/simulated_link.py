"""In-memory links that round and delay frames as a real link would.

The codec rounds what is sent. The rate never blocks the sender: a frame arrives when a wire of the
planned rate would have carried it, and the receiver waits for that.
"""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from queue import Empty, SimpleQueue

from torch import Tensor

from collapipe_flwr.core.errors import LinkError, LinkTimeout
from collapipe_flwr.core.links import LinkConfig, LinkTraffic
from collapipe_flwr.pipeline.link import GRAD, HIDDEN, Frame, Link, memory_pair
from collapipe_flwr.transport.codec import WIRE_CODECS
from collapipe_flwr.transport.stream import RateLimiter


def simulated_pair(left: str, right: str, link: LinkConfig) -> tuple[Link, Link]:
    """Two joined ends that behave as ``link``; ``left`` holds the first, which sends forward."""
    here, there = memory_pair(left, right)
    if link.codec == "fp32" and link == link.unpaced:
        return here, there
    ahead, back = Wire(link.forward_bit_per_s), Wire(link.backward_bit_per_s)
    return (
        SimulatedLink(here, link.codec, ahead, back),
        SimulatedLink(there, link.codec, back, ahead),
    )


class Wire:
    """One direction: when each frame in flight arrives; at once without a rate."""

    def __init__(self, rate_bit_per_s: float | None) -> None:
        self.busy_s = 0.0  # carrying frames
        self.cut = threading.Event()  # nothing arrives any more
        self._limiter = RateLimiter(rate_bit_per_s)
        self._arrivals: SimpleQueue[tuple[float, int]] = SimpleQueue()  # with their bytes

    def put(self, size_bytes: int) -> None:
        """A frame of that size was sent."""
        now_s = time.monotonic()
        due_s = now_s + self._limiter.delay_s(size_bytes, now_s)
        self._arrivals.put((due_s, size_bytes))
        self.busy_s += self._limiter.carrying_s(size_bytes)

    def await_frame(self, peer: str, deadline_s: float) -> int:
        """The bytes of the next frame, once it arrives or the wire is cut; raises LinkTimeout."""
        try:
            due_s, size_bytes = self._arrivals.get(timeout=deadline_s)
        except Empty as error:
            raise LinkTimeout(f"{peer} announced a frame and did not send it") from error
        waits_s = due_s - time.monotonic()
        if waits_s > 0:
            self.cut.wait(waits_s)
        return size_bytes


class SimulatedLink:
    """One end of `simulated_pair`: a `Link` around another one.

    Hidden states and gradients are rounded by ``codec`` when they are sent, and counted at their
    size on a wire, without headers.
    """

    def __init__(self, link: Link, codec: str, there: Wire, back: Wire) -> None:
        self.peer = link.peer
        self._link = link
        self._codec = WIRE_CODECS[codec]
        self._is_exact = codec == "fp32"
        self._saved_bytes = self._received_bytes = 0
        self._there, self._back = there, back

    @property
    def sent(self) -> LinkTraffic:
        sent = self._link.sent
        return replace(sent, bytes=sent.bytes - self._saved_bytes, sending_s=self._there.busy_s)

    @property
    def received(self) -> LinkTraffic:
        return replace(self._link.received, bytes=self._received_bytes)

    def send(self, frame: Frame, *, deadline_s: float) -> None:
        before = self.sent.bytes
        tensors = {name: self._written(name, t) for name, t in frame.tensors.items()}
        self._link.send(replace(frame, tensors=tensors), deadline_s=deadline_s)
        self._there.put(self.sent.bytes - before)

    def receive(self, *, deadline_s: float) -> Frame:
        """``deadline_s`` does not count the time that the wire takes."""
        frame = self._link.receive(deadline_s=deadline_s)
        self._received_bytes += self._back.await_frame(self.peer, deadline_s)
        return frame

    def close(self, error: str | LinkError = "") -> None:
        if error:
            self._there.cut.set()
            self._back.cut.set()
        self._link.close(error)

    def _written(self, name: str, tensor: Tensor) -> Tensor:
        if self._is_exact or name not in (HIDDEN, GRAD) or not tensor.is_floating_point():
            return tensor
        raw = bytearray(self._codec.pack(tensor.detach()))
        self._saved_bytes += tensor.numel() * tensor.element_size() - len(raw)
        return self._codec.unpack(raw, tensor.dtype).reshape(tensor.shape)

"""In-memory links that round and delay frames as a real link would.

The codec rounds tensors when they are sent. The rate never blocks the sender: a frame arrives when
a wire of the planned rate would have carried it, and the receiver waits until then.
"""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import Any

from torch import Tensor

from collapipe_flwr.core.errors import LinkError
from collapipe_flwr.core.links import QUEUE_FRAMES, LinkConfig
from collapipe_flwr.pipeline.link import (
    GRAD,
    HIDDEN,
    Frame,
    Link,
    Mailbox,
    MemoryLink,
    make_memory_pair,
)
from collapipe_flwr.transport.codec import WIRE_CODECS
from collapipe_flwr.transport.stream import RateLimiter


def make_simulated_pair(left: str, right: str, link: LinkConfig) -> tuple[Link, Link]:
    """Make two joined ends that behave as ``link``; ``left`` holds the first, forward end."""
    if link.codec == "fp32" and link == link.unpaced:
        return make_memory_pair(left, right)
    ahead: Mailbox[Any] = Mailbox(QUEUE_FRAMES, peer=left)
    back: Mailbox[Any] = Mailbox(QUEUE_FRAMES, peer=right)
    cut = threading.Event()
    return (
        SimulatedLink(left, right, back, ahead, link.codec, link.forward_bit_per_s, cut),
        SimulatedLink(right, left, ahead, back, link.codec, link.backward_bit_per_s, cut),
    )


class SimulatedLink(MemoryLink):
    """One end of `make_simulated_pair`.

    Hidden states and gradients are rounded by ``codec`` when they are sent, and counted at their
    size on a wire, without headers. The mailboxes hold each frame with its size and with the time
    when it arrives; once ``cut`` is set, which both ends share, nothing is waited for.
    """

    def __init__(
        self,
        name: str,
        peer: str,
        inbox: Mailbox[Any],
        outbox: Mailbox[Any],
        codec: str,
        rate_bit_per_s: float | None,
        cut: threading.Event,
    ) -> None:
        super().__init__(name, peer, inbox, outbox)
        self._codec = WIRE_CODECS[codec]
        self._is_exact = codec == "fp32"
        self._limiter = RateLimiter(rate_bit_per_s)
        self._cut = cut

    def send(self, frame: Frame, *, deadline_s: float) -> None:
        written = {name: self._round(name, t) for name, t in frame.tensors.items()}
        frame = replace(frame, tensors={name: tensor for name, (tensor, _) in written.items()})
        size_bytes = sum(size for _, size in written.values())
        now_s = time.monotonic()
        due_s = now_s + self._limiter.compute_delay_s(size_bytes, now_s)
        self._outbox.put((frame, size_bytes, due_s), deadline_s)
        self.sent.bytes += size_bytes
        self.sent.sending_s += self._limiter.compute_carrying_s(size_bytes)

    def receive(self, *, deadline_s: float) -> Frame:
        """Take the next frame; ``deadline_s`` does not count the time that the wire takes."""
        frame: Frame
        frame, size_bytes, due_s = self._inbox.get(deadline_s)
        waits_s = due_s - time.monotonic()
        if waits_s > 0:
            self._cut.wait(waits_s)
        self.received.bytes += size_bytes
        return frame

    def close(self, error: str | LinkError = "") -> None:
        if error:
            self._cut.set()
        super().close(error)

    def _round(self, name: str, tensor: Tensor) -> tuple[Tensor, int]:
        """Return a tensor as it arrives, and its bytes on a wire."""
        if self._is_exact or name not in (HIDDEN, GRAD) or not tensor.is_floating_point():
            return tensor, tensor.numel() * tensor.element_size()
        raw = bytearray(self._codec.pack(tensor.detach()))
        flat = self._codec.unpack(raw, tensor.dtype)[: tensor.numel()]
        return flat.reshape(tensor.shape), len(raw)

"""A `Link` over one bidirectional gRPC stream; the same class serves both ends.

Sending and receiving never wait for each other: gRPC pulls encoded frames from `encode_outgoing`
in a thread of its own, and a reader thread runs `feed`. Both queues are bounded, so a slow peer
slows the sender down (through HTTP/2 flow control) instead of filling its memory.

A link has no deadline of its own. The stage that uses it has, and closes it when it gives up; the
pings of the connection notice a peer that vanishes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial

import grpc

from collapipe_flwr.core.errors import Blame, ConfigError, LinkError, MemberFailed, ProtocolError
from collapipe_flwr.core.links import QUEUE_FRAMES, FrameLog, LinkTraffic
from collapipe_flwr.pipeline.link import Frame, FrameKind, Mailbox, make_error_frame, read_error
from collapipe_flwr.transport.codec import decode_frame, encode_frame

_QUEUE_BYTES = 512 * 2**20  # of each direction


class RateLimiter:
    """Computes the delay of each message, by the caller's clock.

    Messages leave one after the other, each taking its size over the rate; idle time is not saved
    up.
    """

    def __init__(self, rate_bit_per_s: float | None) -> None:
        if rate_bit_per_s is not None and not rate_bit_per_s > 0:
            raise ConfigError(f"the rate of a link must be > 0 bit/s, got {rate_bit_per_s}")
        self._rate_bit_per_s = rate_bit_per_s
        self._free_s = float("-inf")  # when the wire has carried all earlier messages

    def compute_carrying_s(self, size_bytes: int) -> float:
        """Compute how long a message of this size keeps the wire busy; 0 without a rate."""
        return 8 * size_bytes / self._rate_bit_per_s if self._rate_bit_per_s else 0.0

    def compute_delay_s(self, size_bytes: int, now_s: float) -> float:
        """Compute the seconds from now until a message of this size has left."""
        if self._rate_bit_per_s is None:
            return 0.0
        self._free_s = max(self._free_s, now_s) + self.compute_carrying_s(size_bytes)
        return self._free_s - now_s


class StreamLink:
    """One end of a stream; its maker drives `encode_outgoing` and `feed`.

    `rate_bit_per_s` limits what this end sends (None: no limit): a frame leaves when a wire of that
    rate would have carried it. Both ends note frames under `stream_id`.
    """

    def __init__(
        self,
        peer: str,
        translate: Callable[[grpc.RpcError], LinkError],
        hang_up: Callable[[bool], None] = lambda _: None,
        *,
        peer_id: str = "",
        codec: str = "fp32",
        rate_bit_per_s: float | None = None,
        stream_id: int = 0,
    ) -> None:
        self.peer, self.peer_id = peer, peer_id or peer
        self._sent, self._received = LinkTraffic(), LinkTraffic()
        self._left, self._came = FrameLog(stream_id), FrameLog(stream_id)
        self._codec = codec
        self._translate = translate
        self._hang_up = hang_up
        bounded = partial(Mailbox, QUEUE_FRAMES, peer, most_bytes=_QUEUE_BYTES)
        self._inbox: Mailbox[Frame] = bounded()
        self._outbox: Mailbox[tuple[float, bytes]] = bounded()  # when they were put, and frames
        self._limiter = RateLimiter(rate_bit_per_s)
        self._over = threading.Event()

    @property
    def sent(self) -> LinkTraffic:
        return replace(self._sent, notes=self._left.notes)

    @property
    def received(self) -> LinkTraffic:
        return replace(self._received, notes=self._came.notes)

    def send(self, frame: Frame, *, deadline_s: float) -> None:
        data = encode_frame(frame, self._codec)
        self._outbox.put((time.monotonic(), data), deadline_s, size_bytes=len(data))
        self._sent.bytes += len(data)

    def receive(self, *, deadline_s: float) -> Frame:
        return self._inbox.get(deadline_s)

    def close(self, error: str | LinkError = "") -> None:
        if error:
            self._give_up(error if isinstance(error, LinkError) else LinkError(error))
        self._outbox.end()
        self._inbox.fail(LinkError(f"the link to {self.peer} is closed"))
        self._hang_up(not error)

    def break_off(self, error: LinkError) -> None:
        """Raise `error` in all that wait on this link: the stream is gone."""
        self._over.set()
        self._inbox.fail(error)
        self._outbox.fail(error)

    def stop_sending(self) -> None:
        """Make sending raise LinkError from now on, as the peer reads no more."""
        self._outbox.fail(LinkError(f"{self.peer} closed the link"))

    def encode_outgoing(self) -> Iterator[bytes]:
        """Yield encoded frames until the link ends; gRPC consumes it.

        A frame's delay begins when it was put into the queue. If it began when the transport took
        the earlier frame, a link as fast as its rate would carry half of it.
        """
        while True:
            try:
                put_s, data = self._outbox.get(None)
            except LinkError:
                return
            leaves_s = put_s + self._limiter.compute_delay_s(len(data), put_s)
            if (delay_s := leaves_s - time.monotonic()) > 0:
                self._over.wait(delay_s)
            left_s = time.monotonic()
            self._left.add(left_s, len(data))
            yield data
            taken_s = time.monotonic() - left_s
            self._sent.sending_s += max(taken_s, self._limiter.compute_carrying_s(len(data)))

    def feed(self, messages: Iterable[bytes]) -> None:
        """Read the stream until it ends. Errors end the link and reach its receiver."""
        try:
            for data in messages:
                self._accept(data)
            self._inbox.end()
        except grpc.RpcError as error:
            self.break_off(self._translate(error))
        except ProtocolError as error:
            self._give_up(MemberFailed("", str(error), Blame.MALFORMED), error)
            self._inbox.fail(error)
        except LinkError as error:
            self._give_up(error)
            self._inbox.fail(error)

    def _accept(self, data: bytes) -> None:
        self._came.add(time.monotonic(), len(data))
        frame = decode_frame(data)
        self._received.bytes += len(data)
        if frame.kind is FrameKind.ERROR:
            self.break_off(read_error(frame, self.peer))
        else:
            # The size in memory: a codec makes a frame up to eight times smaller on the wire.
            self._inbox.put(frame, None, size_bytes=max(frame.tensor_bytes, len(data)))

    def _give_up(self, told: LinkError, error: LinkError | None = None) -> None:
        """Send the peer a last frame with the error; senders here raise `error`, or the same."""
        last = encode_frame(make_error_frame(told))
        self._outbox.end_with((time.monotonic(), last), error or told)

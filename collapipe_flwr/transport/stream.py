"""A `Link` over one bidirectional gRPC stream; the same class serves both ends.

Sending and receiving never wait for each other: gRPC pulls encoded frames from `outgoing` in a
thread of its own, and a reader thread runs `feed`. Both queues are bounded, so a slow peer slows
the sender down (through HTTP/2 flow control) and does not fill its memory.

A link sets no limit to silence. The stage that uses it does, and closes it when it gives up; a peer
that vanishes is noticed by the pings of its connection.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator

import grpc

from collapipe_flwr.core.errors import LinkError
from collapipe_flwr.core.links import LinkTraffic
from collapipe_flwr.pipeline.frame import Frame, FrameKind
from collapipe_flwr.pipeline.mailbox import Mailbox
from collapipe_flwr.transport.codec import decode_frame, encode_frame
from collapipe_flwr.transport.rate_limit import RateLimiter, StreamSettings

_SENTENCE = 1000  # characters of an error that travel


class StreamLink:
    """One end of a stream; whoever made it drives `outgoing` and `feed`."""

    def __init__(
        self,
        peer: str,
        settings: StreamSettings,
        translate: Callable[[grpc.RpcError], LinkError],
        hang_up: Callable[[bool], None] = lambda _: None,
    ) -> None:
        self.peer = peer
        self.sent, self.received = LinkTraffic(), LinkTraffic()
        self._settings = settings
        self._translate = translate
        self._hang_up = hang_up
        self._inbox: Mailbox[Frame] = Mailbox(
            settings.queue_frames, peer, most_bytes=settings.queue_bytes
        )
        self._outbox: Mailbox[bytes] = Mailbox(
            settings.queue_frames, peer, most_bytes=settings.queue_bytes
        )
        self._pacer = RateLimiter(settings.rate_bit_per_s)
        self._over = threading.Event()

    def send(self, frame: Frame, *, deadline_s: float) -> None:
        """See `Link.send`."""
        data = encode_frame(frame, self._settings.codec)
        self._outbox.put(data, deadline_s, size_bytes=len(data))
        self.sent.bytes += len(data)

    def receive(self, *, deadline_s: float) -> Frame:
        """See `Link.receive`."""
        return self._inbox.get(deadline_s)

    def close(self, error: str = "") -> None:
        """See `Link.close`."""
        if error:
            self._give_up(LinkError(error))
        self._outbox.end()
        self._inbox.fail(LinkError(f"the link to {self.peer} is closed"))
        self._hang_up(not error)

    def broken(self, error: LinkError) -> None:
        """The stream is gone: whoever waits on this link raises `error`."""
        self._over.set()
        self._inbox.fail(error)
        self._outbox.fail(error)

    def stop_sending(self) -> None:
        """The peer reads no more: sending raises LinkError from now on."""
        self._outbox.fail(LinkError(f"{self.peer} closed the link"))

    def outgoing(self) -> Iterator[bytes]:
        """Encoded frames until the link ends; gRPC consumes it."""
        while True:
            try:
                data = self._outbox.get(None)
            except LinkError:
                return
            start_s = time.monotonic()
            if (delay_s := self._pacer.delay_s(len(data), start_s)) > 0:
                self._over.wait(delay_s)
            self.sent.note(self._settings.stream_id, time.monotonic(), len(data))
            yield data
            self.sent.sending_s += time.monotonic() - start_s

    def feed(self, messages: Iterable[bytes]) -> None:
        """Read the stream until it ends. Errors end the link and reach whoever receives."""
        try:
            for data in messages:
                self._accept(data)
            self._inbox.end()
        except grpc.RpcError as error:
            self.broken(self._translate(error))
        except LinkError as error:
            self._give_up(error)
            self._inbox.fail(error)

    def _accept(self, data: bytes) -> None:
        self.received.note(self._settings.stream_id, time.monotonic(), len(data))
        frame = decode_frame(data, self._settings.limits)
        self.received.bytes += len(data)
        if frame.kind is FrameKind.ERROR:
            self.broken(LinkError(f"{self.peer} failed: {frame.text[:_SENTENCE]}"))
        else:
            self._inbox.put(frame, None, size_bytes=len(data))

    def _give_up(self, error: LinkError) -> None:
        text = str(error)[:_SENTENCE]
        self._outbox.end_with(encode_frame(Frame(kind=FrameKind.ERROR, text=text)), error)

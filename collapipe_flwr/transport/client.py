"""The client of an edge server: control calls, weights, and the stream that is a `Link`."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from typing import TypeVar

import grpc
from torch import Tensor

from collapipe_flwr.core.errors import (
    FrozenWanted,
    LinkError,
    LinkTimeout,
    ProtocolError,
    Unreachable,
)
from collapipe_flwr.core.heartbeat import Heartbeat
from collapipe_flwr.core.links import LinkConfig
from collapipe_flwr.pipeline.benchmark import BenchmarkAnswer, BenchmarkRequest
from collapipe_flwr.pipeline.digest import Digests, Keys
from collapipe_flwr.pipeline.frame import Frame, FrameKind
from collapipe_flwr.pipeline.link import Link
from collapipe_flwr.pipeline.meter import StageReport
from collapipe_flwr.pipeline.session import Health, SessionRequest, StepMark, Timeline
from collapipe_flwr.transport import methods
from collapipe_flwr.transport.codec import decode_frame, encode_frame
from collapipe_flwr.transport.host_status import HostStatus, ProbeAnswer, ProbeRequest
from collapipe_flwr.transport.keepalive import Keepalive, keepalive_options
from collapipe_flwr.transport.limits import FrameLimits
from collapipe_flwr.transport.messages import decode_message, encode_message
from collapipe_flwr.transport.rate_limit import StreamSettings
from collapipe_flwr.transport.stream import StreamLink
from collapipe_flwr.transport.tls import TlsFiles, open_channel
from collapipe_flwr.transport.weights import gather_weights, weight_frames

Answer = TypeVar("Answer")
_LOOK_S = 0.5
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0  # between calls that are broken off
_WAKE_S = 120.0  # for a board that loads its libraries with the first session
_DRAIN_S = 60.0  # for the edge to finish what it has, when a stream is closed in good order
_ABORT_S = 1.0  # for the edge to hear why, when it is closed with an error
_STREAM_BITS = 48  # of a random number: no two streams of a round have the same
_AWAY = frozenset(
    {
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.CANCELLED,
    }
)
_CLOSED = "Channel closed!"  # what gRPC says of calls on a channel that this side closed


class EdgeClient:
    """Talks to one edge server, or device (`what`); use as a context manager.

    With TLS the peer must prove the host in `address`, or `certificate_name` where it is given.

    Control calls end within `deadline_s`, transfers of weights within `transfer_s`; those that may
    be made twice are repeated for `patience_s` while the edge is away, as when it restarts. Every
    method raises LinkError with one sentence "edge at ADDRESS ..." when the edge cannot be
    reached, refuses or breaks off, and LinkTimeout when it does not answer in time. With a
    `heartbeat` calls and streams also break when the edge has shown no life for so long, however
    long it may take to answer.
    """

    def __init__(
        self,
        address: str,
        *,
        what: str = "edge",
        tls: TlsFiles | None = None,
        certificate_name: str = "",
        deadline_s: float = 20.0,
        transfer_s: float = 600.0,
        patience_s: float = 0.0,
        limits: FrameLimits | None = None,
        heartbeat: Heartbeat | None = None,
    ) -> None:
        self.address = address
        self._patience_s = patience_s
        self.peer = f"{what} at {address}"
        self._deadline_s = deadline_s
        self._transfer_s = transfer_s
        self._limits = limits or FrameLimits()
        named = methods.name_options(certificate_name)
        options = [*methods.channel_options(self._limits), *named]
        self._connect = partial(open_channel, address, tls, options)
        self._channel = self._connect()
        self._heartbeat = heartbeat
        self._was_silent = False
        self._missed_since_s: float | None = None  # when a patient call first found the edge away
        self._closed = threading.Event()
        self._pulse: Keepalive | None = None
        self._life = ExitStack()
        if heartbeat is not None:
            pinged = partial(open_channel, address, tls, [*keepalive_options(heartbeat), *named])
            self._pulse = self._life.enter_context(Keepalive(pinged, heartbeat, self._break))

    def open_session(self, request: SessionRequest) -> None:
        """Make a session on the edge; it needs weights before it can run."""
        within_s = max(self._deadline_s, _WAKE_S)
        self._unary("OpenSession", encode_message(request), within_s=within_s)

    def push_weights(self, session_id: str, token: str, weights: Mapping[str, Tensor]) -> None:
        """Set the weights of a session's part; the optimiser starts anew, or from its slots."""
        frames = (encode_frame(f) for f in weight_frames(weights))

        def push() -> None:
            call = self._channel.stream_unary(methods.method("PushWeights"), None, None)
            call(frames, timeout=self._transfer_s, metadata=_key(session_id, token))

        self._translated(push)

    def fetch_weights(
        self,
        session_id: str,
        token: str,
        most_bytes: int = 2**40,
        *,
        with_optimizer: bool = False,
        keys: tuple[str, ...] | None = None,
    ) -> dict[str, Tensor]:
        """The weights that a session's part has now, with optimiser slots where asked for.

        `keys` limits the answer to some of them.
        """
        request = encode_message(Keys(keys=keys))
        metadata = (*_key(session_id, token), (methods.SLOTS_KEY, str(int(with_optimizer))))

        def fetch() -> dict[str, Tensor]:
            call = self._channel.unary_stream(methods.method("FetchWeights"), None, None)
            answers = call(request, timeout=self._transfer_s, metadata=metadata)
            return gather_weights(_decoded(answers, self._limits), most_bytes)

        return self.patiently(fetch)

    def missing(self, session_id: str, token: str, digests: Mapping[str, str]) -> tuple[str, ...]:
        """Which of these weights a push must bring; the host kept the others."""
        data = encode_message(Digests(digests=digests))
        answer = self._unary("Missing", data, _key(session_id, token), self._transfer_s)
        return self._translated(lambda: decode_message(Keys, answer)).keys or ()

    def digests(
        self, session_id: str, token: str, *, with_optimizer: bool = False
    ) -> dict[str, str]:
        """The content digests of what `fetch_weights` would bring."""
        metadata = (*_key(session_id, token), (methods.SLOTS_KEY, str(int(with_optimizer))))
        answer = self._unary("Digests", b"", metadata, self._transfer_s)
        return dict(self._translated(lambda: decode_message(Digests, answer)).digests)

    def report(self, session_id: str, token: str) -> StageReport:
        """What the session measured over all steps that count; see `EdgeService.report`."""
        answer = self._again("Report", b"", _key(session_id, token))
        return self._translated(lambda: decode_message(StageReport, answer))

    def timeline(self, session_id: str, token: str) -> Timeline:
        """What the session did when, by the edge's clock, over all steps that count."""
        answer = self._again("Timeline", b"", _key(session_id, token))
        return self._translated(lambda: decode_message(Timeline, answer))

    def snapshot(self, session_id: str, token: str, step: int) -> None:
        """Let a recoverable session keep its state after `step` steps."""
        self._again("Snapshot", encode_message(StepMark(step=step)), _key(session_id, token))

    def rollback(self, session_id: str, token: str, step: int) -> None:
        """Let a recoverable session go back to its snapshot after `step` steps."""
        self._again("Rollback", encode_message(StepMark(step=step)), _key(session_id, token))

    def close_session(self, session_id: str, token: str, *, within_s: float | None = None) -> None:
        """Free everything that the session holds."""
        self._unary("CloseSession", b"", _key(session_id, token), within_s)

    def health(self) -> Health:
        """How many sessions the host holds; it may load its libraries first."""
        answer = self._unary("Health", b"")
        return self._translated(lambda: decode_message(Health, answer))

    def status(self) -> HostStatus:
        """Memory and clock of the host, which loads nothing to answer: whether it is there."""
        answer = self._unary("Status", b"")
        return self._translated(lambda: decode_message(HostStatus, answer))

    def probe(self, request: ProbeRequest) -> ProbeAnswer:
        """Have the host measure its own way to another; it may load its libraries first."""
        answer = self._unary("Probe", encode_message(request), within_s=self._transfer_s)
        return self._translated(lambda: decode_message(ProbeAnswer, answer))

    def benchmark(self, request: BenchmarkRequest) -> BenchmarkAnswer:
        """Have the host time a transformer block; it may load its libraries first."""
        answer = self._unary("Benchmark", encode_message(request), within_s=self._transfer_s)
        return self._translated(lambda: decode_message(BenchmarkAnswer, answer))

    def echo(self, payload: bytes = b"") -> None:
        """Send bytes there and hear that they came."""
        self._unary("Echo", payload)

    def stream(
        self,
        session_id: str,
        token: str,
        *,
        name: str = "control unit",
        config: LinkConfig | None = None,
    ) -> Link:
        """The link to the session's stage; `name` is how the edge calls this side in errors.

        This side sends at the forward rate of `config` and asks the edge to keep to the other one.

        Returns after the edge accepted the stream. Close the link when done.
        """
        config = config or LinkConfig()
        settings = StreamSettings(
            codec=config.codec,
            limits=self._limits,
            rate_bit_per_s=config.forward_bit_per_s,
            stream_id=secrets.randbits(_STREAM_BITS),
        )
        call_slot: list[grpc.Call] = []
        link = StreamLink(
            self.peer,
            settings,
            self._translate,
            hang_up=lambda in_order: _hang_up(call_slot, reader, in_order),
        )
        extra = (
            (methods.CODEC_KEY, settings.codec),
            (methods.NAME_KEY, _ascii(name)),
            (methods.RATE_KEY, repr(config.backward_bit_per_s or 0.0)),
            (methods.STREAM_KEY, str(settings.stream_id)),
        )
        call = self._channel.stream_stream(methods.method("Stream"), None, None)(
            link.outgoing(), metadata=(*_key(session_id, token), *extra)
        )
        call_slot.append(call)
        reader = threading.Thread(target=_read, args=(link, call), name="edge-reader", daemon=True)
        reader.start()
        self._await_hello(link)
        return link

    def patiently(self, call: Callable[[], Answer]) -> Answer:
        """Repeat what may be done twice while the edge is away.

        All calls together wait for `patience_s` from the first one that missed the edge: those of
        many sessions, one after the other, do not add up. One that an edge breaks off although it
        answers is made again at once, then ever more rarely.
        """
        start_s, pause_s = time.monotonic(), 0.0
        while True:
            try:
                answer = self._translated(call)
            except (Unreachable, LinkTimeout):
                if self._missed_since_s is None:
                    self._missed_since_s = start_s
                until_s = max(self._missed_since_s + self._patience_s, start_s + _LOOK_S)
                if not self._connected_before(until_s) or self._closed.wait(pause_s):
                    raise
            except LinkError:  # a refusal is an answer
                self._missed_since_s = None
                raise
            else:
                self._missed_since_s = None
                return answer
            pause_s = min(max(2 * pause_s, _FIRST_PAUSE_S), _LONGEST_PAUSE_S)

    def close(self) -> None:
        """Close the channel; its streams break."""
        self._closed.set()
        self._life.close()
        self._channel.close()

    def __enter__(self) -> EdgeClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def silent(self) -> bool:
        """Whether the peer has missed its heartbeat and is not back yet."""
        return self._pulse is not None and self._pulse.lost

    def _break(self) -> None:
        """Break all that waits for a peer that fell silent."""
        silent, self._was_silent = self._channel, True
        self._channel = self._connect()
        silent.close()

    def _await_hello(self, link: StreamLink) -> None:
        try:
            frame = link.receive(deadline_s=self._deadline_s)
        except LinkError as error:
            link.close(str(error))
            raise
        if frame.kind is not FrameKind.HELLO:
            link.close("a stream begins with HELLO")
            raise ProtocolError(f"{self.peer} began a stream with {frame.kind.name}")

    def _unary(
        self,
        name: str,
        data: bytes,
        metadata: tuple[tuple[str, str], ...] = (),
        within_s: float | None = None,
    ) -> bytes:
        timeout_s = within_s or self._deadline_s
        return self._translated(lambda: self._ask(name, data, metadata, timeout_s))

    def _again(self, name: str, data: bytes, metadata: tuple[tuple[str, str], ...]) -> bytes:
        """A call that may be made twice: it outlives a restart of the edge."""
        return self.patiently(lambda: self._ask(name, data, metadata, self._deadline_s))

    def _ask(
        self, name: str, data: bytes, metadata: tuple[tuple[str, str], ...], timeout_s: float
    ) -> bytes:
        call = self._channel.unary_unary(methods.method(name), None, None)
        answer: bytes = call(data, timeout=timeout_s, metadata=metadata)
        return answer

    def _connected_before(self, until_s: float) -> bool:
        """Wait for the edge to listen again; whether it did in time.

        A missed heartbeat replaces the channel meanwhile, so none is waited for to the end.
        """
        while (now_s := time.monotonic()) < until_s and not self._closed.is_set():
            look_s = min(until_s - now_s, _LOOK_S)
            status = self._channel.unary_unary(methods.method("Status"), None, None)
            try:
                status(b"", timeout=look_s, wait_for_ready=True)
            except grpc.RpcError as error:
                if error.code() not in _AWAY:
                    return True  # a refusal is an answer
            except ValueError:  # closed by a missed heartbeat; the next look takes the new channel
                pass
            else:
                return True
            self._closed.wait(max(now_s + look_s - time.monotonic(), 0.0))  # some fail at once
        return False

    def _translated(self, call: Callable[[], Answer]) -> Answer:
        if self.silent and not self._patience_s:
            raise self._lifeless()
        try:
            return call()
        except grpc.RpcError as error:
            raise self._translate(error) from error
        except ProtocolError as error:
            raise ProtocolError(f"{self.peer} answered nonsense: {error}") from error
        except ValueError as error:  # the channel was closed just before the call began
            raise Unreachable(f"{self.peer} broke off: {error}") from error

    def _lifeless(self) -> Unreachable:
        assert self._heartbeat is not None
        silence_s = self._heartbeat.lost_after_s
        return Unreachable(f"{self.peer} has shown no life for {silence_s:g} s")

    def _translate(self, error: grpc.RpcError) -> LinkError:
        code, details = error.code(), error.details()
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return LinkTimeout(f"{self.peer} did not answer in time")
        if self._was_silent and details == _CLOSED:
            return self._lifeless()
        if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
            return Unreachable(f"{self.peer} cannot be reached or broke off: {details}")
        if code is grpc.StatusCode.NOT_FOUND:
            return FrozenWanted(f"{self.peer} refused: {details}")
        return LinkError(f"{self.peer} refused: {details}")


def _key(session_id: str, token: str) -> tuple[tuple[str, str], ...]:
    return ((methods.SESSION_KEY, session_id), (methods.TOKEN_KEY, token))


def _ascii(name: str) -> str:
    """Metadata of a call takes no other characters."""
    return name.encode("ascii", "replace").decode()


def _decoded(messages: Iterable[bytes], limits: FrameLimits) -> Iterator[Frame]:
    return (decode_frame(data, limits) for data in messages)


def _read(link: StreamLink, call: Iterable[bytes]) -> None:
    link.feed(call)
    link.stop_sending()


def _hang_up(calls: list[grpc.Call], reader: threading.Thread, in_order: bool) -> None:
    """Let the stream end, then cancel what is left of it."""
    reader.join(_DRAIN_S if in_order else _ABORT_S)
    for call in calls:
        call.cancel()

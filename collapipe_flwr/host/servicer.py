"""The methods of a host: decode, one call of the service, encode."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import grpc
from torch import Tensor

from collapipe_flwr.config.access_control import Caller
from collapipe_flwr.core.errors import CheckpointMissing, CollaPipeError, LinkError
from collapipe_flwr.host.allocator import give_back
from collapipe_flwr.host.ledger import NoRoom
from collapipe_flwr.host.service import EdgeService, Reserve
from collapipe_flwr.host.session import SessionRefused, Stream
from collapipe_flwr.pipeline.benchmark import BenchmarkAnswer, BenchmarkRequest, run_benchmark
from collapipe_flwr.pipeline.digest import Digests, Keys
from collapipe_flwr.pipeline.frame import Frame, FrameKind
from collapipe_flwr.pipeline.session import SessionRequest, StepMark
from collapipe_flwr.transport import methods
from collapipe_flwr.transport.bounded import call_deadline
from collapipe_flwr.transport.codec import decode_frame, encode_frame
from collapipe_flwr.transport.host_status import ProbeAnswer, ProbeRequest
from collapipe_flwr.transport.limits import FrameLimits
from collapipe_flwr.transport.messages import decode_message, encode_message
from collapipe_flwr.transport.quantize import WIRE_CODECS
from collapipe_flwr.transport.rate_limit import StreamSettings
from collapipe_flwr.transport.stream import StreamLink
from collapipe_flwr.transport.weights import gather_weights, weight_frames

_log = logging.getLogger(__name__)
_SETTLE_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServicerConfig:
    """What callers may send, in how much time.

    ``guests`` hold sessions here besides the host's own cluster or server: a few each, and a share
    of the memory. ``probe`` tries the way to another host; the edge dials nobody.
    """

    limits: FrameLimits = field(default_factory=FrameLimits)
    transfer_s: float = 600.0
    guests: frozenset[str] = frozenset()
    sessions_of_guest: int = 8
    share_of_guest: float = 0.25
    probe: Callable[[ProbeRequest], ProbeAnswer] | None = None


class Servicer:
    """One method per RPC."""

    def __init__(self, service: EdgeService, settings: ServicerConfig | None = None) -> None:
        settings = settings or ServicerConfig()
        self._service = service
        self._workers = ThreadPoolExecutor(
            service.health().most_sessions, thread_name_prefix="edge-stage"
        )
        self._measuring = threading.Lock()
        self._limits = settings.limits
        self._transfer_s = settings.transfer_s
        self._settings = settings

    def sessions(self) -> int:
        """How many are open."""
        return self._service.health().sessions

    def close(self) -> None:
        """Wait for the stages that run."""
        self._workers.shutdown(wait=True)

    def may_use(self, caller: Caller, method: str, session_id: str) -> bool:
        """Whether a caller may do this to a session; what is unknown is refused by the method."""
        request = self._service.request(session_id)
        return request is None or caller.may_use(
            method, cluster_id=request.cluster_id, opener=request.opener
        )

    def open_session(
        self, data: bytes, context: grpc.ServicerContext, caller: Caller | None = None
    ) -> bytes:
        with _refusing(context):
            request = decode_message(SessionRequest, data)
            opener = caller.name if caller else ""
            cluster_id = caller.cluster_of(request.cluster_id) if caller else request.cluster_id
            guest = opener in self._settings.guests
            self._service.open(
                replace(request, cluster_id=cluster_id, opener=opener),
                most_of_opener=self._settings.sessions_of_guest if guest else None,
                share_of_opener=self._settings.share_of_guest if guest else 1.0,
            )
        return b""

    def push_weights(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        with _refusing(context), call_deadline(context, self._transfer_s):
            session_id, token, _metadata = _caller(context)
            frames = (decode_frame(data, self._limits) for data in messages)

            def receive(reserve: Reserve) -> dict[str, Tensor]:
                return gather_weights(frames, self._service.health().most_bytes, reserve)

            self._service.receive_weights(session_id, token, receive)
        give_back()
        return b""

    def missing(self, data: bytes, context: grpc.ServicerContext) -> bytes:
        with _refusing(context):
            session_id, token, _metadata = _caller(context)
            digests = decode_message(Digests, data).digests
            return encode_message(Keys(keys=self._service.missing(session_id, token, digests)))

    def digests(self, _: bytes, context: grpc.ServicerContext) -> bytes:
        with _refusing(context):
            session_id, token, metadata = _caller(context)
            slots = metadata.get(methods.SLOTS_KEY) == "1"
            found = self._service.digests(session_id, token, with_optimizer=slots)
            return encode_message(Digests(digests=found))

    def fetch_weights(self, data: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        """Chunk by piece from the part itself, so that sending takes no memory for a copy."""
        with _refusing(context), call_deadline(context, self._transfer_s):
            session_id, token, metadata = _caller(context)
            slots = metadata.get(methods.SLOTS_KEY) == "1"
            keys = decode_message(Keys, data).keys if data else None
            with self._service.reading(session_id, token, with_optimizer=slots) as weights:
                if keys is not None:
                    weights = {key: weights[key] for key in keys if key in weights}
                for frame in weight_frames(weights):
                    yield encode_frame(frame)

    def report(self, _: bytes, context: grpc.ServicerContext) -> bytes:
        with _refusing(context):
            session_id, token, _metadata = _caller(context)
            return encode_message(self._service.report(session_id, token))

    def timeline(self, _: bytes, context: grpc.ServicerContext) -> bytes:
        with _refusing(context):
            session_id, token, _metadata = _caller(context)
            return encode_message(self._service.timeline(session_id, token))

    def snapshot(self, data: bytes, context: grpc.ServicerContext) -> bytes:
        with _refusing(context):
            session_id, token, _metadata = _caller(context)
            self._service.snapshot(session_id, token, decode_message(StepMark, data).step)
        return b""

    def rollback(self, data: bytes, context: grpc.ServicerContext) -> bytes:
        with _refusing(context):
            session_id, token, _metadata = _caller(context)
            self._service.rollback(session_id, token, decode_message(StepMark, data).step)
        return b""

    def close_session(self, _: bytes, context: grpc.ServicerContext) -> bytes:
        with _refusing(context):
            session_id, token, _metadata = _caller(context)
            self._service.close(session_id, token)
        give_back()
        return b""

    def health(self, _: bytes, context: grpc.ServicerContext) -> bytes:
        _ = context
        return encode_message(self._service.health())

    def benchmark(self, data: bytes, context: grpc.ServicerContext) -> bytes:
        with _refusing(context):
            request = decode_message(BenchmarkRequest, data)
            if self._service.health().running or not self._measuring.acquire(blocking=False):
                raise SessionRefused("the host is at work, so a benchmark would mislead")
            try:
                return encode_message(self._measured(request))
            finally:
                self._measuring.release()

    def _measured(self, request: BenchmarkRequest) -> BenchmarkAnswer:
        """With the memory that the next session may have."""
        spare_bytes, most_bytes = self._service.spare_bytes(), self._service.health().most_bytes
        found = run_benchmark(request)
        return replace(found, memory_bytes=min(found.memory_bytes + spare_bytes, most_bytes))

    def probe(self, data: bytes, context: grpc.ServicerContext) -> bytes:
        with _refusing(context):
            if self._settings.probe is None:
                raise SessionRefused("this host dials nobody")
            return encode_message(self._settings.probe(decode_message(ProbeRequest, data)))

    def stream(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        """Three threads: this one sends, a reader receives, a worker computes."""
        with _refusing(context):
            session_id, token, metadata = _caller(context)
            settings = self._stream_settings(metadata)
            stream = self._service.claim(session_id, token)
            try:
                link, work = self._begun(stream, settings, metadata, context)
            except BaseException:
                self._service.release(stream)
                raise
        threading.Thread(target=link.feed, args=(messages,), daemon=True).start()
        yield from link.outgoing()
        wait([work], timeout=_SETTLE_S)  # so that the session's fate is known when the call ends

    def _begun(
        self,
        stream: Stream,
        settings: StreamSettings,
        metadata: dict[str, str],
        context: grpc.ServicerContext,
    ) -> tuple[StreamLink, Future[None]]:
        peer = metadata.get(methods.NAME_KEY, context.peer())[:80]
        link = StreamLink(peer, settings, lambda _: LinkError(f"{peer} broke off the stream"))
        context.add_callback(lambda: link.broken(LinkError(f"{peer} broke off the stream")))
        link.send(Frame(kind=FrameKind.HELLO), deadline_s=1.0)
        work = self._workers.submit(self._service.serve, stream, link)
        session_id = stream.session.request.session_id
        work.add_done_callback(lambda w: _finish(w, session_id, link))
        return link, work

    def _stream_settings(self, metadata: object) -> StreamSettings:
        assert isinstance(metadata, dict)
        codec = metadata.get(methods.CODEC_KEY, "fp32")
        if codec not in WIRE_CODECS:
            raise SessionRefused(f"codec must be one of {', '.join(WIRE_CODECS)}, got {codec[:20]}")
        return StreamSettings(
            codec=codec,
            limits=self._limits,
            rate_bit_per_s=_rate(metadata.get(methods.RATE_KEY, "0")),
            stream_id=_stream_id(metadata.get(methods.STREAM_KEY, "0")),
        )


def _rate(text: str) -> float | None:
    """Bits per second that this end keeps to; None for as fast as it goes."""
    try:
        rate = float(text)
    except ValueError as error:
        raise SessionRefused(f"the rate of a link must be a number, got {text[:20]!r}") from error
    if not 0 <= rate < math.inf:
        raise SessionRefused(f"the rate of a link must be finite and >= 0, got {rate}")
    return rate or None


def _stream_id(text: str) -> int:
    """How the other end calls the stream in its notes."""
    if not (text.isdecimal() and len(text) < 19):
        raise SessionRefused(f"the id of a stream must be a whole number >= 0, got {text[:20]!r}")
    return int(text)


def _finish(work: Future[None], session_id: str, link: StreamLink) -> None:
    """Close the link behind a stage; an error that is no peer's fault is logged with its trace."""
    link.close()
    error = work.exception()
    if isinstance(error, CollaPipeError):
        _log.warning("session %s ended: %s", session_id, error)
    elif error is not None:
        _log.error("session %s failed", session_id, exc_info=error)


@contextmanager
def _refusing(context: grpc.ServicerContext) -> Iterator[None]:
    """Turn our errors into one gRPC status with the sentence."""
    try:
        yield
    except (SessionRefused, NoRoom) as error:
        context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
    except CheckpointMissing as error:
        context.abort(grpc.StatusCode.NOT_FOUND, str(error))
    except CollaPipeError as error:
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))


def _caller(context: grpc.ServicerContext) -> tuple[str, str, dict[str, str]]:
    """Session id, token and all metadata of a call."""
    metadata = dict(methods.metadata_of(context.invocation_metadata()))
    return metadata[methods.SESSION_KEY], metadata[methods.TOKEN_KEY], metadata

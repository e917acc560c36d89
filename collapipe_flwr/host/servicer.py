"""The methods of a host: decode, one call of the service, encode."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import grpc
from torch import Tensor

from collapipe_flwr.config.access_control import Caller
from collapipe_flwr.core.errors import (
    Busy,
    CheckpointMissing,
    CollaPipeError,
    LinkError,
    ProtocolError,
)
from collapipe_flwr.core.json_log import add_log_fields
from collapipe_flwr.core.measurements import StageMeasurement
from collapipe_flwr.core.texts import SHORT, to_one_line
from collapipe_flwr.core.version import explain_version
from collapipe_flwr.host.allocator import Trimmer, trim_heap
from collapipe_flwr.host.ledger import NoRoom
from collapipe_flwr.host.service import HostService, Reserve
from collapipe_flwr.host.session import Lane, SessionRefused, SessionStream
from collapipe_flwr.pipeline.benchmark import BenchmarkAnswer, BenchmarkRequest, run_benchmark
from collapipe_flwr.pipeline.config import Health, PassesDone, SessionKey, SessionRequest
from collapipe_flwr.pipeline.link import Frame, FrameKind
from collapipe_flwr.transport import methods
from collapipe_flwr.transport.codec import decode_frame, encode_frame
from collapipe_flwr.transport.methods import (
    FetchRequest,
    Method,
    ProbeAnswer,
    ProbeRequest,
    StreamRequest,
    decode_message,
    encode_message,
)
from collapipe_flwr.transport.server import end_threads, limit_call
from collapipe_flwr.transport.stream import StreamLink
from collapipe_flwr.transport.weights import cut_weights, gather_weights

_log = logging.getLogger(__name__)
_SETTLE_S = 5.0
_TRANSFER_S = 600.0  # from the first piece of a part's weights to the last


@dataclass(frozen=True, slots=True)
class Call:
    """An RPC that runs."""

    context: grpc.ServicerContext
    caller: Caller | None  # None: anonymous
    metadata: Mapping[str, str]

    @property
    def key(self) -> SessionKey:
        """The session that it names. Raises ProtocolError when it names none."""
        try:
            return SessionKey(
                session_id=self.metadata[methods.SESSION_KEY],
                token=self.metadata[methods.TOKEN_KEY],
            )
        except KeyError as error:
            raise ProtocolError("the call names no session or no token") from error


class Servicer:
    """One method per RPC, called by the name in `transport.methods`.

    ``control_units`` counts those that share this host: where there are several, each may hold
    ``sessions_of_each`` sessions and its part of the memory. ``probe`` measures the way to another
    host; the edge connects to none.
    """

    def __init__(
        self,
        service: HostService,
        *,
        control_units: Callable[[], int] = lambda: 1,
        sessions_of_each: int = 8,
        probe: Callable[[ProbeRequest], ProbeAnswer] | None = None,
    ) -> None:
        self.service = service
        self._control_units = control_units
        self._sessions_of_each = sessions_of_each
        self._probe = probe
        self._workers = ThreadPoolExecutor(
            service.measure_load().most_sessions, thread_name_prefix="edge-stage"
        )
        self._measuring = threading.Lock()
        self._trim = Trimmer(service.compute)

    def close(self) -> None:
        """Break off the streams that run, and wait for their stages."""
        self.service.break_off("the host is stopping")
        end_threads(self._workers, "stages")

    def may_use(self, caller: Caller, method: Method, session_id: str) -> bool:
        """Return whether a caller may do this to a session; methods refuse an unknown session."""
        request = self.service.sessions.find_request(session_id)
        return request is None or caller.may_use(
            method.name, cluster_id=request.cluster_id, opener=request.opener
        )

    def answer(
        self, method: Method, message: Any, context: grpc.ServicerContext, caller: Caller | None
    ) -> Iterator[bytes]:
        """Yield the answer to `message` (or to the stream of an upload), or those of a download."""
        items = context.invocation_metadata()
        call = Call(context, caller, {key: text for key, text in items if isinstance(text, str)})
        with _translate_errors(context):
            answer = getattr(self, method.attribute)(message, call)
            if method.downloads:
                yield from answer
            else:
                yield b"" if answer is None else encode_message(answer)

    def open_session(self, data: bytes, call: Call) -> None:
        caller, version = call.caller, call.metadata.get(methods.VERSION_KEY, "")
        opener = caller.name if caller else ""
        if other := explain_version(
            opener or "the caller", to_one_line(version, SHORT), "this host"
        ):
            raise SessionRefused(other)
        request = decode_message(SessionRequest, data)
        cluster_id = caller.cluster_of(request.cluster_id) if caller else request.cluster_id
        sharing = max(self._control_units(), 1)
        self.service.open(
            replace(request, cluster_id=cluster_id, opener=opener),
            most_of_opener=self._sessions_of_each if sharing > 1 else None,
            share_of_opener=1.0 / sharing,
        )

    def push_weights(self, messages: Iterator[bytes], call: Call) -> None:
        frames = (decode_frame(data) for data in messages)

        def receive(reserve: Reserve) -> dict[str, Tensor]:
            return gather_weights(frames, self.service.measure_load().most_bytes, reserve)

        with limit_call(call.context, _TRANSFER_S):
            self.service.receive_weights(call.key, receive)
        self._trim()

    def missing(self, data: bytes, call: Call) -> tuple[str, ...]:
        return self.service.find_missing(call.key, decode_message(dict[str, str], data))

    def digests(self, data: bytes, call: Call) -> dict[str, str]:
        return self.service.digest_weights(call.key, with_optimizer=decode_message(bool, data))

    def fetch_weights(self, data: bytes, call: Call) -> Iterator[bytes]:
        """Yield weights piece by piece from the part itself, so that sending needs no copy."""
        request = decode_message(FetchRequest, data)
        with (
            limit_call(call.context, _TRANSFER_S),
            self.service.read(call.key, with_optimizer=request.with_optimizer) as weights,
        ):
            if request.keys is not None:
                weights = {key: weights[key] for key in request.keys if key in weights}
            for frame in cut_weights(weights):
                yield encode_frame(frame)

    def report(self, _: bytes, call: Call) -> StageMeasurement:
        return self.service.report(call.key)

    def progress(self, _data: bytes, _call: Call) -> dict[str, PassesDone]:
        return self.service.sessions.count_passes()

    def close_session(self, _: bytes, call: Call) -> None:
        self.service.close(call.key)
        self._trim()

    def health(self, _data: bytes, _call: Call) -> Health:
        return self.service.measure_load()

    def benchmark(self, data: bytes, _: Call) -> BenchmarkAnswer:
        """Run a benchmark; the answer's memory is what the next session may have."""
        request, health = decode_message(BenchmarkRequest, data), self.service.measure_load()
        if self.service.is_at_work() or not self._measuring.acquire(blocking=False):
            raise Busy("the host is at work, so a benchmark would mislead")
        try:
            spare_bytes = self.service.count_spare_bytes()
            found = run_benchmark(request, self.service.compute)
            trim_heap(self.service.compute)
        finally:
            self._measuring.release()
        memory_bytes = min(found.memory_bytes + spare_bytes, health.most_bytes)
        return replace(found, memory_bytes=memory_bytes)

    def probe(self, data: bytes, _: Call) -> ProbeAnswer:
        if self._probe is None:
            raise SessionRefused("this host connects to no other")
        return self._probe(decode_message(ProbeRequest, data))

    def stream(self, messages: Iterator[bytes], call: Call) -> Iterator[bytes]:
        """Run a lane of a stream: this thread sends, a reader receives, a worker computes.

        The worker starts with the last of the stream's lanes.
        """
        opening = call.metadata.get(methods.STREAM_KEY, "").encode()
        request = decode_message(StreamRequest, opening)
        lane = Lane(request.link.lane, request.link.lanes)
        stream = self.service.claim(call.key, lane)
        try:
            link = self._begin(stream, lane, request, call)
        except BaseException:
            self.service.release(stream)
            raise
        threading.Thread(target=link.feed, args=(messages,), daemon=True).start()
        try:
            yield from link.encode_outgoing()
        finally:
            self._leave(stream)
        stream.over.wait(_SETTLE_S)  # so that the session is settled when the call ends

    def _begin(
        self, stream: SessionStream, lane: Lane, request: StreamRequest, call: Call
    ) -> StreamLink:
        peer = request.name[:80]
        link = StreamLink(
            peer,
            lambda _: LinkError(f"{peer} broke off the stream"),
            peer_id=call.caller.name if call.caller else peer,  # whatever it calls itself
            codec=request.link.codec,
            rate_bit_per_s=request.link.backward_bit_per_s,
            stream_id=request.stream_id,
        )

        def leave() -> None:
            link.break_off(LinkError(f"{peer} broke off the stream"))
            self._leave(stream)

        if not call.context.add_callback(leave):  # the call has ended already
            leave()
        link.send(Frame(kind=FrameKind.HELLO), deadline_s=1.0)
        if stream.session.enter(stream, lane, link):
            self._workers.submit(self._serve, stream)
        return link

    def _serve(self, stream: SessionStream) -> None:
        """Run a stage, and close its links; an unexpected error is logged with its trace."""
        request, lanes = stream.session.request, stream.lanes
        with add_log_fields(**request.about):
            try:
                self.service.serve(stream, lanes.upstream, lanes.behind)
            except CollaPipeError as error:
                _log.warning("session %s ended: %s", request.key.session_id, error)
            except BaseException:
                _log.exception("session %s failed", request.key.session_id)
            finally:
                for link in filter(None, lanes.links.values()):
                    link.close()

    def _leave(self, stream: SessionStream) -> None:
        """Release the stream of a lane that ended: its stage may be waiting for another lane."""
        if stream.lanes.are_several:
            self.service.release(stream, "another link of this stage broke off")


@contextmanager
def _translate_errors(context: grpc.ServicerContext) -> Iterator[None]:
    """Turn our errors into a gRPC status with the sentence."""
    try:
        yield
    except (SessionRefused, NoRoom) as error:
        context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
    except Busy as error:
        context.abort(grpc.StatusCode.ABORTED, str(error))
    except CheckpointMissing as error:
        context.abort(grpc.StatusCode.NOT_FOUND, str(error))
    except CollaPipeError as error:
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))

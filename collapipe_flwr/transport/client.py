"""Client of an edge or device: `HostClient` for the host, `RemoteSession` for one part on it.

A device is a client of the next hosts of its chain, by its `Dialer`.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from statistics import median
from typing import Any

from torch import Tensor

from collapipe_flwr.core.errors import LinkError, ModelError, ProtocolError
from collapipe_flwr.core.json_codec import to_json
from collapipe_flwr.core.links import LinkConfig, TlsFiles
from collapipe_flwr.core.measurements import StageMeasurement, TransferStats
from collapipe_flwr.core.version import read_own_version
from collapipe_flwr.pipeline.benchmark import BenchmarkAnswer, BenchmarkRequest
from collapipe_flwr.pipeline.config import Health, NextHop, PassesDone, SessionKey, SessionRequest
from collapipe_flwr.pipeline.link import Frame, FrameKind, Link
from collapipe_flwr.pipeline.offload import LazyMapping, Offload
from collapipe_flwr.pipeline.state import compute_digest
from collapipe_flwr.transport import methods
from collapipe_flwr.transport.codec import decode_frame, encode_frame
from collapipe_flwr.transport.connection import Answer, Connection
from collapipe_flwr.transport.methods import HostStatus, Metadata, Method, ProbeAnswer, ProbeRequest
from collapipe_flwr.transport.stream import StreamLink
from collapipe_flwr.transport.weights import cut_weights, gather_each, gather_weights

_WAKE_S = 120.0  # for a board that loads its libraries with the first session
_DRAIN_S = 60.0  # for the host to finish what it has, when a stream is closed in good order
_ABORT_S = 1.0  # for the host to hear why, when it is closed with an error
_STREAM_BITS = 48  # of a random number: no two streams of a round have the same
_MOST_BYTES = 2**40  # of weights that are fetched
_ECHOES = 5
_SAMPLE_BYTES = 2**17
_LONG_S = 1.0
_LEAST_CARRYING = 0.1  # of the time of a full echo


class HostClient(Connection):
    """The calls of a host besides those of its sessions; see `Connection` for deadlines."""

    @classmethod
    def from_hop(cls, hop: NextHop, tls: TlsFiles | None, *, deadline_s: float = 0.0) -> HostClient:
        """Make a client of the host of ``hop``, which its heartbeat watches."""
        return cls(
            hop.address,
            what=hop.name,
            tls=tls,
            certificate_name=hop.certificate_name,
            deadline_s=deadline_s,
            heartbeat=hop.heartbeat,
        )

    def open_session(self, request: SessionRequest) -> RemoteSession:
        """Open a session; it needs weights before it can run."""
        within_s = max(self.deadline_s, _WAKE_S)
        version = ((methods.VERSION_KEY, read_own_version()),)
        self.call(methods.OPEN_SESSION, request, metadata=version, within_s=within_s)
        return self.get_session(request.key)

    def get_session(self, key: SessionKey) -> RemoteSession:
        """Return the open session with this key; nothing is sent."""
        return RemoteSession(self, key)

    def ask_health(self) -> Health:
        """Ask for the load of the host; it may load its libraries first."""
        return self.call(methods.HEALTH, answer=Health)

    def ask_progress(self, *, within_s: float) -> dict[str, PassesDone]:
        """Ask for the micro-batches done for each cluster's newest order, also within a step."""
        return self.call(methods.PROGRESS, answer=dict[str, PassesDone], within_s=within_s)

    def ask_status(self) -> HostStatus:
        """Ask for memory and clock of the host, which loads nothing to answer."""
        return self.call(methods.STATUS, answer=HostStatus)

    def probe(self, request: ProbeRequest) -> ProbeAnswer:
        """Have the host measure its link to another; it may load its libraries first."""
        return self.call(methods.PROBE, request, ProbeAnswer, within_s=self.transfer_s)

    def benchmark(self, request: BenchmarkRequest) -> BenchmarkAnswer:
        """Have the host time a transformer block; it may load its libraries first."""
        return self.call(methods.BENCHMARK, request, BenchmarkAnswer, within_s=self.transfer_s)

    def echo(self, payload: bytes = b"") -> None:
        """Send bytes, and wait for the empty answer."""
        self.attempt(lambda: methods.ECHO.bind(self.channel)(payload, timeout=self.deadline_s))

    def measure_way(self, payload_bytes: int) -> ProbeAnswer:
        """Measure rate and delay by the median of a few echoes; of fewer bytes on slow links."""

        def seconds(size_bytes: int, echoes: int = _ECHOES) -> float:
            payload, took_s = bytes(size_bytes), []
            for _ in range(echoes):
                start_s = time.perf_counter()
                self.echo(payload)
                took_s.append(time.perf_counter() - start_s)
            return median(took_s)

        self.echo()
        empty_s = seconds(0)
        size = min(payload_bytes, _SAMPLE_BYTES)
        if seconds(size, echoes=1) * payload_bytes / size < _LONG_S:
            size = payload_bytes
        full_s = seconds(size)
        # On a busy machine, empty echoes may take as long: a part always counts as carrying.
        carried_s = max(full_s - empty_s, _LEAST_CARRYING * full_s)
        return ProbeAnswer(rate_bit_per_s=8 * size / carried_s, delay_s=empty_s / 2)


@dataclass(frozen=True, slots=True)
class RemoteSession:
    """One session on the host that `client` talks to; see `Connection` for deadlines and errors."""

    client: HostClient
    key: SessionKey

    def push_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Set the weights of the session's part; the optimizer starts anew, or from its slots."""
        client, own = self.client, list[Exception]()

        def frames() -> Iterator[bytes]:
            try:
                yield from (encode_frame(frame) for frame in cut_weights(weights))
            except Exception as error:  # of this side; gRPC would hide it
                own.append(error)
                raise

        try:
            client.attempt(
                lambda: methods.PUSH_WEIGHTS.bind(client.channel)(
                    frames(), timeout=client.transfer_s, metadata=self._metadata
                )
            )
        except LinkError:
            for error in own:
                raise ModelError(f"weights cannot be sent: {error}") from error
            raise

    def push_missing(self, tensors: Mapping[str, Tensor]) -> TransferStats:
        """Set the weights; those that the host kept from its last session do not travel."""
        digests, sizes = _digest_all(tensors)
        pushed = [key for key in self.ask_missing(digests) if key in tensors]
        self.push_weights(LazyMapping.join(tensors).select(pushed))
        sent_bytes = sum(sizes[key] for key in pushed)
        return TransferStats(sent_bytes=sent_bytes, spared_bytes=sum(sizes.values()) - sent_bytes)

    def fetch_weights(self, *, with_optimizer: bool = False) -> dict[str, Tensor]:
        """Fetch the current weights of the session's part, on request with optimizer slots."""

        def fetch() -> dict[str, Tensor]:
            return gather_weights(self._fetch_frames(with_optimizer, None), _MOST_BYTES)

        return self.client.attempt_patiently(fetch)

    def fetch_changed(
        self,
        known: Mapping[str, Tensor],
        *,
        with_optimizer: bool = False,
        turn: AbstractContextManager[object] = nullcontext(),  # noqa: B008 - it holds nothing
    ) -> tuple[LazyMapping[Tensor], TransferStats]:
        """Fetch the weights that differ from ``known``, and take the others from there.

        Fetched weights are stored in a file as they arrive, within the body of ``turn``.
        """
        theirs = self.ask_digests(with_optimizer=with_optimizer)
        ours = LazyMapping.join(known).select(key for key in theirs if key in known and theirs[key])
        digests, sizes = _digest_all(ours)
        changed = tuple(key for key, digest in theirs.items() if digests.get(key) != digest)
        same = [key for key, digest in theirs.items() if digests.get(key) == digest]

        def fetch() -> tuple[LazyMapping[Tensor], int]:
            stow, readers, came_bytes = Offload(), dict[str, Callable[[], Tensor]](), list[int]()

            def take(key: str, tensor: Tensor) -> None:
                readers[key] = stow.put(tensor)

            gather_each(
                self._fetch_frames(with_optimizer, changed), _MOST_BYTES, take, came_bytes.append
            )
            return LazyMapping(readers), sum(came_bytes)

        fetched, came_bytes = LazyMapping[Tensor]({}), 0
        if changed:
            with turn:
                fetched, came_bytes = self.client.attempt_patiently(fetch)
        stats = TransferStats(
            received_bytes=came_bytes, spared_bytes=sum(sizes[key] for key in same)
        )
        return LazyMapping.join(ours.select(same), fetched).select(theirs), stats

    def ask_missing(self, digests: Mapping[str, str]) -> tuple[str, ...]:
        """Ask for the keys of the weights that a push must bring; the host kept the others."""
        within_s = self.client.transfer_s  # the host reads all weights
        return self._call(methods.MISSING, digests, tuple[str, ...], within_s=within_s)

    def ask_digests(self, *, with_optimizer: bool = False) -> dict[str, str]:
        """Ask for digests of what `fetch_weights` would bring, "" for what has changed."""
        within_s = self.client.transfer_s  # the host reads all weights
        return self._call(methods.DIGESTS, with_optimizer, dict[str, str], within_s=within_s)

    def report(self) -> StageMeasurement:
        """Ask for the session's measurements; see `HostService.report`."""
        return self._call(methods.REPORT, None, StageMeasurement, patiently=True)

    def close(self, *, within_s: float | None = None) -> None:
        """Close the session, which frees its memory on the host."""
        self._call(methods.CLOSE_SESSION, within_s=within_s)

    @contextmanager
    def connect(self, config: LinkConfig, *, name: str = "last device") -> Iterator[Link]:
        """Open a stream for the body; see `stream`. An error in the body is sent to the host."""
        link = self.stream(name=name, config=config)
        try:
            yield link
        except BaseException as error:  # do not wait for the host
            link.close(str(error) or type(error).__name__)
            raise
        link.close()

    def stream(self, *, name: str = "control unit", config: LinkConfig | None = None) -> Link:
        """Open a link to the session's stage, once the host has accepted it; close it when done.

        This side sends forward. The host's errors call it `name`.
        """
        link, client = config or LinkConfig(), self.client
        request = methods.StreamRequest(
            name=name, link=link, stream_id=secrets.randbits(_STREAM_BITS)
        )

        def read() -> None:
            stream.feed(call)
            stream.stop_sending()

        def hang_up(in_order: bool) -> None:
            """Let the stream end, then cancel the rest of it."""
            reader.join(_DRAIN_S if in_order else _ABORT_S)
            call.cancel()

        stream = StreamLink(
            client.peer,
            client.translate,
            hang_up,
            peer_id=client.peer_id,
            codec=link.codec,
            rate_bit_per_s=link.forward_bit_per_s,
            stream_id=request.stream_id,
        )
        metadata = (*self._metadata, (methods.STREAM_KEY, to_json(request)))
        call = methods.STREAM.bind(client.channel)(stream.encode_outgoing(), metadata=metadata)
        reader = threading.Thread(target=read, name="reader", daemon=True)
        reader.start()
        self._await_hello(stream)
        return stream

    def _fetch_frames(self, with_optimizer: bool, keys: tuple[str, ...] | None) -> Iterator[Frame]:
        """Yield the frames of these weights."""
        request = methods.FetchRequest(keys=keys, with_optimizer=with_optimizer)
        answers = methods.FETCH_WEIGHTS.bind(self.client.channel)(
            methods.encode_message(request), timeout=self.client.transfer_s, metadata=self._metadata
        )
        return (decode_frame(answer) for answer in answers)

    def _call(
        self, method: Method, message: object = None, answer: type[Answer] | None = None, **how: Any
    ) -> Answer:
        return self.client.call(method, message, answer, metadata=self._metadata, **how)

    def _await_hello(self, stream: StreamLink) -> None:
        try:
            frame = stream.receive(deadline_s=self.client.deadline_s)
        except LinkError as error:
            stream.close(str(error))
            raise
        if frame.kind is not FrameKind.HELLO:
            stream.close("a stream begins with HELLO")
            raise ProtocolError(f"{self.client.peer} began a stream with {frame.kind.name}")

    @property
    def _metadata(self) -> Metadata:
        return ((methods.SESSION_KEY, self.key.session_id), (methods.TOKEN_KEY, self.key.token))


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialer:
    """Connects to hosts with this member's certificate, as `name`."""

    name: str
    tls: TlsFiles | None = None

    @contextmanager
    def __call__(self, hop: NextHop) -> Iterator[Link]:
        """Yield the link to the next host. Raises LinkError when it refuses."""
        with (
            HostClient.from_hop(hop, self.tls) as client,
            client.get_session(hop.key).connect(hop.link, name=self.name) as link,
        ):
            yield link

    def probe(self, request: ProbeRequest) -> ProbeAnswer:
        """Measure the link to a host; raises LinkError when it does not answer."""
        with HostClient(
            request.address,
            what=request.name,
            tls=self.tls,
            certificate_name=request.certificate_name,
            deadline_s=request.deadline_s,
        ) as client:
            return client.measure_way(request.payload_bytes)


def _digest_all(tensors: Mapping[str, Tensor]) -> tuple[dict[str, str], dict[str, int]]:
    """Compute digests and bytes as they travel; each tensor is read once."""
    digests, sizes = {}, {}
    for key, tensor in tensors.items():
        digests[key] = compute_digest(tensor)
        sizes[key] = tensor.numel() * tensor.element_size()
    return digests, sizes

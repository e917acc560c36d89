"""The RPCs of a host: one table for clients, servicer and authorizer, with messages and limits.

Control messages are frozen dataclasses as JSON, checked field by field when they arrive: they are
small and rare, so they need no generated code. Tensors travel in frames (`codec`). Nothing here
loads torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import grpc

from collapipe_flwr.core import bounds
from collapipe_flwr.core.errors import ConfigError, ProtocolError
from collapipe_flwr.core.json_codec import from_json, to_json
from collapipe_flwr.core.links import CODECS, LinkConfig

SERVICE = "collapipe.Edge"
SESSION_KEY = "collapipe-session"
TOKEN_KEY = "collapipe-token"
VERSION_KEY = "collapipe-version"  # of who opens a session; its message may be another version's
STREAM_KEY = "collapipe-stream"  # of a `StreamRequest`
HTTP2_FRAME_BYTES = 4 * 2**20
MOST_CONNECTIONS = 512
MESSAGE_BYTES = 4 * 2**20  # more than any model config needs
METADATA_BYTES = 16 * 2**10  # of a call
MOST_PROBE_BYTES = 16 * 2**20
MOST_PROBE_S = 60  # the longest that a host waits for another one on behalf of a caller

Metadata = tuple[tuple[str, str], ...]
Options = list[tuple[str, object]]
Message = TypeVar("Message")


@dataclass(frozen=True, slots=True)
class Method:
    """One RPC: a message each way, or frames where it `uploads` or `downloads`.

    `counts_as` is the kind whose calls of one peer at once are limited (`authorizer`).
    """

    name: str
    counts_as: str = "calls"
    uploads: bool = False
    downloads: bool = False
    service: str = SERVICE
    message_bytes: int = MESSAGE_BYTES  # the largest message that a caller sends, frames apart

    @property
    def most_bytes(self) -> int:
        """The size of the largest message or frame that a caller sends."""
        return LIMITS.frame_bytes if self.uploads else self.message_bytes

    @property
    def path(self) -> str:
        return f"/{self.service}/{self.name}"

    @property
    def attribute(self) -> str:
        """The name of the servicer's method."""
        return re.sub(r"(?<!^)(?=[A-Z])", "_", self.name).lower()

    def bind(self, channel: grpc.Channel) -> Any:
        """Return the callable of this RPC on a channel; bytes in, bytes out."""
        sent, answered = ("stream" if many else "unary" for many in (self.uploads, self.downloads))
        return getattr(channel, f"{sent}_{answered}")(self.path, None, None)

    def make_handler(self, answer: Callable[..., Any]) -> grpc.RpcMethodHandler:
        """Make a server's handler; all messages are a stream, so a stranger's stay unread."""
        if self.downloads:
            return grpc.stream_stream_rpc_method_handler(answer)
        return grpc.stream_unary_rpc_method_handler(answer)


OPEN_SESSION = Method("OpenSession")
PUSH_WEIGHTS = Method("PushWeights", "transfers", uploads=True)
FETCH_WEIGHTS = Method("FetchWeights", "transfers", downloads=True)
MISSING = Method("Missing")
DIGESTS = Method("Digests")
REPORT = Method("Report")
PROGRESS = Method("Progress")
CLOSE_SESSION = Method("CloseSession")
STREAM = Method("Stream", "streams", uploads=True, downloads=True)
HEALTH = Method("Health")
BENCHMARK = Method("Benchmark")
PROBE = Method("Probe")
ECHO = Method("Echo", message_bytes=MOST_PROBE_BYTES)
STATUS = Method("Status")
ROSTER = Method("Roster", "rosters")
METHODS = tuple(found for found in vars().copy().values() if isinstance(found, Method))


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameLimits:
    """The limits of a frame, checked before anything is allocated."""

    frame_bytes: int = 256 * 2**20
    header_bytes: int = 256 * 2**10
    tensors: int = 64
    dimensions: int = 8


LIMITS = FrameLimits()


@dataclass(frozen=True, slots=True, kw_only=True)
class HostStatus:
    """``resident_bytes`` is the daemon's own memory (0: unknown), ``unix_s`` its clock.

    An ``awake`` host has loaded the libraries of models; one that is ``stopping`` opens no session,
    and one ``at_work`` is not to be measured. ``energy_sensor`` (empty: none) measured ``power_w``.
    ``rosters`` are the versions of its cluster files by cluster id.
    """

    resident_bytes: bounds.Bytes
    awake: bool
    stopping: bool
    at_work: bool = False
    unix_s: bounds.Moment
    version: bounds.Text
    energy_sensor: bounds.Text = ""
    power_w: bounds.Signed | None = None
    rosters: Mapping[bounds.Text, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamRequest:
    """Opens a stream with the end called `name`, which sends forward on `link`.

    Both ends note frames under `stream_id`.
    """

    name: bounds.Text
    link: LinkConfig
    stream_id: int = 0

    def __post_init__(self) -> None:
        if self.link.codec not in CODECS:
            raise ConfigError(f"codec must be one of {', '.join(CODECS)}, got {self.link.codec!r}")
        if not 0 <= self.stream_id < 2**63:
            raise ConfigError(f"the id of a stream must be >= 0, got {self.stream_id}")


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchRequest:
    """The tensors of a session's part with these keys (None: all), and optimizer slots or not."""

    keys: tuple[str, ...] | None = None
    with_optimizer: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeRequest:
    """The host to connect to; it must prove `certificate_name` under TLS (empty: its address)."""

    name: bounds.Text
    address: bounds.Address
    certificate_name: bounds.Text = ""
    payload_bytes: int = 4 * 2**20
    deadline_s: float = 10.0

    def __post_init__(self) -> None:
        for name, most in (("payload_bytes", MOST_PROBE_BYTES), ("deadline_s", MOST_PROBE_S)):
            if not 0 < (value := getattr(self, name)) <= most:
                raise ConfigError(f"{name} of a probe must be > 0 and <= {most}, got {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeAnswer:
    """Rate and delay of a link one way; `delay_s` is half a round trip of an empty message."""

    rate_bit_per_s: bounds.Rate
    delay_s: bounds.Seconds


def encode_message(message: object) -> bytes:
    """Encode a dataclass instance, or a plain value, as JSON bytes."""
    return to_json(message).encode()


def decode_message(kind: type[Message], data: bytes) -> Message:
    """Read a message of type `kind`. Raises ProtocolError on anything else."""
    if len(data) > MESSAGE_BYTES:
        raise ProtocolError(f"a {kind.__name__} of {len(data)} bytes; {MESSAGE_BYTES} are allowed")
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise ProtocolError(f"a {kind.__name__} that is not JSON: not even text") from error
    return from_json(kind, text, kind.__name__)


def make_channel_options(most_bytes: int | None = None) -> Options:
    """Return message limits (``most_bytes``: received) and pings that notice a lost machine.

    The pings queue behind tensors, so their timeout is long; see `keepalive` for quick ones. HTTP/2
    frames of the usual 16 KiB cost about an eighth more CPU time.
    """
    return [
        ("grpc.max_receive_message_length", most_bytes or LIMITS.frame_bytes),
        ("grpc.max_send_message_length", LIMITS.frame_bytes),
        ("grpc.per_message_decompression", 0),  # a short message could become a very long one
        ("grpc.http2.max_frame_size", HTTP2_FRAME_BYTES),
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.http2.ping_timeout_ms", 20_000),  # the one that gRPC 1.85 obeys
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.max_reconnect_backoff_ms", 1_000),  # find a peer that restarts soon
    ]


def make_name_options(certificate_name: str) -> Options:
    """Return the option to expect ``certificate_name`` (empty: the address) under TLS."""
    return [("grpc.ssl_target_name_override", certificate_name)] if certificate_name else []

"""The RPCs of a host: one table for clients, servicer and authorizer, and what both ends agree on.

Control messages are frozen dataclasses as JSON, checked field by field when they come in: they are
small and rare, so they need no generated code. Tensors never travel in them but in frames
(`codec`). Nothing here loads torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc

from collapipe_flwr.core.errors import ProtocolError
from collapipe_flwr.core.json_codec import from_json, to_json

SERVICE = "collapipe.Edge"
SESSION_KEY = "collapipe-session"
TOKEN_KEY = "collapipe-token"
CODEC_KEY = "collapipe-codec"
SLOTS_KEY = "collapipe-with-optimizer"
NAME_KEY = "collapipe-name"
RATE_KEY = "collapipe-bit-per-s"
STREAM_KEY = "collapipe-stream"
LANE_KEY = "collapipe-lane"
HTTP2_FRAME_BYTES = 4 * 2**20
MOST_CONNECTIONS = 512
MESSAGE_BYTES = 4 * 2**20  # more than any model config needs

Metadata = tuple[tuple[str, str], ...]
Options = list[tuple[str, object]]
Message = TypeVar("Message")


@dataclass(frozen=True, slots=True)
class Method:
    """One RPC: a message each way, or frames where it `uploads` or `downloads`.

    `counts_as` is the kind of which a peer may have so many at once (`authorizer`).
    """

    name: str
    counts_as: str = "calls"
    uploads: bool = False
    downloads: bool = False
    service: str = SERVICE

    @property
    def path(self) -> str:
        """As gRPC spells it."""
        return f"/{self.service}/{self.name}"

    @property
    def attribute(self) -> str:
        """The name of the servicer's method."""
        return re.sub(r"(?<!^)(?=[A-Z])", "_", self.name).lower()

    def on(self, channel: grpc.Channel) -> Any:
        """What makes the call over a channel; bytes in, bytes out."""
        sent, answered = ("stream" if many else "unary" for many in (self.uploads, self.downloads))
        return getattr(channel, f"{sent}_{answered}")(self.path, None, None)

    def handler(self, answer: Callable[..., Any]) -> grpc.RpcMethodHandler:
        """What a server calls. Messages come as a stream, so that a stranger's is never read."""
        if self.downloads:
            return grpc.stream_stream_rpc_method_handler(answer)
        return grpc.stream_unary_rpc_method_handler(answer)


OPEN_SESSION = Method("OpenSession")
PUSH_WEIGHTS = Method("PushWeights", "transfers", uploads=True)
FETCH_WEIGHTS = Method("FetchWeights", "transfers", downloads=True)
MISSING = Method("Missing")
DIGESTS = Method("Digests")
REPORT = Method("Report")
PASSES = Method("Passes")
TIMELINE = Method("Timeline")
SNAPSHOT = Method("Snapshot")
ROLLBACK = Method("Rollback")
CLOSE_SESSION = Method("CloseSession")
STREAM = Method("Stream", "streams", uploads=True, downloads=True)
HEALTH = Method("Health")
BENCHMARK = Method("Benchmark")
PROBE = Method("Probe")
ECHO = Method("Echo")
STATUS = Method("Status")
ROSTER = Method("Roster")
METHODS = tuple(found for found in vars().copy().values() if isinstance(found, Method))


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameLimits:
    """What a receiver accepts of a stranger in one frame, before anything is allocated."""

    frame_bytes: int = 256 * 2**20
    header_bytes: int = 256 * 2**10
    tensors: int = 64
    dimensions: int = 8


LIMITS = FrameLimits()


def encode_message(message: object) -> bytes:
    """A dataclass instance as JSON bytes."""
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


def channel_options() -> Options:
    """Both sides: message limits, and pings that notice a machine that vanished.

    The pings stand in line behind tensors, so they are given much time; see `keepalive` for quick
    ones. A message in frames of the usual 16 KiB costs about an eighth more CPU time.
    """
    return [
        ("grpc.max_receive_message_length", LIMITS.frame_bytes),
        ("grpc.max_send_message_length", LIMITS.frame_bytes),
        ("grpc.http2.max_frame_size", HTTP2_FRAME_BYTES),
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.http2.ping_timeout_ms", 20_000),  # the one that gRPC 1.85 goes by
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.max_reconnect_backoff_ms", 1_000),  # a peer that restarts is found soon
    ]


def name_options(certificate_name: str) -> Options:
    """A client that gives ``certificate_name`` expects that name instead of the peer's address."""
    return [("grpc.ssl_target_name_override", certificate_name)] if certificate_name else []

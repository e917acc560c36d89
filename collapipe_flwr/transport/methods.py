"""Names and options that client and server share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from collapipe_flwr.core.errors import ProtocolError
from collapipe_flwr.transport.limits import FrameLimits

SERVICE = "collapipe.Edge"
SESSION_KEY = "collapipe-session"
TOKEN_KEY = "collapipe-token"
CODEC_KEY = "collapipe-codec"
SLOTS_KEY = "collapipe-with-optimizer"
NAME_KEY = "collapipe-name"
RATE_KEY = "collapipe-bit-per-s"
STREAM_KEY = "collapipe-stream"
HTTP2_FRAME_BYTES = 4 * 2**20
MOST_CONNECTIONS = 512


def method(name: str) -> str:
    """The full path of one method."""
    return f"/{SERVICE}/{name}"


def channel_options(limits: FrameLimits) -> list[tuple[str, object]]:
    """Both sides: message limits, and pings that notice a machine that vanished.

    The pings stand in line behind tensors, so they are given much time; see `pulse` for quick ones.
    A message in frames of the usual 16 KiB costs about an eighth more CPU time.
    """
    return [
        ("grpc.max_receive_message_length", limits.frame_bytes),
        ("grpc.max_send_message_length", limits.frame_bytes),
        ("grpc.http2.max_frame_size", HTTP2_FRAME_BYTES),
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.http2.ping_timeout_ms", 20_000),  # the one that gRPC 1.85 goes by
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.max_reconnect_backoff_ms", 1_000),  # a peer that restarts is found soon
    ]


def server_options(most_calls: int) -> list[tuple[str, object]]:
    """What keeps one peer, or many who never say a word, from filling a server's memory."""
    return [
        ("grpc.server_handshake_timeout_ms", 10_000),
        ("grpc.max_allowed_incoming_connections", MOST_CONNECTIONS),
        ("grpc.max_concurrent_streams", most_calls),  # of one connection
        ("grpc.max_metadata_size", 16 * 2**10),
    ]


def name_options(certificate_name: str) -> list[tuple[str, object]]:
    """A client that gives ``certificate_name`` expects that name instead of the peer's address."""
    return [("grpc.ssl_target_name_override", certificate_name)] if certificate_name else []


def metadata_of(items: Sequence[tuple[str, str | bytes]]) -> Mapping[str, str]:
    """Call metadata as text. Raises ProtocolError when a session or token is missing."""
    found = {key: value for key, value in items if isinstance(value, str)}
    if SESSION_KEY not in found or TOKEN_KEY not in found:
        raise ProtocolError("the call names no session or no token")
    return found

"""One hop of a chain: the address of its end, its link, heartbeat and TLS files, and its traffic.

Forward is towards the edge. Rates are bits per second, None where nothing limits them. Addresses
are ``HOST:PORT``, ``[HOST]:PORT`` for IPv6.
"""

from __future__ import annotations

import ipaddress
import math
import random
import re
import socket
from collections import deque
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from collapipe_flwr.core import bounds
from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.core.keys import above, at_least, key

Note = tuple[int, bounds.Count, bounds.Moment, bounds.Bytes]
"""Stream, number of the frame in its direction, time (seconds by the own clock), bytes."""

NOTED_FRAMES = 128  # of one stream: some steps, and a report stays small
TOP_K = "top-k"  # the largest elements of a change; error feedback sends the others later
CODECS = ("fp32", "fp16", "bf16", "int8", "int4")  # of hidden states and gradients; by loss
UPDATE_CODECS = (*CODECS, TOP_K)  # of what a cluster replies
QUEUE_FRAMES = 64  # that each direction of a link holds before its sender waits
MOST_NOTES = 4 * (NOTED_FRAMES + 1)  # of one direction, for the same reason
LEAST_PERIOD_S = 0.2  # hosts accept pings as often as this, and drop clients that send more
LEAST_MISSES = 3
HIGHEST_PORT = 65535
_UNASKED_PORTS = range(15_000, 32_000)  # no system gives these to outgoing connections


def split_address(address: str, *, least: int = 1) -> tuple[str, int]:
    """Split an address into host, without brackets, and port; raises ConfigError.

    A port of 0, where ``least`` allows it, is chosen by the system. gRPC itself refuses neither
    ``host`` (it takes port 443 of all interfaces) nor ``host:99999`` (it takes the port modulo
    65536).
    """
    host, _, port = address.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    known = bool(bare) and (":" not in bare or host != bare) and _is_name(bare)
    number = int(port) if port.isascii() and port.isdigit() else -1
    if not known or not least <= number <= HIGHEST_PORT:
        raise ConfigError(
            f'must read like "10.0.0.2:50061" or "[fd00::2]:50061", with a port from {least} to '
            f"{HIGHEST_PORT}, got {address!r}"
        )
    return bare, number


def _is_name(host: str) -> bool:
    """Return whether a host can be connected to.

    It has no blanks, no part between dots that is empty or too long, and is no IP address with a
    slip.
    """
    try:
        return host.split() == [host] and bool(host.encode("idna")) and not is_slip(host)
    except UnicodeError:
        return False


def is_slip(host: str) -> bool:
    """Return whether a host consists of numbers and dots but is no IP address."""
    if not set(host) <= set("0123456789."):
        return False
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return True
    return False


def is_address(text: str) -> bool:
    """Return whether `split_address` accepts an address."""
    try:
        split_address(text)
    except ConfigError:
        return False
    return True


def add_port(address: str, port: int) -> str:
    """Make HOST:PORT of HOST; an address with a port stays as it is."""
    return address if re.search(r":[0-9]{1,5}$", address) else f"{address}:{port}"


def find_own_address(address: str) -> str:
    """Find this machine's address on the interface towards another machine; nothing is sent."""
    host, port = split_address(address)
    try:
        ((family, *_, target), *_) = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)
            found = str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigError(f"{host} cannot be reached from here: {error.strerror}") from error
    return f"[{found}]" if ":" in found else found


def is_loopback(host: str) -> bool:
    """Return whether a host, without brackets, reaches this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return host == "localhost"


def find_free_ports(count: int) -> list[int]:
    """Find distinct free ports of loopback, which other programs are unlikely to take soon."""
    found: list[int] = []
    with ExitStack() as stack:
        for port in random.SystemRandom().sample(_UNASKED_PORTS, len(_UNASKED_PORTS)):
            if len(found) == count:
                break
            try:
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
            except OSError:
                continue
            found.append(port)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkConfig:
    """Codec of hidden states and gradients, and the rates that senders keep to.

    In a plan the rates are those that the planned power and bandwidth reach, None where they were
    not computed. Where the sender is one of several replicas of its stage, the receiver takes
    micro-batches from ``lanes`` links in turn, of which this is number ``lane``; 0 lanes: the link
    connects two replicas of one stage.
    """

    codec: str = "fp32"
    forward_bit_per_s: float | None = None
    backward_bit_per_s: float | None = None
    lane: int = 0
    lanes: int = 1

    @property
    def unpaced(self) -> LinkConfig:
        """The same link without rate limits."""
        return replace(self, forward_bit_per_s=None, backward_bit_per_s=None)

    def with_limits(self, codec: str, bit_per_s: float | None) -> LinkConfig:
        """Return the link with ``codec`` (empty: its own) and the slower of two rates."""
        return replace(
            self,
            codec=codec or self.codec,
            forward_bit_per_s=find_min_rate(self.forward_bit_per_s, bit_per_s),
            backward_bit_per_s=find_min_rate(self.backward_bit_per_s, bit_per_s),
        )


def find_min_rate(rate: float | None, other: float | None) -> float | None:
    """Return the smaller of two limits; None is no limit."""
    return min((r for r in (rate, other) if r is not None), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """One ping every `period_s`; a peer that misses `misses` of them in a row is lost."""

    period_s: float = key(2.0, above(LEAST_PERIOD_S), name="heartbeat-s")
    misses: int = key(LEAST_MISSES, at_least(LEAST_MISSES), name="heartbeat-misses")

    def __post_init__(self) -> None:
        if not LEAST_PERIOD_S < self.period_s < math.inf or self.misses < LEAST_MISSES:
            raise ConfigError(
                f"a heartbeat needs a period above {LEAST_PERIOD_S:g} s and {LEAST_MISSES} misses "
                f"or more, got {self.period_s:g} s and {self.misses}"
            )

    @property
    def lost_after_s(self) -> float:
        """Seconds of silence after which a peer is lost."""
        return self.period_s * self.misses


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """PEM files of one member. `ca` signs the peers that it accepts.

    A server needs `certificate` and `key`, and asks clients for a certificate when `ca` is
    given. A client needs `ca`, and presents `certificate` with `key` when they are given.
    """

    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None


class FrameLog:
    """Notes of the frames that pass one end of a stream: the first, and the last ones.

    The first one (HELLO) may be the only small one. Both ends use the same ``stream_id``, which no
    other stream of a round has.
    """

    def __init__(self, stream_id: int) -> None:
        self._stream_id = stream_id
        self._count = 0
        self._first: list[Note] = []
        self._last = deque[Note](maxlen=NOTED_FRAMES)

    def add(self, at_s: float, size_bytes: int) -> None:
        """Note a frame that passes."""
        kept = self._last if self._count else self._first
        kept.append((self._stream_id, self._count, round(at_s, 6), size_bytes))
        self._count += 1

    @property
    def notes(self) -> tuple[Note, ...]:
        return (*self._first, *self._last)


@dataclass(slots=True, kw_only=True)
class LinkTraffic:
    """Traffic in one direction of a link since it was opened.

    ``sending_s`` is the time for which it kept the wire busy, as far as the sending end knows:
    until the transport took the frames, or as long as a rate limit delayed them; 0 at the receiving
    end and where nothing is timed. ``notes`` are the times when single frames left (after any rate
    limit) or arrived, on links that move bytes. ``wire_bit_per_s`` is the capacity of the wire by
    the notes of both ends (`core.wire`), None where it is unknown: in memory, or with too few
    frames.
    """

    bytes: bounds.Bytes = 0
    sending_s: bounds.Seconds = 0.0
    wire_bit_per_s: bounds.Rate | None = None
    notes: Annotated[tuple[Note, ...], bounds.most_entries(MOST_NOTES)] = ()

    @property
    def busy_s(self) -> float:
        """``sending_s``, but at least the time that the wire needed."""
        wire = self.wire_bit_per_s
        return max(self.sending_s, 8.0 * self.bytes / wire if wire else 0.0)

    @property
    def bit_per_s(self) -> float | None:
        """Measured; None where nothing was timed, as on in-memory links without a rate.

        An upper bound where only the sender was timed: buffers take few frames at once.
        """
        return 8.0 * self.bytes / self.busy_s if self.busy_s > 0 else None

    def __add__(self, later: LinkTraffic) -> LinkTraffic:
        """Add up the traffic, with the last ``MOST_NOTES`` notes."""
        return LinkTraffic(
            bytes=self.bytes + later.bytes,
            sending_s=self.busy_s + later.busy_s,
            notes=(self.notes + later.notes)[-MOST_NOTES:],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkReport:
    """One hop in one round, or in several, with the rates that its senders kept to."""

    cluster_id: str
    sender: str
    receiver: str
    link: LinkConfig
    forward: LinkTraffic
    backward: LinkTraffic

"""A bound on the bytes that connections sent and no call asked for: those with the most are cut.

Before a handler sees them, gRPC keeps the headers of a call that never begins, up to 16 MiB until
the peer has agreed to our settings, and a message of any method up to the longest of all. So the
bytes that the system received on a connection (TCP_INFO in tcp(7)) are compared with the bytes that
handlers have read, that were answered, and that admitted calls may still send. A member's first
call on a connection is short, so connections of which nothing was read yet have a smaller bound.
Nothing is counted on systems other than Linux.
"""

from __future__ import annotations

import logging
import os
import socket
import stat
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from ipaddress import ip_address
from urllib.parse import unquote

import grpc

from collapipe_flwr.transport.methods import METADATA_BYTES, Method

STRANGERS_BYTES = 2**20  # of all connections together of which nothing was read yet
UNASKED_BYTES = 32 * 2**20  # of all others together
_LEFT_SHARE = 0.25  # of a bound that was exceeded
_SPARED_LOOKS = 5  # after a read, and 2 at first: the next call may wait for its thread
_LOOK_S, _SOON_S, _SAY_S = 0.2, 0.05, 10.0
_AHEAD_BYTES = 2**16  # by which answers may come before what they answer, as those to pings do
_FRAMING_BYTES, _FRAMING_SHARE = 2**10, 2**-8  # more than TLS and HTTP/2 add to a message
_TCP = socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP
_UNKNOWN = -1, -1, -1  # the system is asked, which takes longer
_DESCRIPTORS = "/proc/self/fd"
_COUNTS = struct.Struct("=120xQQ")  # in TCP_INFO: bytes that the peer acknowledged, and received

_log = logging.getLogger(__name__)
Peer = tuple[str, int]


@dataclass(slots=True)
class _Connection:
    peer: Peer
    is_stranger: bool = True
    spared_looks: int = 2
    answered_bytes: int = 0
    received_bytes: int = 0
    unasked_bytes: int = 0


class Intake:
    """The connections that this process accepts at ``port``."""

    def __init__(self, port: int, strangers_bytes: int = STRANGERS_BYTES) -> None:
        self._port, self._strangers_bytes = port, strangers_bytes
        self._lock = threading.Lock()
        self._read = Counter[Peer]()  # since the last look
        self._expected = Counter[Peer]()
        self._connections: dict[int, _Connection] = {}  # by the inodes of their sockets
        self._others = set[int]()  # inodes of other sockets
        self._quiet_until_s = 0.0  # a stranger must not fill the log

    def count(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        """Yield the messages of a call, each counted as read."""
        peer = _parse_peer(context)
        for message in messages:
            with self._lock:
                self._read[peer] += int(len(message) * (1 + _FRAMING_SHARE)) + _FRAMING_BYTES
            yield message

    @contextmanager
    def expect(self, context: grpc.ServicerContext, method: Method) -> Iterator[None]:
        """Let the connection of an admitted call send a message of its method during the body."""
        peer = _parse_peer(context)
        with self._lock:
            self._expected[peer] += method.most_bytes
        try:
            yield
        finally:
            with self._lock:
                self._expected[peer] -= method.most_bytes
                self._expected += Counter()  # without those that expect nothing any more
                self._read[peer] += method.most_bytes + METADATA_BYTES  # gRPC keeps none of it

    def watch(self, stop: threading.Event) -> None:
        """Look repeatedly until ``stop``, more often while there are many unasked bytes."""
        pause_s = _LOOK_S
        while not stop.wait(pause_s):
            pause_s = _SOON_S if self.look() > self._strangers_bytes // 4 else _LOOK_S

    def look(self) -> int:
        """Count, cut connections where a bound is exceeded, and return the unasked bytes."""
        with self._lock:  # before the system is asked: all of it is among what was received
            read, self._read = self._read, Counter[Peer]()
        self._connections = dict(self._measure(read))
        kept = Counter[int]()
        with self._lock:  # what was read or admitted meanwhile counts, too
            for inode, found in self._connections.items():
                asked_bytes = self._expected[found.peer] + self._read[found.peer]
                found.is_stranger = found.is_stranger and not asked_bytes
                kept[inode] = max(found.unasked_bytes - asked_bytes, 0)
        excess = {
            *self._list_excess(kept, self._strangers_bytes, are_strangers=True),
            *self._list_excess(kept, UNASKED_BYTES, are_strangers=False),
        }
        if excess:
            self._cut(excess)
        return sum(kept.values())

    def drop(self, contexts: Iterable[grpc.ServicerContext]) -> None:
        """Cut the connections of these calls."""
        peers = {_parse_peer(context) for context in contexts}
        for _, peer, copy in self._list_accepted() if peers else ():
            if peer in peers:
                _shut(copy)

    def _measure(self, read: Counter[Peer]) -> Iterator[tuple[int, _Connection]]:
        """Yield the connections now, given what was ``read`` since the last look."""
        for inode, peer, copy in self._list_accepted():
            found = self._connections.get(inode) or _Connection(peer)
            info = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _COUNTS.size)
            if len(info) < _COUNTS.size:  # a kernel before 4.2
                continue
            answered, received = _COUNTS.unpack(info)
            came = received - found.received_bytes - (answered - found.answered_bytes)
            found.unasked_bytes = max(found.unasked_bytes + came - read[peer], -_AHEAD_BYTES)
            found.answered_bytes, found.received_bytes = answered, received
            found.spared_looks = _SPARED_LOOKS if read[peer] else found.spared_looks - 1
            found.is_stranger = found.is_stranger and not read[peer]
            yield inode, found

    def _list_excess(self, kept: Counter[int], bound: int, *, are_strangers: bool) -> Iterator[int]:
        """Yield the connections to cut, those with the most first."""
        some = {i: kept[i] for i, f in self._connections.items() if f.is_stranger is are_strangers}
        total = sum(some.values())
        if total <= bound:
            return
        for inode in sorted(some, key=some.__getitem__, reverse=True):
            if total > bound * _LEFT_SHARE and self._connections[inode].spared_looks < 0:
                total -= some[inode]
                yield inode

    def _cut(self, inodes: set[int]) -> None:
        for inode, (host, port), copy in self._list_accepted():
            if inode not in inodes:
                continue
            _shut(copy)
            if time.monotonic() >= self._quiet_until_s:
                self._quiet_until_s = time.monotonic() + _SAY_S
                _log.warning("%s (port %d) sent what no call asked for: cut off", host, port)

    def _list_accepted(self) -> Iterator[tuple[int, Peer, socket.socket]]:
        """Yield inode, peer and a copy of each connection; the copy is open until the next one."""
        others, self._others = self._others, set[int]()
        for fd in map(int, os.listdir(_DESCRIPTORS) if os.path.isdir(_DESCRIPTORS) else ()):
            with suppress(OSError):  # closed meanwhile
                found = os.fstat(fd)
                if not stat.S_ISSOCK(found.st_mode):
                    continue
                inode = found.st_ino
                known = self._connections.get(inode)
                if inode not in others:
                    with socket.socket(*(_TCP if known else _UNKNOWN), os.dup(fd)) as copy:
                        peer = known.peer if known else self._find_peer(copy)
                        if peer:
                            yield inode, peer, copy
                            continue
                self._others.add(inode)

    def _find_peer(self, connection: socket.socket) -> Peer | None:
        """Return the peer of a connection at our port; None for other sockets and the listener."""
        try:
            ours, theirs = connection.getsockname(), connection.getpeername()
        except OSError:
            return None
        is_ours = isinstance(ours, tuple) and ours[1] == self._port
        return _make_peer(*theirs[:2]) if is_ours else None


def _shut(connection: socket.socket) -> None:
    with suppress(OSError):  # the peer was faster
        connection.shutdown(socket.SHUT_RDWR)


def _parse_peer(context: grpc.ServicerContext) -> Peer:
    """Parse ipv4:10.0.0.11:4711 or ipv6:%5Bfe80::1%25eth0%5D:4711."""
    host, _, port = unquote(context.peer()).partition(":")[2].rpartition(":")
    return _make_peer(host.strip("[]"), int(port))


def _make_peer(host: str, port: int) -> Peer:
    """Return one form of an address for both ways of writing IPv4."""
    address = ip_address(host.partition("%")[0])
    return str(getattr(address, "ipv4_mapped", None) or address), port

"""Pings that tell whether a peer is alive, on a separate connection.

They are HTTP/2's, which gRPC's C core answers in its own threads, however long a Python thread
holds the interpreter's lock; a host that is suspended, or behind a link that loses packets, does
not answer. On a separate connection they do not queue behind tensors.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Self

import grpc

from collapipe_flwr.core.links import LEAST_PERIOD_S, Heartbeat
from collapipe_flwr.transport.methods import Options

_RECONNECT_MS = 100
_UNWATCHED_S = 10.0  # gRPC polls five times a second who still watches, unless starved of CPU


def make_keepalive_options(heartbeat: Heartbeat) -> Options:
    """Return options of the pinged connection: a ping per period, a period to answer it."""
    period_ms = round(1000 * heartbeat.period_s)
    return [
        ("grpc.keepalive_time_ms", period_ms),
        ("grpc.keepalive_timeout_ms", period_ms),
        ("grpc.http2.ping_timeout_ms", period_ms),  # the one that gRPC 1.85 obeys
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.client_idle_timeout_ms", 2**31 - 1),  # never: nothing but pings travels here
        ("grpc.use_local_subchannel_pool", 1),  # a connection of its own
        ("grpc.initial_reconnect_backoff_ms", _RECONNECT_MS),
        ("grpc.max_reconnect_backoff_ms", period_ms),
    ]


def make_server_keepalive_options() -> Options:
    """Return options of a server that accepts such pings."""
    return [
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", round(1000 * LEAST_PERIOD_S)),
    ]


class Keepalive:
    """Watches one peer and calls ``on_lost`` when it is lost; use as a context manager.

    It is lost after ``heartbeat`` without an answered ping or a new connection, and again only
    after it was back. ``connect`` makes a channel with `make_keepalive_options`.
    """

    def __init__(
        self,
        connect: Callable[[], grpc.Channel],
        heartbeat: Heartbeat,
        on_lost: Callable[[], None],
    ) -> None:
        self._connect = connect
        self._heartbeat = heartbeat
        self._on_lost = on_lost
        self._changed = threading.Condition()
        self._life = object()  # of the connection that counts now
        self._beats = False
        self._over = False
        self.lost = False  # now, and not back yet
        self._thread = threading.Thread(target=self._watch, name="keepalive", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._over = True
            self._changed.notify_all()
        self._thread.join(self._heartbeat.lost_after_s)

    def _watch(self) -> None:
        patience_s = self._heartbeat.lost_after_s
        while not self._over:
            with self._open_connection():
                back = self._wait(beating=True, limit_s=patience_s)
                if back:
                    self.lost = False
                    self._wait(beating=False, limit_s=None)
            if self._over:
                return
            if not (back or self.lost):
                self.lost = True
                self._on_lost()
            # A connection whose ping failed has been silent for up to two periods already.
            patience_s = self._heartbeat.lost_after_s - 2 * self._heartbeat.period_s

    @contextmanager
    def _open_connection(self) -> Iterator[None]:
        """Open a connection; ignore events of the earlier one.

        It is closed some time after the body, because gRPC must have ceased to watch it before.
        """
        life, channel = object(), self._connect()

        def note(state: grpc.ChannelConnectivity) -> None:
            with self._changed:
                if self._life is life:
                    self._beats = state is grpc.ChannelConnectivity.READY
                    self._changed.notify_all()

        with self._changed:
            self._life, self._beats = life, False
        channel.subscribe(note, try_to_connect=True)
        yield
        channel.unsubscribe(note)
        closing = threading.Timer(_UNWATCHED_S, channel.close)
        closing.daemon = True
        closing.start()

    def _wait(self, *, beating: bool, limit_s: float | None) -> bool:
        """Wait until the peer beats, or ceases to; return whether it did in time."""
        with self._changed:
            self._changed.wait_for(lambda: self._over or self._beats is beating, limit_s)
            return not self._over and self._beats is beating

"""Whether a peer lives, asked beside its work: pings on a connection of their own.

The pings are HTTP/2's. gRPC's C core answers them in threads of its own, so a host answers whatever
its Python threads do, and however long one of them keeps the interpreter's lock; a host that is
suspended, or behind a link that swallows packets, does not. Being on a connection of their own they
do not stand in line behind tensors.
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
_UNWATCHED_S = 10.0  # gRPC looks five times a second who still listens, unless it is starved of CPU


def keepalive_options(heartbeat: Heartbeat) -> Options:
    """Of the connection that is pinged: a ping a period, which has a period to be answered."""
    period_ms = round(1000 * heartbeat.period_s)
    return [
        ("grpc.keepalive_time_ms", period_ms),
        ("grpc.keepalive_timeout_ms", period_ms),
        ("grpc.http2.ping_timeout_ms", period_ms),  # the one that gRPC 1.85 goes by
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.client_idle_timeout_ms", 2**31 - 1),  # never: nothing but pings travels here
        ("grpc.use_local_subchannel_pool", 1),  # a connection of its own
        ("grpc.initial_reconnect_backoff_ms", _RECONNECT_MS),
        ("grpc.max_reconnect_backoff_ms", period_ms),
    ]


def server_keepalive_options() -> Options:
    """Of a server that lets itself be pinged."""
    return [
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", round(1000 * LEAST_PERIOD_S)),
    ]


class Keepalive:
    """Watches one peer and calls ``on_lost`` when it falls silent; use as a context manager.

    It is lost when no ping was answered and no connection made for as long as ``heartbeat`` says,
    and then again only after it was back. ``connect`` makes a channel with `keepalive_options`.
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
            with self._connection():
                back = self._wait(beating=True, limit_s=patience_s)
                if back:
                    self.lost = False
                    self._wait(beating=False, limit_s=None)
            if self._over:
                return
            if not (back or self.lost):
                self.lost = True
                self._on_lost()
            # What was pinged in vain was silent for up to two periods already.
            patience_s = self._heartbeat.lost_after_s - 2 * self._heartbeat.period_s

    @contextmanager
    def _connection(self) -> Iterator[None]:
        """A fresh connection, closed when gRPC has ceased to watch it: closed before, it trips.

        The one before it is not heard any more.
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
        """Until the peer beats, or does not; whether it came to that in time."""
        with self._changed:
            self._changed.wait_for(lambda: self._over or self._beats is beating, limit_s)
            return not self._over and self._beats is beating

"""The connection of a client to one host: calls with deadlines, repeated while it is away."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import UTC, datetime
from functools import partial
from typing import Self, TypeVar

import grpc

from collapipe_flwr.core.errors import (
    Busy,
    FrozenWanted,
    LinkError,
    LinkTimeout,
    PeerBroken,
    ProtocolError,
    Unreachable,
)
from collapipe_flwr.core.links import Heartbeat, TlsFiles
from collapipe_flwr.transport import methods
from collapipe_flwr.transport.keepalive import Keepalive, make_keepalive_options
from collapipe_flwr.transport.methods import Metadata, Method
from collapipe_flwr.transport.tls import NOT_DIALLED, UNRECOGNIZED_NAME, open_channel

Answer = TypeVar("Answer")
_LOOK_S = 0.5
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0  # between calls that are broken off
_AWAY = frozenset(
    {
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.CANCELLED,
    }
)
_BROKEN = frozenset({grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL})
_RAISED = "Exception calling application: "  # what gRPC puts before an exception's words
_AT_ALL = re.compile(r"failed to connect to all addresses; last error: \w+: (\w+:\S+: )?")
_DATED = {  # what gRPC says of the peer's certificate
    "certificate has expired": "its certificate is not valid any more",
    "certificate is not yet valid": "its certificate is not valid yet",
}
_CLOSED = "Channel closed!"  # what gRPC says of calls on a channel that this side closed


class Connection:
    """Makes calls to one host, called `what` in errors; use as a context manager.

    With TLS the peer must prove the host in `address`, or `certificate_name` where it is given.

    Control calls end within `deadline_s`, transfers of weights within `transfer_s`. Calls that may
    be made twice are repeated for `patience_s` while the host is away, for example while it
    restarts. Every call raises LinkError with one sentence "edge at ADDRESS ..." when the host
    cannot be reached, refuses or breaks off, and LinkTimeout when it does not answer in time. With
    a `heartbeat`, calls and streams of any length also break when the host has missed it.
    """

    kind = "edge"
    usual_deadline_s = 20.0

    def __init__(
        self,
        address: str,
        *,
        what: str = "",
        tls: TlsFiles | None = None,
        certificate_name: str = "",
        deadline_s: float = 0.0,
        transfer_s: float = 600.0,
        patience_s: float = 0.0,
        heartbeat: Heartbeat | None = None,
    ) -> None:
        self.address = address
        self.peer_id = what or self.kind
        self.peer = f"{self.peer_id} at {address}"
        self.deadline_s = deadline_s or self.usual_deadline_s
        self.transfer_s = transfer_s
        self._patience_s = patience_s
        named = methods.make_name_options(certificate_name)
        options = [*methods.make_channel_options(), *named]
        self._connect = partial(open_channel, address, tls, options)
        self.channel = self._connect()
        self._heartbeat = heartbeat
        self._was_silent = False
        self._missed_since_s: float | None = None  # when a patient call first found the host away
        self._closed = threading.Event()
        self._keepalive: Keepalive | None = None
        self._life = ExitStack()
        if heartbeat is not None:
            pinged = partial(
                open_channel, address, tls, [*make_keepalive_options(heartbeat), *named]
            )
            self._keepalive = self._life.enter_context(Keepalive(pinged, heartbeat, self._break))

    def call(
        self,
        method: Method,
        message: object = None,
        answer: type[Answer] | None = None,
        *,
        metadata: Metadata = (),
        within_s: float | None = None,
        patiently: bool = False,
    ) -> Answer:
        """Send one message (None: an empty one); returns the `answer`. See `attempt_patiently`."""
        data = b"" if message is None else methods.encode_message(message)

        def once() -> Answer:
            timeout_s = within_s or self.deadline_s
            answered = method.bind(self.channel)(data, timeout=timeout_s, metadata=metadata)
            return methods.decode_message(answer, answered) if answer else answered

        return self.attempt_patiently(once) if patiently else self.attempt(once)

    def attempt_patiently(self, call: Callable[[], Answer]) -> Answer:
        """Make a call, repeatedly while the host is away.

        All calls together wait for `patience_s` from the first one that missed the host, so that
        the waits of many sessions do not add up. A call that a host breaks off although it answers
        others is repeated at once, then after growing pauses.
        """
        start_s, pause_s = time.monotonic(), 0.0
        while True:
            try:
                answer = self.attempt(call)
            except (Unreachable, LinkTimeout):
                if self._missed_since_s is None:
                    self._missed_since_s = start_s
                until_s = max(self._missed_since_s + self._patience_s, start_s + _LOOK_S)
                if not self._await_host(until_s) or self._closed.wait(pause_s):
                    raise
            except LinkError:  # a refusal is an answer
                self._missed_since_s = None
                raise
            else:
                self._missed_since_s = None
                return answer
            pause_s = min(max(2 * pause_s, _FIRST_PAUSE_S), _LONGEST_PAUSE_S)

    def attempt(self, call: Callable[[], Answer]) -> Answer:
        """Make a call, translating an error of gRPC into a LinkError."""
        if self.silent and not self._patience_s:
            raise self._explain_silence()
        try:
            return call()
        except grpc.RpcError as error:
            raise self.translate(error) from error
        except ProtocolError as error:
            raise ProtocolError(
                f"{self.peer} sent an answer that cannot be read: {error}"
            ) from error
        except ValueError as error:  # the channel was closed just before the call began
            raise Unreachable(f"{self.peer} broke off: {error}") from error

    def translate(self, error: grpc.RpcError) -> LinkError:
        """Turn the error of a failed call into one sentence."""
        code, details = error.code(), error.details()
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return LinkTimeout(f"{self.peer} did not answer in time")
        if self._was_silent and details == _CLOSED:
            return self._explain_silence()
        if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
            why = _explain_absence(details or "") or _AT_ALL.sub("", details or "")
            return Unreachable(f"{self.peer} cannot be reached or broke off: {why}")
        if code is grpc.StatusCode.NOT_FOUND:
            return FrozenWanted(f"{self.peer} refused: {details}")
        if code is grpc.StatusCode.ABORTED:
            return Busy(f"{self.peer} refused: {details}")
        if code in _BROKEN:
            return PeerBroken(f"{self.peer} failed: {(details or '').removeprefix(_RAISED)}")
        kind = PeerBroken if code is grpc.StatusCode.INVALID_ARGUMENT else LinkError
        return kind(f"{self.peer} refused: {details}")

    def close(self) -> None:
        """Close the channel; its streams break."""
        self._closed.set()
        self._life.close()
        self.channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def silent(self) -> bool:
        """Whether the peer has missed its heartbeat and is not back yet."""
        return self._keepalive is not None and self._keepalive.lost

    def _break(self) -> None:
        """Break all calls and streams to a peer that missed its heartbeat."""
        silent, self._was_silent = self.channel, True
        self.channel = self._connect()
        silent.close()

    def _await_host(self, until_s: float) -> bool:
        """Wait for the host to listen again; return whether it did in time.

        A missed heartbeat replaces the channel meanwhile, hence the short calls.
        """
        while (now_s := time.monotonic()) < until_s and not self._closed.is_set():
            look_s = min(until_s - now_s, _LOOK_S)
            status = methods.STATUS.bind(self.channel)
            try:
                status(b"", timeout=look_s, wait_for_ready=True)
            except grpc.RpcError as error:
                if error.code() not in _AWAY:
                    return True  # a refusal is an answer
            except ValueError:  # closed by a missed heartbeat; the next look takes the new channel
                pass
            else:
                return True
            self._closed.wait(max(now_s + look_s - time.monotonic(), 0.0))  # some fail at once
        return False

    def _explain_silence(self) -> Unreachable:
        assert self._heartbeat is not None
        silence_s = self._heartbeat.lost_after_s
        return Unreachable(f"{self.peer} has shown no life for {silence_s:g} s")


def _explain_absence(details: str) -> str:
    """Explain that the peer has not dialled in, or its certificate's dates; return "" otherwise."""
    if UNRECOGNIZED_NAME in details:
        return NOT_DIALLED
    for words, fault in _DATED.items():
        if words in details:
            return (
                f"{fault}: this machine's clock says {datetime.now(UTC):%Y-%m-%d}; set it if that "
                "is wrong (`timedatectl`), or renew the certificate (`collapipe certs --renew`)"
            )
    return ""

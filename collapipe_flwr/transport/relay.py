"""A relay at the control unit for devices that accept no connection: they dial it.

Three kinds of connection come to its one port. Their first bytes distinguish them:

* TLS that asks for the control unit by name: a device dials in (`dialing`). It identifies itself by
  its certificate, stays connected, and receives a token for every connection that a peer opens;
* TLS that asks for a device by name: a peer of that device. Its bytes are passed on unchanged. TLS
  ends at the peer and the device, so the relay can read neither calls nor tensors;
* a line with such a token: the connection that the device opened for that peer. The token is of no
  other use, so it need not be secret, and boards encrypt no byte twice.

Each direction of a connection has one buffer: a sender waits for a slower receiver.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import ssl
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, cast

from collapipe_flwr.config.cluster_file import ClusterConfig
from collapipe_flwr.core.errors import CollaPipeError, ConfigError
from collapipe_flwr.core.links import split_address
from collapipe_flwr.core.processes import run_beside
from collapipe_flwr.core.texts import to_one_line

_log = logging.getLogger(__name__)
BEAT_S, LOST_S = 2.0, 8.0  # the period of a device's beats, and the silence after which it is away
ADMITTED, REFUSED, TAKE = b"admitted", b"refused", b"take"  # words that begin lines
_GREET_S = 10.0  # for the first bytes of a connection, and for a device to take one
_PAUSE_S = 0.2
_LOOK_S = 1.0  # members that were removed are cut at the second look
MOST_OF_A_DEVICE, MOST_OF_ALL = 64, 512  # connections
_CHUNK_BYTES = 64 * 2**10
_MOST_HELLO_BYTES = 16 * 2**10  # of a client's first message; gRPC's has 2 KiB
_HANDSHAKE = 0x16  # how TLS begins
_IDLE_S, _PROBE_S, _PROBES = 60, 15, 4  # of an idle connection, until its end is taken for dead
_Clusters = Callable[[], Iterable[ClusterConfig]]


@dataclass(slots=True)
class _Dialled:
    """A device that has dialled in: its identity, its connection, and those of its peers."""

    name: str
    fingerprint: str
    secured: _Secured
    peers: set[asyncio.Task[Any]] = field(default_factory=set)
    removed: bool = False  # as of the last look


class DialRelay:
    """Listens for the devices of ``clusters``, as they are now, whose control unit's key is here.

    Use as a context manager. Raises ConfigError when it cannot listen.
    """

    def __init__(self, listen: str, clusters: _Clusters) -> None:
        self._clusters = clusters
        self._known: tuple[ClusterConfig, ...] = ()
        self._contexts: dict[str, ssl.SSLContext] = {}  # by the names of control units
        self._dialled: dict[str, _Dialled] = {}  # by their names, as TLS compares those
        self._wanted: dict[str, asyncio.Future[socket.socket]] = {}  # by token
        try:
            place = split_address(listen, least=0)
            family = socket.AF_INET6 if ":" in place[0] else socket.AF_INET
            self._listener = socket.create_server(place, family=family, backlog=128)
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {listen} for devices that dial ({error.strerror}): choose a "
                "free port of this machine with `relay` in the cluster file"
            ) from error
        self._listener.setblocking(False)
        self.address = f"{listen.rpartition(':')[0]}:{self._listener.getsockname()[1]}"
        self._life = run_beside(lambda over: run_until(over, self._serve), "relay")

    def __enter__(self) -> DialRelay:
        self._life.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._life.__exit__(None, None, None)
        self._listener.close()

    async def _serve(self) -> None:
        """Answer callers, each in a task of its own, so that none ends with another."""
        callers: dict[asyncio.Task[None], socket.socket] = {}
        watching = asyncio.create_task(self._watch())
        try:
            while True:
                caller = await self._accept()
                if len(callers) >= MOST_OF_ALL:
                    caller.close()
                    continue
                callers[task := asyncio.create_task(self._answer(caller))] = caller
                task.add_done_callback(lambda ended: callers.pop(ended).close())
        finally:
            tasks = (watching, *callers)
            for each in tasks:
                each.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _accept(self) -> socket.socket:
        while True:
            try:
                caller, _ = await asyncio.get_running_loop().sock_accept(self._listener)
            except OSError as error:  # too many files are open, or it hung up already
                _log.warning("a connection was not accepted: %s", error)
                await asyncio.sleep(_PAUSE_S)
            else:
                return caller

    async def _watch(self) -> None:
        """Cut devices, with their connections, that are not members any more."""
        while True:
            self._look()
            for dialled in tuple(self._dialled.values()):
                fault = _find_fault(self._known, dialled.name, dialled.fingerprint)
                if fault and dialled.removed:
                    _log.info("a device that had dialled in is cut off: %s", fault)
                    dialled.secured.close()
                dialled.removed = bool(fault)  # one more look, so that its roster reaches it first
            await asyncio.sleep(_LOOK_S)

    def _look(self) -> None:
        """Read the present members; a file that cannot be read changes nothing."""
        try:
            known = tuple(self._clusters())
            if known != self._known:
                self._contexts = _make_contexts(known)
                self._known = known
        except (CollaPipeError, OSError) as error:
            _log.error("devices dial in by the members that were known before: %s", error)

    async def _answer(self, caller: socket.socket) -> None:
        """Determine the kind of a connection, and serve it; `_serve` closes it."""
        tune(caller)
        try:
            async with asyncio.timeout(_GREET_S):
                begin = await asyncio.get_running_loop().sock_recv(caller, _CHUNK_BYTES)
                if begin[:1] != bytes([_HANDSHAKE]):
                    self._give(caller, begin)
                    return
                secured = _Secured(caller, self._contexts)
                is_for_us = await secured.shake_hands(begin)
            if is_for_us:
                await self._keep(secured)
            else:
                await self._pass_on(caller, secured)
        except OSError as error:
            _log.debug("a connection ended: %s", error)

    async def _keep(self, secured: _Secured) -> None:
        """Admit a device, and receive its beats until it goes."""
        name, shown = secured.peer
        if _find_fault(self._known, name, shown):
            self._look()  # it may have joined since
        if fault := _find_fault(self._known, name, shown):
            _log.warning("a device that dials was refused: %s", to_one_line(fault))
            await secured.say(REFUSED, fault.encode())
            return
        dialled, key = _Dialled(name, shown, secured), name.casefold()
        if (before := self._dialled.get(key)) is not None:
            before.secured.close()  # an earlier connection whose end went unnoticed
        self._dialled[key] = dialled
        _log.info("%s has dialled in", name)
        try:
            await secured.say(ADMITTED)
            while True:
                async with asyncio.timeout(LOST_S):
                    if not await secured.hear():
                        break
                await secured.say()  # so that the device knows that the relay is alive
        finally:
            if self._dialled.get(key) is dialled:
                del self._dialled[key]
                _log.info("%s is away", name)
            for task in dialled.peers:  # they would wait for its answer in vain
                task.cancel()

    async def _pass_on(self, peer: socket.socket, secured: _Secured) -> None:
        """Connect a peer with the device that it asks for, if that has dialled in."""
        loop, dialled = asyncio.get_running_loop(), self._dialled.get(secured.asked)
        if dialled is None:
            await loop.sock_sendall(peer, secured.alert)
            return
        if len(dialled.peers) >= MOST_OF_A_DEVICE:
            _log.warning("%s has %d connections, its limit", dialled.name, MOST_OF_A_DEVICE)
            return
        task = asyncio.current_task()
        assert task is not None
        token, given = secrets.token_hex(16), loop.create_future()
        self._wanted[token] = given
        dialled.peers.add(task)
        try:
            async with asyncio.timeout(_GREET_S):
                await dialled.secured.say(TAKE, token.encode())
                device = await given
            with device:
                await loop.sock_sendall(device, secured.heard)
                await splice(peer, device)
        finally:
            dialled.peers.discard(task)
            self._wanted.pop(token, None)
            if not given.cancel() and not given.cancelled():  # it came just too late
                given.result().close()

    def _give(self, device: socket.socket, line: bytes) -> None:
        """Give a device's connection to the peer that waits for it, if there is one."""
        word, _, token = line.rstrip(b"\n").partition(b" ")
        given = self._wanted.pop(token.decode("ascii", "replace"), None)
        if word == TAKE and given is not None and not given.done():
            copy = socket.socket(fileno=device.detach())
            copy.setblocking(False)
            given.set_result(copy)


def _make_contexts(clusters: Iterable[ClusterConfig]) -> dict[str, ssl.SSLContext]:
    """Make a TLS context for every control unit whose key is here, by its case-folded name."""
    found = {}
    for config in clusters:
        files = config.tls_files(config.control_unit.name)
        if files and files.certificate and files.key and files.key.exists():
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(files.ca)
            context.load_cert_chain(files.certificate, files.key)
            found[config.control_unit.name.casefold()] = context
    return found


def _find_fault(clusters: Iterable[ClusterConfig], name: str, fingerprint: str) -> str:
    """Explain why the bearer of this certificate may not dial in; return "" if it may."""
    found = next((d for config in clusters for d in config.devices if d.name == name), None)
    if found is None:
        return f"{name[:80]} is no device here"
    if not found.dials:
        return (
            f"{name} is listed at {found.address}, and does not dial: remove it, and let it join "
            "again with --dial"
        )
    if found.fingerprints and fingerprint not in found.fingerprints:
        return f"{name} is a device here, but this is not the certificate that it joined with"
    return ""


class _Secured:
    """This side of TLS with a caller, whose first message names the member that it wants."""

    def __init__(self, caller: socket.socket, contexts: dict[str, ssl.SSLContext]) -> None:
        self._caller, self._contexts = caller, contexts
        self._came, self._go = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._speaking = asyncio.Lock()
        self.asked, self.heard, self.alert = "", b"", b""

    async def shake_hands(self, begin: bytes) -> bool:
        """Shake hands; return whether the caller wants us.

        If not, ``heard`` is for the member that it wants, or ``alert`` for the caller.
        """
        unnamed = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        unnamed.verify_mode = ssl.CERT_REQUIRED
        unnamed.sni_callback = self._choose
        self._tls = unnamed.wrap_bio(self._came, self._go, server_side=True)
        self.heard = begin
        self._came.write(begin)
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                await self._flush()
                await self._receive()
                continue
            except ssl.SSLError:
                self.alert = self._go.read()
                if self.asked in self._contexts:  # and hears what is wrong with its certificate
                    await asyncio.get_running_loop().sock_sendall(self._caller, self.alert)
                    raise
                return False
            await self._flush()
            return True

    def _choose(self, tls: ssl.SSLObject, asked: str | None, _: ssl.SSLContext) -> int | None:
        self.asked = (asked or "").casefold()
        if self.asked not in self._contexts:
            return ssl.ALERT_DESCRIPTION_UNRECOGNIZED_NAME
        tls.context = self._contexts[self.asked]
        return None

    @property
    def peer(self) -> tuple[str, str]:
        """The common name and the fingerprint that its certificate proves."""
        der, found = self._tls.getpeercert(True), self._tls.getpeercert()
        assert der is not None and found is not None
        subject = cast("tuple[tuple[tuple[str, str], ...], ...]", found["subject"])
        names = [value for entries in subject for key, value in entries if key == "commonName"]
        return names[0] if names else "", sha256(der).hexdigest()

    async def hear(self) -> bytes:
        """Return some bytes; none at the end."""
        while True:
            try:
                return self._tls.read(_CHUNK_BYTES)
            except ssl.SSLWantReadError:
                await self._receive()
            except ssl.SSLZeroReturnError:
                return b""

    async def say(self, *words: bytes) -> None:
        """Send one line."""
        self._tls.write(b" ".join(words) + b"\n")
        await self._flush()

    def close(self) -> None:
        """End the connection; tasks that wait for the other side notice its end."""
        with suppress(OSError):
            self._caller.shutdown(socket.SHUT_RDWR)

    async def _receive(self) -> None:
        data = await asyncio.get_running_loop().sock_recv(self._caller, _CHUNK_BYTES)
        if not data:
            raise ConnectionResetError("the other side hung up")
        if not self.asked:
            self.heard += data
            if len(self.heard) > _MOST_HELLO_BYTES:
                raise ConnectionAbortedError("no first message of TLS is so long")
        self._came.write(data)

    async def _flush(self) -> None:
        async with self._speaking:  # records leave in their order
            if self._go.pending:
                await asyncio.get_running_loop().sock_sendall(self._caller, self._go.read())


async def splice(one: socket.socket, other: socket.socket) -> None:
    """Pass on bytes both ways, until both sides have ended or one is broken off."""

    async def pass_on(source: socket.socket, sink: socket.socket) -> None:
        buffer = memoryview(bytearray(_CHUNK_BYTES))
        while size := await loop.sock_recv_into(source, buffer):
            await loop.sock_sendall(sink, buffer[:size])
        sink.shutdown(socket.SHUT_WR)

    loop = asyncio.get_running_loop()
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(pass_on(one, other))
            group.create_task(pass_on(other, one))
    except* OSError:
        pass


def tune(connection: socket.socket) -> None:
    """Send small frames at once, and notice a peer that vanished."""
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", _IDLE_S),
        ("TCP_KEEPINTVL", _PROBE_S),
        ("TCP_KEEPCNT", _PROBES),
    ):
        if hasattr(socket, name):  # elsewhere the system's own times hold
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def run_until(over: threading.Event, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run ``work`` in an event loop of its own; cancel it when ``over`` is set."""

    async def both() -> None:
        task = asyncio.create_task(work())
        waiting = asyncio.create_task(asyncio.to_thread(over.wait))
        await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
        while not task.done():  # before Python 3.13 a TaskGroup that just fails swallows one
            task.cancel()
            await asyncio.wait({task}, timeout=_PAUSE_S)
        if not task.cancelled():
            task.result()

    asyncio.run(both())


@contextmanager
def run_relay(clusters: _Clusters) -> Iterator[None]:
    """Relay during the body, as soon as a device of ``clusters`` dials."""

    def watch(over: threading.Event) -> None:
        said = ""
        while not over.wait(_LOOK_S):
            try:
                where = next((c.relay_address for c in clusters() if c.diallers), "")
                if not where:
                    continue
                with DialRelay(where, clusters) as relay:
                    _log.info("devices dial in at %s", relay.address)
                    over.wait()
            except CollaPipeError as error:
                if str(error) != said:
                    _log.error("no device can dial in: %s", said := str(error))

    with run_beside(watch, "relaying"):
        yield

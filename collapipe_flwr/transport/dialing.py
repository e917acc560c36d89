"""A device's end of a `DialRelay`: it dials the control unit, and serves peers from there.

One connection stays open, under mutual TLS. For every peer that the relay announces on it, the
device opens another connection outward, and joins it to the listener of its own daemon on loopback,
which notices no difference. A connection that breaks is dialled again after growing pauses;
meanwhile the device is away for its peers.
"""

from __future__ import annotations

import asyncio
import logging
import random
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from collapipe_flwr.core.errors import LinkError
from collapipe_flwr.core.links import TlsFiles, split_address
from collapipe_flwr.core.processes import run_beside
from collapipe_flwr.transport.relay import (
    ADMITTED,
    BEAT_S,
    LOST_S,
    MOST_OF_A_DEVICE,
    TAKE,
    run_until,
    splice,
    tune,
)

_log = logging.getLogger(__name__)
_CONNECT_S = 10.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 10.0
_Place = tuple[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialing:
    """Dials the ``relay`` of the control unit called ``unit``, with this device's ``tls`` files.

    ``listens`` is the daemon's own address. ``on_admitted`` is called after each admission.
    """

    relay: str
    unit: str
    tls: TlsFiles
    listens: str
    on_admitted: Callable[[], object] = lambda: None

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Keep this device reachable during the body."""
        with run_beside(lambda over: run_until(over, self._keep_dialing), "dialing"):
            yield

    async def _keep_dialing(self) -> None:
        pause_s, said = _FIRST_PAUSE_S, ""
        while True:
            try:
                await self.serve_once()
            except LinkError as error:
                fault = str(error)
            else:
                fault, pause_s, said = "its connection broke off", _FIRST_PAUSE_S, ""
            if fault != said:
                _log.warning("the control unit at %s: %s; dialling again", self.relay, fault)
            said = fault
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))  # not all boards at once
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def serve_once(self) -> None:
        """Dial, and serve until the connection ends; raises LinkError if we are not admitted."""
        reader, writer = await self._dial()
        try:
            async with asyncio.timeout(LOST_S):
                answer = await reader.readline()
            word, _, why = answer.rstrip(b"\n").partition(b" ")
            if word != ADMITTED:
                raise LinkError(why.decode(errors="replace")[:500] or "it hung up on us")
            self.on_admitted()
            await self._serve_peers(reader, writer)
        except ssl.SSLError as error:  # with TLS 1.3 the relay judges our certificate only now
            raise LinkError(
                f"it refuses the certificate of this device ({error.reason}): see the clocks of "
                "both (`timedatectl`), and that this device is still a member"
            ) from error
        except (OSError, ValueError) as error:  # asyncio raises ValueError for too long a line
            raise LinkError(f"it does not answer ({error or 'too slow'})") from error
        finally:
            writer.transport.abort()

    async def _dial(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        host, port = split_address(self.relay)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.hostname_checks_common_name = False
        try:
            context.load_verify_locations(self.tls.ca)
            assert self.tls.certificate is not None
            context.load_cert_chain(self.tls.certificate, self.tls.key)
            async with asyncio.timeout(_CONNECT_S):
                return await asyncio.open_connection(
                    host, port, ssl=context, server_hostname=self.unit
                )
        except ssl.SSLCertVerificationError as error:
            raise LinkError(
                f"who answers is not {self.unit} of this cluster ({error.verify_message}): see "
                "the address, and the clocks of both (`timedatectl`)"
            ) from error
        except OSError as error:
            raise LinkError(
                f"nobody lets devices in there ({error or 'no answer'}): see the address, that "
                "`collapipe cluster serve` runs there, and that its firewall lets the port through"
            ) from error

    async def _serve_peers(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Connect peers until our own connection ends, and theirs with it."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(_beat(writer))
                await self._take_peers(reader, group)
                raise ConnectionResetError
        except* (OSError, ValueError):
            pass

    async def _take_peers(self, reader: asyncio.StreamReader, group: asyncio.TaskGroup) -> None:
        peers = set[asyncio.Task[None]]()
        while True:
            async with asyncio.timeout(LOST_S):
                line = await reader.readline()
            if not line:
                return
            word, _, token = line.rstrip(b"\n").partition(b" ")
            if word == TAKE and len(peers) < MOST_OF_A_DEVICE:
                task = group.create_task(self._take(token))
                peers.add(task)
                task.add_done_callback(peers.discard)

    async def _take(self, token: bytes) -> None:
        """Connect one peer with the daemon."""
        try:
            with (
                await _connect(split_address(self.relay)) as peer,
                await _connect(split_address(self.listens)) as own,
            ):
                await asyncio.get_running_loop().sock_sendall(
                    peer, b" ".join((TAKE, token)) + b"\n"
                )
                await splice(peer, own)
        except OSError as error:
            _log.debug("a peer was not connected: %s", error)


async def _beat(writer: asyncio.StreamWriter) -> None:
    while True:
        writer.write(b"\n")
        await writer.drain()
        await asyncio.sleep(BEAT_S)


async def _connect(place: _Place) -> socket.socket:
    """Connect to the first of a name's addresses that answers."""
    found = await asyncio.to_thread(socket.create_connection, place, _CONNECT_S)
    tune(found)
    return found

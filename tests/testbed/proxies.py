"""Hosts as names on loopback; every service stands behind a proxy that paces what it forwards."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from tests.ports import free_port
from tests.testbed.network import Endpoint, Network

_CHUNK_BYTES = 16 * 1024
_DEADLINE_S = 10.0


class ProxyNetwork(Network):
    """All hosts share 127.0.0.1; the rate holds per connection and direction."""

    kind = "loopback with pacing proxies"

    def __init__(self, loop: asyncio.AbstractEventLoop, rate_bit_per_s: int) -> None:
        self._loop = loop
        self._bytes_per_s = rate_bit_per_s / 8
        self._servers: list[asyncio.Server] = []
        self._hosts: dict[int, str] = {}  # by the port that their service listens on
        self._sent: Counter[str] = Counter()

    def endpoint(self, host: str) -> Endpoint:
        """See Network."""
        port = free_port()
        self._hosts[port] = host
        listen = f"127.0.0.1:{port}"
        return Endpoint(listen=listen, dial=self.before(listen))

    def before(self, address: str) -> str:
        """The address of a proxy before a service on loopback."""
        port = int(address.rpartition(":")[2])
        started = asyncio.run_coroutine_threadsafe(self._start_proxy(port), self._loop)
        return f"127.0.0.1:{started.result(_DEADLINE_S)}"

    def command(self, host: str, command: Sequence[str]) -> list[str]:
        """See Network."""
        _ = host
        return list(command)

    def sent_bytes(self, host: str) -> int:
        """See Network."""
        return self._sent[host]

    async def _start_proxy(self, port: int) -> int:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                behind = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                writer.close()  # the service is down: so is its proxy, to whoever dials
                return
            try:
                host = self._hosts.get(port, "")
                await asyncio.gather(
                    self._pump(reader, behind[1]), self._pump(behind[0], writer, host)
                )
            except asyncio.CancelledError:
                for end in (writer, behind[1]):
                    end.transport.abort()
                raise

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        self._servers.append(server)
        number: int = server.sockets[0].getsockname()[1]
        return number

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str = ""
    ) -> None:
        with suppress(ConnectionError):
            while chunk := await reader.read(_CHUNK_BYTES):
                self._sent[host] += len(chunk)
                await asyncio.sleep(len(chunk) / self._bytes_per_s)
                writer.write(chunk)
                await writer.drain()
        writer.close()

    async def close(self) -> None:
        """End every proxy and connection."""
        for server in self._servers:
            server.close()
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)  # the sockets are closed in the loop's next turn


@contextmanager
def proxies(hosts: Sequence[str], *, rate_bit_per_s: int) -> Iterator[ProxyNetwork]:
    """A network of proxies while the body runs."""
    _ = hosts
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="proxies", daemon=True)
    thread.start()
    network = ProxyNetwork(loop, rate_bit_per_s)
    try:
        yield network
    finally:
        asyncio.run_coroutine_threadsafe(network.close(), loop).result(_DEADLINE_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(_DEADLINE_S)
        loop.close()

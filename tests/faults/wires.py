"""Wires that a test cuts for a while: proxies on loopback that hold back what comes meanwhile."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_CHUNK_BYTES = 64 * 1024
_DEADLINE_S = 10.0


class Wire:
    """The way to one service on loopback; ``address`` is what others dial."""

    def __init__(self, loop: asyncio.AbstractEventLoop, port: int) -> None:
        self._loop, self._port = loop, port
        self._whole = asyncio.Event()
        self._mending: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.address = asyncio.run_coroutine_threadsafe(self._listen(), loop).result(_DEADLINE_S)

    def cut(self, seconds: float) -> None:
        """Nothing passes in either direction for so long, and no connection ends."""
        self._loop.call_soon_threadsafe(self._set, False, seconds)

    def mend(self) -> None:
        """All passes again, that which was held back first."""
        self._loop.call_soon_threadsafe(self._set, True)

    def _set(self, whole: bool, seconds: float = 0.0) -> None:
        if self._mending is not None:
            self._mending.cancel()
        self._mending = None if whole else self._loop.call_later(seconds, self._set, True)
        (self._whole.set if whole else self._whole.clear)()

    async def close(self) -> None:
        """End every connection."""
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _listen(self) -> str:
        self._whole.set()
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        ends = [writer]
        try:
            await self._whole.wait()
            inner, outer = await asyncio.open_connection("127.0.0.1", self._port)
            ends.append(outer)
            await asyncio.gather(self._pump(reader, outer), self._pump(inner, writer))
        except (OSError, asyncio.CancelledError):
            pass  # the service is down, and so is the way to it; or the test is over
        finally:
            self._tasks.discard(task)
            for end in ends:
                end.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while chunk := await reader.read(_CHUNK_BYTES):
            await self._whole.wait()
            writer.write(chunk)
            await writer.drain()
        with suppress(OSError):
            writer.write_eof()


@contextmanager
def wires() -> Iterator[asyncio.AbstractEventLoop]:
    """The loop that carries them, while the body runs."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="wires", daemon=True)
    thread.start()
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(_DEADLINE_S)
        loop.close()

"""Devices and an edge as processes on loopback, each behind a wire and with a defect to turn on."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.cluster.daemon_processes import ROOT, first_line
from tests.faults.wires import Wire, wires
from tests.forked import Process, start

STOP_S = 30.0


class Host:
    """One process, on the same port in every life; ``address`` is that of its wire."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, folder: Path, command: str, *options: str
    ) -> None:
        self._defect = folder / f"{command}-{len(list(folder.iterdir()))}"
        self._words, self._listen = (command, *options), "127.0.0.1:0"
        self._timers: list[threading.Timer] = []
        self._loop = loop
        self.process: Process | None = None
        self.start()
        self.wire = Wire(loop, int(self._listen.rpartition(":")[2]))
        self.address = self.wire.address

    def start(self) -> None:
        """A new life."""
        self.spoil("")
        env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        env["FAULT_FILE"] = str(self._defect)
        words = [*self._words, "--listen", self._listen, "--grace-s", "0"]
        self.process = start("tests.faults.board", *words, env=env)
        self._listen = first_line(self.process).split()[-1]

    def heal(self) -> None:
        """Whatever was done to it is over."""
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
        assert self.process is not None
        was = self._defect.read_text()
        self.spoil("")
        self.wire.mend()
        if "stuck" in was:
            self.stop()
        if self.process.poll() is not None:
            self.start()
        self.signal(signal.SIGCONT)
        self.limit(resource.RLIM_INFINITY)

    def spoil(self, defect: str) -> None:
        """Turn a defect on, see `board`; "" turns it off."""
        self._defect.write_text(defect)

    def signal(self, number: int) -> None:
        """Send a signal."""
        assert self.process is not None
        self.process.send_signal(number)

    def limit(self, most_bytes: int) -> None:
        """No file of it can grow beyond so many bytes: its disk is full."""
        assert self.process is not None
        hard = resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE)[1]
        resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE, (most_bytes, hard))

    def later(self, seconds: float, what, *arguments: object) -> None:
        """Do something to it after a while, unless it is healed before."""
        timer = threading.Timer(seconds, what, arguments)
        self._timers.append(timer)
        timer.start()

    def stop(self) -> None:
        """Kill it."""
        assert self.process is not None
        self.process.kill()
        self.process.wait(STOP_S)
        assert self.process.stdout is not None
        self.process.stdout.close()

    def close(self) -> None:
        """End it and its wire."""
        asyncio.run_coroutine_threadsafe(self.wire.close(), self._loop).result(STOP_S)
        self.stop()


@contextmanager
def hosts(folder: Path, devices: int) -> Iterator[tuple[Sequence[Host], Host]]:
    """Devices d0, d1, ... and an edge, while the body runs."""
    with wires() as loop, ExitStack() as stack:

        def hosted(command: str, *options: str) -> Host:
            host = Host(loop, folder, command, *options)
            stack.callback(host.close)
            return host

        names = [f"d{n}" for n in range(devices)]
        found = [hosted("device", "--name", name) for name in names]
        yield found, hosted("edge")

"""Programs on the hosts of a network: started with a log, watched, and always stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.testbed.network import Network

_STOP_S = 15.0
_LOOK_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A running program and the file that its output goes to."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    def text(self) -> str:
        """All output so far."""
        return self.log.read_text(errors="replace")

    def wait_for(self, words: str, *, deadline_s: float, times: int = 1) -> None:
        """Until ``words`` stand in the output ``times`` times; AssertionError when they do not."""
        end_s = time.monotonic() + deadline_s
        while self.text().count(words) < times:
            assert self.process.poll() is None, f"{self.name} ended early:\n{self.tail()}"
            assert time.monotonic() < end_s, f"{self.name} never said {words!r}:\n{self.tail()}"
            time.sleep(_LOOK_S)

    def wait(self, *, deadline_s: float) -> int:
        """Its exit code."""
        return self.process.wait(deadline_s)

    def send(self, sign: signal.Signals) -> None:
        """A signal to the program itself, not to its children."""
        os.kill(self.process.pid, sign)

    def kill(self) -> None:
        """SIGKILL to the program and its children."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(_STOP_S)

    def stop(self) -> None:
        """SIGTERM to its group, SIGKILL to what is left after a while."""
        for sign in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self.process.pid, sign)
                self.process.wait(_STOP_S)
            except ProcessLookupError:
                self.process.wait(_STOP_S)
                return
            except subprocess.TimeoutExpired:
                continue

    def tail(self, lines: int = 30) -> str:
        """The end of its output."""
        return "\n".join(self.text().splitlines()[-lines:])


class Programs:
    """Starts programs on hosts; see ``programs``."""

    def __init__(self, network: Network, folder: Path, env: Mapping[str, str]) -> None:
        self._network, self._folder, self._env = network, folder, dict(env)
        self._running: list[Program] = []

    def start(self, host: str, name: str, command: Sequence[str], *, cwd: Path) -> Program:
        """Run ``command`` on ``host`` in a process group of its own."""
        return self.start_here(name, self._network.command(host, command), cwd=cwd)

    def start_here(self, name: str, command: Sequence[str], *, cwd: Path) -> Program:
        """The same without a host."""
        log = self._folder / f"{name}-{len(self._running)}.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                command,
                cwd=cwd,
                env=self._env,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._running.append(program := Program(name=name, process=process, log=log))
        return program

    def stop_all(self) -> None:
        """Stop what still runs, the last started first."""
        for program in reversed(self._running):
            program.stop()


@contextmanager
def programs(network: Network, folder: Path, env: Mapping[str, str]) -> Iterator[Programs]:
    """Programs that all have ended when the body has."""
    running = Programs(network, folder, env)
    try:
        yield running
    finally:
        running.stop_all()

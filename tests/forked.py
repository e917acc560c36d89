"""Processes that need not import anything: forks of one that has, see `fork_server`.

A daemon spends seconds on its imports before it does what a test is about. Tests of the start
itself, of memory or of what is imported start it as its user does.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import IO, Any

from tests.fork_server import REPORT, RUN, STAY

ROOT = Path(__file__).parents[1]
_START_S = 250.0
# Workers of one run share a server, and so do processes that they start.
_RUN = os.environ.get("PYTEST_XDIST_TESTRUNUID") or uuid.uuid4().hex
_NAME = os.environ.setdefault("FORK_SERVER", f"collapipe-{_RUN}")


class Forked:
    """``python -m MODULE ARGUMENTS``, as a `subprocess.Popen` with a pipe of text as stdout.

    One that ``talks`` has a pipe as stdin, too, and both are of bytes.
    """

    def __init__(
        self, module: str, *arguments: str, env: Mapping[str, str], talks: bool = False
    ) -> None:
        _server()
        self.returncode: int | None = None
        self._peer = _connected()
        ours, stdout = os.pipe()
        self.stdout: IO[Any] = os.fdopen(ours, "rb" if talks else "r")
        self.stdin: IO[bytes] | None = None
        if talks:
            stdin, ours = os.pipe()
            self.stdin = os.fdopen(ours, "wb")
        else:
            stdin = os.open(os.devnull, os.O_RDONLY)
        socket.send_fds(self._peer, [RUN], [stdin, stdout, 2])
        os.close(stdin)
        os.close(stdout)
        order = {"module": module, "arguments": arguments, "folder": str(ROOT)}
        self._peer.sendall(json.dumps({**order, "environment": dict(env)}).encode())
        self._peer.shutdown(socket.SHUT_WR)
        self.pid = self._reported()

    def poll(self) -> int | None:
        """The exit code, once it has ended."""
        if self.returncode is None and select.select([self._peer], [], [], 0.0)[0]:
            self.wait()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, or less than 0 for a signal; raises TimeoutExpired."""
        if self.returncode is None:
            if not select.select([self._peer], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            self.returncode = self._reported()
            self._peer.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Unless it has ended, which is told a moment later."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """As `Popen.kill`."""
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        """As `Popen.terminate`."""
        self.send_signal(signal.SIGTERM)

    def _reported(self) -> int:
        told = self._peer.recv(REPORT.size, socket.MSG_WAITALL)
        assert told, "the fork server has ended"
        (number,) = REPORT.unpack(told)
        return int(number)


Process = Forked | subprocess.Popen[str]


def start(module: str, *arguments: str, env: Mapping[str, str], cold: bool = False) -> Process:
    """A fork; one that is ``cold`` or not on Linux is a process that imports everything itself."""
    if sys.platform == "linux" and not cold:
        return Forked(module, *arguments, env=env)
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True)


@contextmanager
def program(code: str, *arguments: str) -> Iterator[Process]:
    """``python -c CODE ARGUMENTS`` from the root of the project; killed if it outlives the body."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = start("tests.program", code, *arguments, env=env)
    try:
        yield process
    finally:
        process.kill()
        process.wait(_START_S)
        assert process.stdout is not None
        process.stdout.close()


@cache
def _server() -> socket.socket:
    """Runs until this process ends, and all others that have asked for it."""
    command = [sys.executable, "-m", "tests.fork_server", _NAME]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=ROOT, env=env, check=True, timeout=_START_S)
    stays = _connected()
    stays.settimeout(_START_S)
    stays.sendall(STAY)
    assert stays.recv(len(STAY)) == STAY, "the fork server could not import what it should"
    atexit.register(stays.close)
    return stays


def _connected() -> socket.socket:
    peer = socket.socket(socket.AF_UNIX)
    peer.connect(f"\0{_NAME}")
    return peer

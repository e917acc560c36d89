"""Small trees of processes for tests: who ends is told by the kernel, not by a clock."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.forked import Process

ROOT = Path(__file__).parents[2]
DEADLINE_S = 250.0
ENDINGS = (signal.SIGTERM, signal.SIGINT, signal.SIGKILL)
_BACKGROUND = ("sh", "-c", 'trap "" INT; exec "$@"', "sh")  # as a shell starts a job with `&`


@contextmanager
def background(
    command: Sequence[str], env: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    """A job in the background with a pipe as stdout; it is killed if it outlives the body."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), **(env or {})}
    with subprocess.Popen(
        [*_BACKGROUND, *command], stdout=subprocess.PIPE, text=True, env=env
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def python(code: str, *arguments: str) -> list[str]:
    """The command that runs a program of a few lines."""
    return [sys.executable, "-c", code, *arguments]


def told(process: Process) -> list[int]:
    """The process ids in the line that it prints next."""
    assert process.stdout is not None
    return [int(word) for word in process.stdout.readline().split()]


def children_of(process: Process) -> list[int]:
    """Those of its main thread, once there are any."""
    path = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    deadline_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline_s:
        if found := [int(word) for word in path.read_text().split()]:
            return found
        time.sleep(0.05)
    raise TimeoutError("the process started none")


@contextmanager
def watched(pids: Iterable[int]) -> Iterator[list[int]]:
    """Handles of running processes, which are killed if they outlive the body."""
    with ExitStack() as stack:
        handles = []
        for pid in pids:
            try:
                handle = os.pidfd_open(pid)
            except ProcessLookupError:
                continue  # it has ended since
            handles.append(handle)
            stack.callback(os.close, handle)
            stack.callback(_kill, handle)
        yield handles


def ended(handles: Sequence[int]) -> bool:
    """Whether there were any and all of them end."""
    return bool(handles) and all(
        select.select([handle], [], [], DEADLINE_S)[0] for handle in handles
    )


def _kill(handle: int) -> None:
    if not select.select([handle], [], [], 0)[0]:
        signal.pidfd_send_signal(handle, signal.SIGKILL)

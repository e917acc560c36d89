"""A lock on the run-config of a run directory, held by the process that writes the directory.

The lock ends with its process, so a killed run does not count as running. On a file system without
locks, the status in the summary stands. Before there is a run-config, `collapipe run` holds a lock
on its log.

The processes of a run note their ids in files, which they lock, too: an id in a file that nobody
has locked is that of a process that has ended.
"""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from collapipe_flwr.core.durable import remove, write_file
from collapipe_flwr.core.errors import ConfigError

CONFIG = "run-config.json"  # written once and never replaced
LOG = "run.log"
LAUNCHER, SERVER = "launcher.pid", "server.pid"  # of `collapipe run`, and of its ServerApp
STARTING, RUNNING, INTERRUPTED = "starting", "running", "interrupted"
_WHY = {
    STARTING: f"its process ended before the run began, see {LOG}",
    RUNNING: "its process ended without a word, as by SIGKILL or a power cut",
}


@contextmanager
def hold_lock(run_dir: Path) -> Iterator[None]:
    """Hold the lock while the body runs; raises ConfigError if another process holds it."""
    descriptor = os.open(run_dir / CONFIG, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            check_not_written(run_dir)
            with suppress(OSError):  # a file system without locks
                fcntl.flock(descriptor, fcntl.LOCK_EX)  # `is_written` holds it for a moment
        yield
    finally:
        os.close(descriptor)


@contextmanager
def lock_file(draft: Path) -> Iterator[None]:
    """Hold the lock of a file that nobody else knows yet; it stays locked when it is moved."""
    descriptor = os.open(draft, os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunProcess:
    """A process that a run notes; ``runs`` is None where the file system has no locks."""

    pid: int
    host: str
    runs: bool | None

    @property
    def is_here(self) -> bool:
        """Whether it runs on this machine."""
        return self.host == socket.gethostname()

    def __str__(self) -> str:
        return f"process {self.pid}" + ("" if self.is_here else f" on {self.host}")


@contextmanager
def note_process(run_dir: Path, name: str) -> Iterator[None]:
    """Note this process in a file of that ``name`` while the body runs."""
    path = run_dir / name
    with ExitStack() as lock:

        def save(draft: Path) -> None:
            draft.write_text(f"{os.getpid()} {socket.gethostname()}\n")
            lock.enter_context(lock_file(draft))

        with suppress(OSError):  # a full disk is told by what must be written
            write_file(path, save)
        try:
            yield
        finally:
            with suppress(OSError):  # another attempt at the run may have noted itself
                remove(path)


def processes_of(run_dir: Path) -> tuple[RunProcess, ...]:
    """Return a run's processes that have not ended; the one that started the others first."""
    return tuple(filter(None, (_read_process(run_dir / name) for name in (LAUNCHER, SERVER))))


def _read_process(path: Path) -> RunProcess | None:
    try:
        runs = _is_locked(path)
        pid, host = path.read_text().split()
    except (OSError, ValueError):
        return None
    return None if runs is False else RunProcess(pid=int(pid), host=host, runs=runs)


def check_not_written(run_dir: Path) -> None:
    """Raise ConfigError while a process writes the directory."""
    if is_written(run_dir):
        who = ", ".join(map(str, processes_of(run_dir)))
        raise ConfigError(
            f'resume: the run in "{run_dir}" is still running{who and f" ({who})"}: wait for its '
            f"end, or stop it by `collapipe stop {run_dir}`"
        )


def is_written(run_dir: Path) -> bool | None:
    """Return whether a process writes the directory; None if unknown.

    A writer's last words may come between the reading of a file and this question: ask first.
    """
    for name in (CONFIG, LOG):
        with suppress(FileNotFoundError, NotADirectoryError):
            return _is_locked(run_dir / name)
    return None


def _is_locked(path: Path) -> bool | None:
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except PermissionError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return False


def mark_interrupted(
    summary: Mapping[str, Any], run_dir: Path, written: bool | None
) -> dict[str, Any]:
    """Return the summary; "running" becomes "interrupted" where no process writes it.

    ``written`` is what `is_written` said before the summary was read. It is asked again, as a
    resumed run may have begun since.
    """
    why = _WHY.get(summary.get("status", ""))
    if why and written is False and is_written(run_dir) is False:
        return {**summary, "status": INTERRUPTED, "reason": why}
    return dict(summary)

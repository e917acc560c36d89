"""Processes and signals: children that end with their parent, and orderly shutdown.

The parent holds a pipe open, and the child has the other end as its stdin. When the parent ends,
also by SIGKILL, the kernel closes the pipe, and the child ends itself as by SIGTERM.

Run as ``python -P -m collapipe_flwr.core.processes SECONDS COMMAND ...`` with a pipe as stdin
(`guard_command`), this module runs another program. It ends with the status of the command, or ends
the command, with its children, when the pipe is closed or on SIGTERM: by SIGTERM to all of them,
and by SIGKILL to those that are left after so many seconds. It is in a session of its own, and so
outlives a SIGKILL to the group of its parent for as long as that takes.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

_STOP_S = 20.0
_PROBE_S = 0.1
_SIGNS = (signal.SIGTERM, signal.SIGINT)
_PROC = Path("/proc")
_Handler = Callable[[int, FrameType | None], object]


@contextmanager
def stop_on_signals() -> Iterator[threading.Event]:
    """Yield an event that SIGTERM and SIGINT set while the body runs."""
    stop = threading.Event()
    # In this order: a signal between the two ends the process instead of being lost.
    with _hear_signals(lambda _: stop.set()), _handle_signals(lambda *_: None):
        yield stop


@contextmanager
def exit_on_signals(answer: Callable[[], str] | None = None) -> Iterator[None]:
    """Raise SystemExit in the body on SIGTERM and SIGINT, so that its cleanup runs.

    The text that ``answer`` returns is written to stderr at once. Further signals are ignored, so
    cleanup must have deadlines of its own.
    """
    over, main = threading.Event(), threading.get_ident()

    def leave(signum: int, frame: FrameType | None) -> None:
        del frame
        over.set()
        for sign in _SIGNS:
            signal.signal(sign, signal.SIG_IGN)
        if answer is not None:  # unbuffered: the body may be in the midst of printing
            begin = "\n" if os.isatty(2) else ""  # behind ^C, or a line that is redrawn
            os.write(2, f"{begin}{answer()}\n".encode())
        raise SystemExit(128 + signum)

    def rouse(number: int) -> None:
        while not over.wait(_PROBE_S):
            signal.pthread_kill(main, number)

    with _hear_signals(rouse):
        try:
            with _handle_signals(leave):
                yield
        finally:
            over.set()


@contextmanager
def run_beside(work: Callable[[threading.Event], object], name: str) -> Iterator[threading.Event]:
    """Run ``work`` in a thread while the body runs; its argument is set when the body ends.

    The body gets it, too, and may set it before its own clean-up.
    """
    over = threading.Event()
    thread = threading.Thread(target=work, args=(over,), name=name, daemon=True)
    thread.start()
    try:
        yield over
    finally:
        over.set()
        thread.join()


@contextmanager
def _handle_signals(handler: _Handler) -> Iterator[None]:
    before = {sign: signal.signal(sign, handler) for sign in _SIGNS}
    try:
        yield
    finally:
        for sign, previous in before.items():
            signal.signal(sign, previous)


@contextmanager
def _hear_signals(hear: Callable[[int], object]) -> Iterator[None]:
    """Call ``hear`` with SIGTERM and SIGINT in a thread of its own while the body runs.

    A pipe wakes that thread. Python's handlers run in the main thread, which may have begun to wait
    just before the signal came, or hold a lock that the handler needs.
    """
    told, tell = os.pipe()
    os.set_blocking(tell, False)

    def watch() -> None:
        with suppress(OSError):  # closed with all others, for another program in this process
            while (read := os.read(told, 1)) and (number := read[0]):
                if number in _SIGNS:
                    hear(number)

    thread = threading.Thread(target=watch, daemon=True, name="signals")
    thread.start()
    before = signal.set_wakeup_fd(tell)
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.write(tell, b"\0")  # not by closing it: a fork may have it open, too
        thread.join()
        os.close(tell)
        os.close(told)


@contextmanager
def open_lifeline() -> Iterator[int]:
    """Yield the stdin of a child to which the parent has no other pipe."""
    read, write = os.pipe()
    try:
        yield read
    finally:
        os.close(read)
        os.close(write)


def end_with_parent(take: Callable[[str], object] | None = None) -> None:
    """Send this process SIGTERM when stdin ends.

    ``take`` is called, in a thread, with every line until then. SIGINT is ignored, since the parent
    gets it from the terminal too; install handlers for it after this call.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_read, args=(take,), daemon=True, name="lifeline").start()


def _read(take: Callable[[str], object] | None) -> None:
    with open(0, "rb", buffering=0, closefd=False) as stdin:  # unbuffered: a lock of sys.stdin's
        for line in stdin:  # own would be held when the process ends in order
            if take is not None:
                take(line.decode())
    main = threading.main_thread().ident
    assert main is not None
    signal.pthread_kill(main, signal.SIGTERM)


def guard_command(command: Sequence[str], patience_s: float = _STOP_S) -> list[str]:
    """Return the command that runs ``command``; leaving a `Popen` of it with a pipe ends both.

    Processes that have not ended ``patience_s`` after SIGTERM are killed.
    """
    keeper = [sys.executable, "-P", "-m", "collapipe_flwr.core.processes"]
    return [*keeper, str(patience_s), *command]


def main() -> None:
    """Run the command on the command line in a new session, with an empty stdin."""
    with suppress(PermissionError):  # it leads a group already
        os.setsid()
    end_with_parent()
    patience_s, *command = sys.argv[1:]
    with stop_on_signals() as stop:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)

        def wait() -> None:
            process.wait()
            stop.set()

        threading.Thread(target=wait, daemon=True).start()
        stop.wait()
        if process.poll() is None:
            _end({process.pid, *_find_groups_below(process.pid)}, float(patience_s))
            process.wait()
    raise SystemExit(process.returncode if process.returncode >= 0 else 128 - process.returncode)


def _find_groups_below(pid: int) -> set[int]:
    """Find process groups of the children: those of a SuperLink outlive it during a run.

    Empty if the system does not list them: then only the process's own group is ended.
    """
    try:
        rows = _read_proc() if (_PROC / "self").exists() else _read_ps()
        return {group for parent, group in rows if parent == pid and group != pid}
    except (OSError, subprocess.SubprocessError, ValueError):
        return set()


def _read_proc() -> list[tuple[int, int]]:
    """Read parent and group of every process from /proc: slim containers have no ``ps``."""
    rows = []
    for path in _PROC.glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended since
            _, parent, group, *_ = path.read_text(errors="replace").rpartition(")")[2].split()
            rows.append((int(parent), int(group)))
    return rows


def _read_ps() -> list[tuple[int, int]]:
    """Read parent and group of every process from ``ps``, where there is no /proc."""
    command = ["ps", "-axo", "ppid=,pgid="]
    shown = subprocess.run(command, capture_output=True, text=True, check=True)
    rows = [line.split() for line in shown.stdout.splitlines()]
    return [(int(parent), int(group)) for parent, group in rows]


def _end(groups: set[int], patience_s: float) -> None:
    """Send SIGTERM to all groups, and SIGKILL to those that are left at the deadline."""
    deadline = time.monotonic() + patience_s
    left = {group for group in groups if _send_signal(group, signal.SIGTERM)}
    while left and time.monotonic() < deadline:
        time.sleep(_PROBE_S)
        left = {group for group in left if _send_signal(group, 0)}
    for group in left:
        _send_signal(group, signal.SIGKILL)


def _send_signal(group: int, signum: int) -> bool:
    """Send a signal (0: none) to a group; returns whether it still had a process."""
    try:
        os.killpg(group, signum)
    except ProcessLookupError:
        return False
    return True


if __name__ == "__main__":
    main()

"""Runs a program that is not ours, and ends it, with its children, when its own parent is gone.

Run as ``python -P -m collapipe_flwr.core.keeper COMMAND ...`` with a pipe as stdin (`keeping`). It
ends with the status of the command, or ends the command when the pipe is closed or on SIGTERM.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

from collapipe_flwr.core.lifeline import end_with_parent
from collapipe_flwr.core.signals import stopping

_STOP_S = 20.0
_PROBE_S = 0.25


def keeping(command: Sequence[str]) -> list[str]:
    """The command that keeps this one; leaving the block of a `Popen` with a pipe ends both."""
    return [sys.executable, "-P", "-m", "collapipe_flwr.core.keeper", *command]


def main() -> None:
    """Run the command on the command line, its stdin empty, in a session of its own."""
    end_with_parent()
    with stopping() as stop:
        process = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, start_new_session=True)

        def wait() -> None:
            process.wait()
            stop.set()

        threading.Thread(target=wait, daemon=True).start()
        stop.wait()
        if process.poll() is None:
            _end(process)
    raise SystemExit(process.returncode if process.returncode >= 0 else 128 - process.returncode)


def _end(process: subprocess.Popen[bytes]) -> None:
    groups = _groups_below(process.pid)
    _stop_group(process)
    for group in groups:
        _end_group(group)


def _stop_group(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM to the process group of the command, SIGKILL to what is left after the deadline."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, sign)
            process.wait(timeout=_STOP_S)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def _groups_below(pid: int) -> set[int]:
    """Process groups of a process's children: those of a SuperLink outlive it during a run."""
    shown = subprocess.run(
        ["ps", "-axo", "ppid=,pgid="], capture_output=True, text=True, check=True
    )
    rows = [tuple(map(int, line.split())) for line in shown.stdout.splitlines()]
    return {group for parent, group in rows if parent == pid and group != pid}


def _end_group(group: int) -> None:
    """The same for a group of processes that are not our children."""
    deadline = time.monotonic() + _STOP_S
    try:
        os.killpg(group, signal.SIGTERM)
        while time.monotonic() < deadline:
            os.killpg(group, 0)  # raises when nobody is left
            time.sleep(_PROBE_S)
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return


if __name__ == "__main__":
    main()

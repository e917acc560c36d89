"""Ending a run that still runs, by the processes that it notes in its directory."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

from collapipe_flwr.core.errors import ConfigError, RunError
from collapipe_flwr.reporting.run_lock import RunProcess, is_written, processes_of

PATIENCE_S = 20.0  # `collapipe run` ends within 10 s
_KILLED_S = 15.0  # for what a killed process started to end itself
_LOOK_S = 0.1


def find_stoppable(run_dir: Path) -> RunProcess | None:
    """Find the process whose end is that of the run; None where the run has ended.

    Raises ConfigError for a folder that is no run, and for a run that cannot be stopped from here.
    """
    written, found = is_written(run_dir), processes_of(run_dir)
    if written is None and not found:
        raise ConfigError(f"there is no run in {run_dir}: give the run directory")
    if not found:
        if written:
            raise ConfigError(
                f"the run in {run_dir} is written by a process that it does not name, as by "
                "`collapipe watch --superlink`: stop that, or the run where it was started"
            )
        return None
    first = found[0]
    if not first.is_here:
        raise ConfigError(f"the run in {run_dir} is {first}: give this command there")
    if first.runs is None:
        raise ConfigError(
            f"the file system of {run_dir} has no locks, so nobody can tell whether {first} is "
            f"still that of the run: look at it (`ps {first.pid}`), and end it by `kill "
            f"{first.pid}`"
        )
    return first


def stop(
    run_dir: Path,
    process: RunProcess,
    say: Callable[[str], object],
    *,
    patience_s: float = PATIENCE_S,
) -> None:
    """End the run by SIGTERM to its process, which ends the others in order; later by SIGKILL.

    Raises RunError if it does not end.
    """
    say(f"stopping {process}")
    for sign, within_s in ((signal.SIGTERM, patience_s), (signal.SIGKILL, _KILLED_S)):
        _send(process, sign)
        if _has_ended(run_dir, within_s):
            return
        say(f"the run did not end within {within_s:g} s")
    left = ", ".join(map(str, processes_of(run_dir)))
    raise RunError(f"the run in {run_dir} goes on, by {left}: end that by `kill -9`")


def _send(process: RunProcess, sign: signal.Signals) -> None:
    try:
        os.kill(process.pid, sign)
        os.kill(process.pid, signal.SIGCONT)  # one that was suspended hears nothing else
    except ProcessLookupError:  # it has just ended
        pass
    except PermissionError as error:
        raise RunError(f"{process} is another user's: stop the run as that user") from error


def _has_ended(run_dir: Path, within_s: float) -> bool:
    """Wait until no process of the run is left; returns False at the deadline."""
    until_s, pause = time.monotonic() + within_s, threading.Event()
    while processes_of(run_dir) or is_written(run_dir):
        if time.monotonic() >= until_s:
            return False
        pause.wait(_LOOK_S)
    return True

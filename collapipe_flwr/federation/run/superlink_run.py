"""A run on a SuperLink, followed through Flower's own log into a directory on this machine.

`flwr log` knows how to reach the SuperLink and authenticate. The lines that a run prints about
itself (`reporting.log_lines`) are written into a directory like its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from collapipe_flwr.core.errors import ConfigError, ProtocolError, require
from collapipe_flwr.core.processes import guard_command, run_beside
from collapipe_flwr.reporting.log_lines import parse_line, replay
from collapipe_flwr.reporting.run_directory import RunDirectory, read_config, read_written_summary

_ASK_S = 30.0
_PATIENCE_S = 5.0  # that `flwr log` gets to end
_AGAIN_S = 2.0  # between two attempts to reach a SuperLink that is away
_ENDS = {"finished:completed": "completed", "finished:stopped": "stopped"}
_SILENT = (
    "it printed no rounds: only a run that was started with reporting.log-lines=true can be "
    "watched through its SuperLink"
)


class SuperLinkRun:
    """The run ``run_id`` (None: the newest) on the SuperLink that Flower knows by ``name``."""

    def __init__(self, name: str, run_id: str | None, folder: Path) -> None:
        """Raise ConfigError if Flower cannot query the SuperLink, or it has no such run."""
        self._name = name
        runs = self._list_runs(["--run-id", run_id] if run_id else ["--limit", "1"])
        if not runs:
            raise ConfigError(f"--superlink {name}: there is no run yet")
        self.run_id = str(runs[0]["run-id"])
        self._directory = RunDirectory(folder / f"run-{self.run_id}")
        self._lock = ExitStack()  # marks the directory as being written
        self._process: subprocess.Popen[str] | None = None

    @property
    def run_dir(self) -> Path:
        return self._directory.path

    @contextmanager
    def following(self) -> Iterator[None]:
        """Follow the log while the body runs."""
        with self._lock, run_beside(self._follow, "flwr log") as stop:
            try:
                yield
            finally:
                stop.set()  # first: a process that starts now is ended by its reader
                if self._process is not None and self._process.stdin is not None:
                    self._process.stdin.close()  # which ends it

    def _follow(self, stop: threading.Event) -> None:
        """Read the log to the end of the run, again from the start after a lost connection."""
        while not stop.is_set():
            self._read_log(stop)
            if stop.is_set():
                return
            try:
                run = self._list_runs(["--run-id", self.run_id])[0]
            except ConfigError:
                stop.wait(_AGAIN_S)
                continue
            if str(run["status"]).startswith("finished"):
                self._close(run)
                return
            stop.wait(_AGAIN_S)

    def _read_log(self, stop: threading.Event) -> None:
        with subprocess.Popen(
            guard_command([_flwr(), "log", self.run_id, self._name, "--stream"], _PATIENCE_S),
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            errors="replace",
        ) as self._process:
            assert self._process.stdout is not None
            if stop.is_set():  # the body may have ended before there was a process to end
                return
            for text in self._process.stdout:
                if stop.is_set():
                    return
                self._take(text)

    def _take(self, text: str) -> None:
        try:
            line = parse_line(text)
        except ProtocolError:
            return  # a damaged line; a summary follows each round
        if line is None or (line[0] == "config" and read_config(self.run_dir) is not None):
            return
        replay(*line, self._directory, self._lock)

    def _close(self, run: dict[str, Any]) -> None:
        """Write the final status, unless the run has written one."""
        written = read_written_summary(self.run_dir)
        summary = written or {"status": "running"}
        if summary["status"] == "running":
            status = _ENDS.get(run["status"], "failed")
            reason = run.get("status-details") or (None if written else _SILENT)
            self._directory.write_summary({**summary, "status": status, "reason": reason})

    def _list_runs(self, options: list[str]) -> list[dict[str, Any]]:
        command = [_flwr(), "ls", self._name, "--format", "json", *options]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_ASK_S)
        except subprocess.TimeoutExpired as error:
            raise ConfigError(
                f"--superlink {self._name}: no answer within {_ASK_S:.0f} s"
            ) from error
        try:
            found = json.loads(done.stdout)
        except ValueError:
            found = {"error-message": done.stderr or done.stdout}
        if not found.get("success"):
            words = " ".join(str(found.get("error-message", "no reason given")).split())
            raise ConfigError(f"--superlink {self._name}: {words}")
        runs: list[dict[str, Any]] = found["runs"]
        return runs


def _flwr() -> str:
    require("flwr", "flower")
    return str(Path(sys.executable).with_name("flwr"))

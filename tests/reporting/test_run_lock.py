"""A run that was killed is read as interrupted, and only one process at a time writes it."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.reporting import run_directory
from collapipe_flwr.reporting.comparison import read_runs, render_markdown
from collapipe_flwr.reporting.run_data import RunStory
from collapipe_flwr.reporting.run_directory import RunDirectory, read_summary
from collapipe_flwr.reporting.run_lock import hold_lock, is_written
from collapipe_flwr.reporting.run_reader import RunReader
from tests.reporting.made_up_runs import MadeUpRun

WRITER = """
import sys
from pathlib import Path
from collapipe_flwr.reporting.run_lock import hold_lock
with hold_lock(Path(sys.argv[1])):
    print("writes", flush=True)
    sys.stdin.read()
"""


def _run(folder: Path, status: str = "running") -> Path:
    directory = RunDirectory(folder)
    directory.write_config({"run-name": folder.name})
    story = RunStory(metric_name="loss", energy_budget_j={}, rounds_asked=3)
    directory.write_summary(story.summary(status=status, wall_s=1.0))
    return folder


def _status(folder: Path) -> str:
    summary = read_summary(folder)
    assert summary is not None
    return str(summary["status"])


def _status_read(reader: RunReader) -> str:
    reader.look()
    return str(reader.head["status"])


def test_a_killed_run_is_interrupted_from_then_on(tmp_path: Path) -> None:
    folder = _run(tmp_path / "run")
    command = [sys.executable, "-c", WRITER, str(folder)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "writes\n"
        reader = RunReader(folder)
        assert (_status(folder), _status_read(reader)) == ("running", "running")
        with (
            pytest.raises(ConfigError, match=f"is still running: wait.*collapipe stop {folder}"),
            hold_lock(folder),
        ):
            pass
        process.send_signal(signal.SIGKILL)
        process.wait(30)
        assert (_status(folder), _status_read(reader)) == ("interrupted", "interrupted")
    with hold_lock(folder):  # who resumes it
        assert _status(folder) == "running"
    assert is_written(folder) is False


@pytest.mark.parametrize("read", [_status, lambda path: _status_read(RunReader(path))])
def test_a_run_that_ends_while_it_is_read_is_not_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: Callable[[Path], str]
) -> None:
    run, checked = MadeUpRun(tmp_path / "run"), run_directory._check_shape

    def ends(path: Path, summary: dict[str, Any]) -> dict[str, Any]:
        run.save("completed")  # the summary is read by now
        run.die()
        return checked(path, summary)

    monkeypatch.setattr(run_directory, "_check_shape", ends)
    assert (read(run.path), read(run.path)) == ("running", "completed")


@pytest.mark.parametrize("status", ["completed", "failed", "stopped"])
def test_an_ending_that_was_told_stands(tmp_path: Path, status: str) -> None:
    assert _status(_run(tmp_path / "run", status)) == status


def test_a_comparison_says_which_runs_were_interrupted(tmp_path: Path) -> None:
    runs = [f"{name}={_run(tmp_path / name, name)}" for name in ("completed", "running")]
    assert "| status | completed | interrupted |" in render_markdown(read_runs(runs))

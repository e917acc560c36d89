"""`collapipe stop` ends the processes that a run notes, and no others."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

from collapipe_flwr.cli import app
from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.reporting import stopping
from collapipe_flwr.reporting.run_directory import RunDirectory, is_new
from collapipe_flwr.reporting.run_lock import (
    LAUNCHER,
    LOG,
    SERVER,
    check_not_written,
    note_process,
    processes_of,
)

RUN = """
import signal, sys
from contextlib import ExitStack
from pathlib import Path
from collapipe_flwr.reporting.run_lock import hold_lock, note_process
signal.signal(signal.SIGTERM, getattr(signal, sys.argv[3], lambda *_: sys.exit(143)))
with hold_lock(Path(sys.argv[1])), note_process(Path(sys.argv[1]), sys.argv[2]):
    print("runs", flush=True)
    while True:
        signal.pause()
"""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The directory of a run."""
    directory = RunDirectory(tmp_path / "run")
    directory.write_config({"run-name": "run"})
    return directory.path


@contextmanager
def running(run: Path, name: str = LAUNCHER, answer: str = "") -> Iterator[subprocess.Popen[str]]:
    """A process that writes the run, and takes SIGTERM by ``answer`` (empty: it ends in order)."""
    command = [sys.executable, "-c", RUN, str(run), name, answer]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "runs\n"
            yield process
        finally:
            process.kill()


@pytest.mark.skipif(sys.platform != "linux", reason="a stopped process is a zombie elsewhere")
@pytest.mark.parametrize("name", [LAUNCHER, SERVER])
def test_a_run_ends_in_order_and_a_second_time_there_is_nothing_to_stop(
    run: Path, name: str
) -> None:
    with running(run, name) as process:
        process.send_signal(signal.SIGSTOP)  # one that was suspended hears it, too
        done = CliRunner().invoke(app, ["stop", str(run)], catch_exceptions=False)
        assert done.exit_code == 0 and f"stopping process {process.pid}" in done.stderr
        assert process.wait(60) == 143
    again = CliRunner().invoke(app, ["stop", str(run)], catch_exceptions=False)
    assert again.exit_code == 0 and "nothing to stop" in again.stdout


def test_a_run_that_does_not_hear_is_ended_by_force(run: Path) -> None:
    with running(run, answer="SIG_IGN") as process:
        found = stopping.find_stoppable(run)
        assert found is not None
        stopping.stop(run, found, lambda _: None, patience_s=0.0)
        assert process.wait(60) == -signal.SIGKILL
    assert stopping.find_stoppable(run) is None


def test_a_run_that_still_runs_is_not_resumed_and_its_process_is_named(run: Path) -> None:
    with running(run) as process, pytest.raises(ConfigError) as refused:
        check_not_written(run)
    assert f"(process {process.pid})" in str(refused.value)
    assert f"`collapipe stop {run}`" in str(refused.value)


def test_the_process_of_a_run_that_was_killed_is_not_that_of_another_program(run: Path) -> None:
    (run / SERVER).write_text(f"{os.getpid()} {socket.gethostname()}\n")  # that has its id now
    (run / LAUNCHER).write_text("")
    assert processes_of(run) == () and stopping.find_stoppable(run) is None


def test_a_run_on_another_machine_is_stopped_there(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with note_process(run, LAUNCHER):
        monkeypatch.setattr(socket, "gethostname", lambda: "elsewhere")
        with pytest.raises(ConfigError, match=r"on .*: give this command there"):
            stopping.find_stoppable(run)


def test_a_note_lasts_as_long_as_its_process_and_a_run_may_begin_beside_it(tmp_path: Path) -> None:
    (tmp_path / LOG).touch()
    with note_process(tmp_path, LAUNCHER):
        assert [found.pid for found in processes_of(tmp_path)] == [os.getpid()]
        assert is_new(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [LOG]


def test_a_folder_that_is_no_run_is_told(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["stop", str(tmp_path / "nowhere")])
    assert isinstance(done.exception, ConfigError) and done.exception.exit_code == 2
    assert "no run" in str(done.exception)

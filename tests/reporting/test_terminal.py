"""A run as people see it: bars on a terminal of any width, plain lines where there is none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from collapipe_flwr.reporting.progress import ClusterProgress, ProgressFile, RunProgress
from collapipe_flwr.reporting.run_lock import LOG
from collapipe_flwr.reporting.screen import Follower, Screen
from tests.reporting.pseudo_terminal import in_terminal

SHOWN = ["-m", "tests.reporting.shown_run"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "run"
    path.mkdir()
    (path / LOG).write_text("INFO :      what Flower says\n")
    return path


@pytest.mark.skipif(sys.platform != "linux", reason="pseudo-terminals differ")
@pytest.mark.parametrize("columns", [40, 80])
def test_a_terminal_shows_phases_bars_and_each_round_once(folder: Path, columns: int) -> None:
    written = in_terminal([*SHOWN, str(folder)], columns)
    assert written.status == 0, written.text
    lines = written.lines
    path = [line for line in lines if str(folder) in line]
    assert max(len(line) for line in lines if line not in path) <= columns
    assert any("reading the data" in line and "0:0" in line for line in lines)
    bars = [line for line in lines if "round 2/2 training" in line and "━" in line]
    assert len(set(bars)) > 1  # it moves
    if columns == 80:
        assert "steps" in bars[-1] and "ex/s" in bars[-1] and "left" in bars[-1]
    assert sum("round   1/2" in line for line in lines) == 1
    assert sum("round   2/2" in line for line in lines) == 1
    assert "13.00 simulated seconds" in " ".join(" ".join(lines).split())
    assert "what Flower says" not in written.text


def test_where_there_is_no_terminal_each_phase_and_round_is_a_plain_line(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, *SHOWN, str(folder)], capture_output=True, text=True, check=True
    )
    lines = done.stdout.splitlines()
    assert "\x1b" not in done.stdout and "━" not in done.stdout
    phases = ["starting Flower", "reading the data and the model", "saving the model"]
    assert [line for line in lines if line in phases] == phases
    assert [line[:11] for line in lines if line.startswith("round ")] == [
        "round   1/2",
        "round   2/2",
    ]


def test_after_the_server_apps_last_phase_flower_is_what_still_runs(folder: Path) -> None:
    shown: list[str] = []
    screen = SimpleNamespace(
        verbose=False, show_progress=lambda progress: shown.append(progress.phase)
    )
    follower = Follower(folder, cast(Screen, screen))
    follower.look()
    progress = ProgressFile(folder)
    with progress.watch():
        progress.enter("saving the model")
        follower.look()
    follower.look()
    follower.look()
    assert shown == ["saving the model", "stopping Flower", "stopping Flower"]


def test_a_clock_that_is_set_back_hides_no_phase(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ProgressFile(folder).enter("training")  # of an attempt that was killed
    shown: list[str] = []
    screen = SimpleNamespace(
        verbose=False, show_progress=lambda progress: shown.append(progress.phase)
    )
    follower = Follower(folder, cast(Screen, screen))
    follower.look()
    monkeypatch.setattr("collapipe_flwr.reporting.progress.time.time", lambda: 5.0)
    ProgressFile(folder).enter("saving the model")
    follower.look()
    assert shown == ["saving the model"]


def test_without_a_terminal_a_line_comes_every_ten_seconds(
    capsys: pytest.CaptureFixture[str],
) -> None:
    time_s = [1000.0]
    screen = Screen(now=lambda: time_s[0])
    clusters = {"A": ClusterProgress(trained=36, of=80, per_step=4)}
    training = RunProgress(
        phase="training", since_s=1000.0, round_index=2, rounds=3, clusters=clusters
    )
    said = []
    for time_s[0] in (1000.0 + second for second in range(31)):
        screen.show_progress(training)
        screen.remind()
        said.append(capsys.readouterr().out.strip())
    assert [second for second, line in enumerate(said) if line] == [10, 20, 30]
    assert said[10] == "round 2/3 training, 9 of 20 steps, 0:10 so far"


def test_before_anything_is_known_the_phase_is_said_again(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("collapipe_flwr.reporting.screen._LOOK_S", 600.0)  # we look ourselves
    time_s = [1000.0]
    screen = Screen(now=lambda: time_s[0])
    with screen.phase("starting Flower"):
        time_s[0] = 1012.0
        screen.remind()
    assert capsys.readouterr().out.splitlines() == [
        "starting Flower",
        "    starting Flower, 0:12 so far",
    ]

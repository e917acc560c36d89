"""`collapipe watch`: prints where, serves until it is told to end, and refuses in a sentence."""

from __future__ import annotations

import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from collapipe_flwr.cli.report import watch
from collapipe_flwr.core.errors import ConfigError
from tests.reporting.made_up_runs import MadeUpRun


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
def test_it_serves_the_newest_run_until_a_signal(tmp_path: Path, sign: int) -> None:
    MadeUpRun(tmp_path / "run").end_round()
    command = [sys.executable, "-m", "collapipe_flwr.cli", "watch", "--output-dir", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        try:
            with urllib.request.urlopen(f"{url}events", timeout=60) as stream:
                told = next(line for line in stream if b'"name":"run"' in line)
                assert b'"cluster-1"' in told
        finally:
            process.send_signal(sign)
        assert process.wait(60) == 0


@pytest.mark.parametrize(
    ("run", "sentence"),
    [
        ("no-run", "is not the folder of a run: name one that `collapipe run` printed"),
        ("file", "RUN .*file is a file: name a folder"),
        ("nowhere/run", "there is no folder .*nowhere in which it could come to be"),
    ],
)
def test_what_cannot_be_a_run_is_refused(tmp_path: Path, run: str, sentence: str) -> None:
    (tmp_path / "no-run" / "other").mkdir(parents=True)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=sentence) as refusal:
        watch(str(tmp_path / run))
    assert refusal.value.exit_code == 2


@pytest.mark.parametrize("run", [True, False])
def test_a_folder_of_another_user_is_one_sentence(
    tmp_path: Path, run: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: Path) -> bool:
        raise PermissionError

    monkeypatch.setattr(Path, "exists", refuse)
    with pytest.raises(ConfigError, match="its files are not for this user; run this command as"):
        watch(str(tmp_path / "run") if run else None, output_dir=tmp_path)


def test_an_address_that_is_not_ours_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--host 192\.0\.2\.1 --port 0: cannot listen there"):
        watch(None, output_dir=tmp_path, host="192.0.2.1")


@pytest.mark.parametrize("run", ["nowhere", None])
def test_that_it_waits_for_a_run_is_said(
    tmp_path: Path,
    run: str | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(watch.__globals__, "_serve", lambda *_: None)
    place = tmp_path / (run or "runs")
    watch(None if run is None else str(place), output_dir=place)
    assert f"no run in {place} yet" in capsys.readouterr().err
    MadeUpRun(place if run else place / "run").end_round()
    watch(None if run is None else str(place), output_dir=place)
    assert not capsys.readouterr().err

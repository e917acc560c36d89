"""A run is followed through what it prints into Flower's log, and ends as Flower says."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from collapipe_flwr.core import durable
from collapipe_flwr.core.errors import ConfigError, ProtocolError
from collapipe_flwr.federation.run import superlink_run
from collapipe_flwr.federation.run.superlink_run import SuperLinkRun
from collapipe_flwr.reporting.live.feed import Feed
from collapipe_flwr.reporting.live.state import Place
from collapipe_flwr.reporting.log_lines import log_line, parse_line, print_line, replay
from collapipe_flwr.reporting.run_data import RunData
from collapipe_flwr.reporting.run_directory import EVENTS, RunDirectory, read_written_summary
from collapipe_flwr.reporting.run_lock import CONFIG
from collapipe_flwr.reporting.run_reader import RunReader
from tests.reporting.made_up_runs import MadeUpRun

_FLWR = """#!{python}
import sys
import time
from pathlib import Path
folder = Path({folder!r})
if sys.argv[1] == "ls":
    print((folder / "runs.json").read_text())
else:
    assert sys.argv[1:] == ["log", "7", "boards", "--stream"], sys.argv
    sys.stdout.write((folder / "log").read_text())
    sys.stdout.flush()
    if (folder / "silent").exists():
        time.sleep(20)
        (folder / "silent").unlink()
    (folder / "runs.json").write_text((folder / "ended.json").read_text())
"""
FakeFlwr = Callable[[str, dict[str, Any]], None]


@pytest.fixture
def flwr(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeFlwr:
    """Stands for Flower's command: a log, and what becomes of run 7."""
    program = tmp_path / "flwr"
    program.write_text(_FLWR.format(python=sys.executable, folder=str(tmp_path)))
    program.chmod(0o755)
    monkeypatch.setattr(superlink_run, "_flwr", lambda: str(program))

    def prepare(log: str, ended: dict[str, Any]) -> None:
        (tmp_path / "log").write_text(log)
        for name, run in (("runs", {"status": "running"}), ("ended", ended)):
            runs = [{"run-id": "7", **run}]
            (tmp_path / f"{name}.json").write_text(json.dumps({"success": True, "runs": runs}))

    return prepare


def _followed(folder: Path) -> tuple[Path, dict[str, Any]]:
    run = SuperLinkRun("boards", None, folder)
    feed = Feed(lambda: run.run_dir)
    known = Place()
    with run.following(), feed.follow():
        while True:
            found = feed.next(known, timeout_s=60.0)
            assert found is not None, "the end of the run did not arrive"
            known, news = found[0], json.loads(found[1])
            if news["head"]["status"] not in ("waiting", "starting", "running"):
                return run.run_dir, news


def _printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[MadeUpRun, str]:
    """A run of three rounds, resumed after its first, and what it printed."""
    run = MadeUpRun(tmp_path / "there")
    run.directory.tell = print_line
    first = run.end_round()
    run.end_round()
    run.story = replace(run.story, data=RunData(""))
    run.story.add(first)
    del run.events[1:]
    run.directory.rewrite_events([first.as_json()])
    run.end_round()
    run.end_round()
    return run, capsys.readouterr().out


def test_the_directory_here_becomes_that_of_the_run(
    tmp_path: Path, flwr: FakeFlwr, capsys: pytest.CaptureFixture[str]
) -> None:
    there, printed = _printed(tmp_path, capsys)
    print_line("config", {"seed": 7})
    printed = capsys.readouterr().out + printed
    there.save("completed")
    printed += capsys.readouterr().out
    noise = "\x1b[92mINFO\x1b[0m: round 1\n"
    flwr(noise + printed.replace("\n", f"\n{noise}"), {"status": "finished:completed"})
    here, news = _followed(tmp_path)
    assert (here / EVENTS).read_bytes() == (there.path / EVENTS).read_bytes()
    assert read_written_summary(here) == read_written_summary(there.path)
    assert (news["head"]["status"], news["head"]["config"]) == ("completed", {"seed": 7})


def test_it_runs_as_long_as_nobody_says_otherwise(
    tmp_path: Path, flwr: FakeFlwr, capsys: pytest.CaptureFixture[str]
) -> None:
    _, printed = _printed(tmp_path, capsys)
    flwr(printed, {"status": "running"})
    run = SuperLinkRun("boards", "7", tmp_path)
    print_line("config", {"seed": 7})
    for line in [*capsys.readouterr().out.splitlines(), *printed.splitlines()]:
        run._take(line)
    feed = Feed(lambda: run.run_dir)
    feed.look()
    found = feed.next(Place(), timeout_s=0.0)
    assert found is not None
    assert json.loads(found[1])["head"]["status"] == "running"


def test_nobody_takes_a_run_that_begins_for_an_interrupted_one(
    tmp_path: Path,
    flwr: FakeFlwr,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flwr("", {"status": "running"})
    run = SuperLinkRun("boards", "7", tmp_path)
    print_line("config", {"seed": 7})
    publish, seen = durable.publish, []

    def published(written: Path, path: Path) -> None:
        publish(written, path)
        reader = RunReader(path.parent)
        reader.look()
        seen.append((path.name, reader.head["status"]))

    monkeypatch.setattr(durable, "publish", published)
    run._take(capsys.readouterr().out)
    assert seen == [(CONFIG, "starting")]


def test_a_run_that_died_ends_as_flower_says(
    tmp_path: Path, flwr: FakeFlwr, capsys: pytest.CaptureFixture[str]
) -> None:
    _, printed = _printed(tmp_path, capsys)
    flwr(printed, {"status": "finished:failed", "status-details": "the app was killed"})
    _, news = _followed(tmp_path)
    assert (news["head"]["status"], news["head"]["reason"]) == (
        "failed",
        "the app was killed",
    )


def test_a_run_that_prints_no_rounds_says_what_it_lacks(tmp_path: Path, flwr: FakeFlwr) -> None:
    flwr("INFO: nothing of ours\n", {"status": "finished:completed"})
    _, news = _followed(tmp_path)
    assert news["head"]["status"] == "completed"
    assert "reporting.log-lines=true" in news["head"]["reason"]


def test_a_log_that_is_opened_while_the_watching_ends_is_closed_again(
    tmp_path: Path, flwr: FakeFlwr, monkeypatch: pytest.MonkeyPatch
) -> None:
    flwr("", {"status": "running"})
    (tmp_path / "silent").touch()
    read, guard = SuperLinkRun._read_log, superlink_run.guard_command
    opening = threading.Event()
    ended: list[threading.Event] = []

    def read_log(run: SuperLinkRun, stop: threading.Event) -> None:
        ended.append(stop)
        read(run, stop)

    def slowly(command: Sequence[str], patience_s: float) -> list[str]:
        opening.set()
        ended[0].wait()
        return guard(command, patience_s)

    monkeypatch.setattr(SuperLinkRun, "_read_log", read_log)
    monkeypatch.setattr(superlink_run, "guard_command", slowly)
    with SuperLinkRun("boards", "7", tmp_path).following():
        opening.wait()
    assert (tmp_path / "silent").exists(), "it was read to its end"


def test_what_flower_refuses_is_passed_on(tmp_path: Path, flwr: FakeFlwr) -> None:
    flwr("", {})
    (tmp_path / "runs.json").write_text('{"success": false, "error-message": "no connection\\n"}')
    with pytest.raises(ConfigError, match="--superlink boards: no connection"):
        SuperLinkRun("boards", None, tmp_path)


def test_damaged_lines_are_recognized_and_those_of_others_are_none() -> None:
    line = log_line("event", {"round_index": 3})
    assert parse_line(f"{line}\n") == ("event", {"round_index": 3})
    assert parse_line("round 3/12\n") is None
    for damaged in (line[:-7], line.replace("event ", "event !"), "collapipe-log event"):
        with pytest.raises(ProtocolError):
            parse_line(damaged)


def test_lines_of_a_later_version_are_passed_over(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run")
    replay("later", {}, directory, ExitStack())
    assert list(directory.path.iterdir()) == []

"""`collapipe run` before its ServerApp has written anything: a folder of its own, and a lock."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from collapipe_flwr.core import durable
from collapipe_flwr.core.errors import RunError
from collapipe_flwr.federation.run import running
from collapipe_flwr.federation.run.launcher import Launch
from collapipe_flwr.federation.run.running import Attempt, launch_of
from collapipe_flwr.reporting.run_reader import RunReader
from collapipe_flwr.reporting.screen import Screen

PROJECT = Path(__file__).parents[3]


def _fails(launch: Launch) -> Path:
    """Carry out a run whose app ends without a word; its folder."""
    attempt = Attempt(launch, Screen(quiet=True, verbose=False))
    with pytest.raises(RunError, match="it ended before its first round"):
        attempt.carry_out()
    return attempt.run_dir


def _status(run_dir: Path) -> str:
    reader = RunReader(run_dir)
    reader.look()
    return str(reader.head["status"])


def test_runs_of_one_second_have_a_folder_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began: list[Launch] = []

    def run_app(launch: Launch, _look: Callable[[], None]) -> None:
        began.append(launch)
        if len(began) < 3:  # while this one goes on
            _fails(first)

    monkeypatch.setattr(running, "run_app", run_app)
    first = launch_of(PROJECT, output_dir=tmp_path)
    assert _fails(first) == first.run_dir
    names = [first.run_name, f"{first.run_name}-2", f"{first.run_name}-3"]
    assert [launch.settings["run-name"] for launch in began] == names
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    states = [str(tmp_path / name / "clusters") for name in names]
    assert [launch.settings["train.state-dir"] for launch in began] == states


def test_a_run_is_prepared_as_long_as_its_command_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    publish = durable.publish

    def published(written: Path, path: Path) -> None:
        publish(written, path)
        seen.append(_status(path.parent))

    monkeypatch.setattr(durable, "publish", published)
    monkeypatch.setattr(running, "run_app", lambda launch, _: seen.append(_status(launch.run_dir)))
    run_dir = _fails(launch_of(PROJECT, output_dir=tmp_path))
    assert len(seen) > 1 and set(seen) == {"starting"}
    assert _status(run_dir) == "interrupted"

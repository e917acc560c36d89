"""A run whose server dies at any moment and is resumed ends with the bits of one that did not."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from flwr.app import ArrayRecord
from flwr.serverapp.strategy import FedAdam

from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.core.keys import Value
from collapipe_flwr.federation.checkpoint import Checkpoints
from collapipe_flwr.federation.run.recorder import RunRecorder
from collapipe_flwr.federation.strategy import CollaPipe
from collapipe_flwr.reporting.console import ProgressPrinter
from collapipe_flwr.reporting.events import RoundEvent
from collapipe_flwr.reporting.run_data import RunStory
from collapipe_flwr.reporting.run_directory import RunDirectory, read_past
from tests.forked import start
from tests.integration.conftest import TINY, RunApp
from tests.power_cuts import Killed

ROUNDS = 3
ADAM: dict[str, Value] = {
    "num-server-rounds": ROUNDS,
    "strategy": "fedadam",
    "scheduler.policy": "dssda",  # whose state must come back, too
    "scheduler.micro-batches": "2",
    "train.examples-per-round": 20,
}


def _dying(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, call: int) -> None:
    """The ``call``-th call of a method ends the process instead of running."""
    method: Callable[..., Any] = getattr(owner, name)
    left = [call]

    def die_at_last(self: object, *args: object, **more: object) -> object:
        left[0] -= 1
        if left[0] == 0:
            raise Killed
        return method(self, *args, **more)

    monkeypatch.setattr(owner, name, die_at_last)


@pytest.fixture
def undisturbed(shared_run: RunApp) -> Path:
    return shared_run(ADAM)


MOMENTS = {
    "before any checkpoint": (CollaPipe, "aggregate_train", 1),
    "in a round": (CollaPipe, "aggregate_train", 2),
    "before a checkpoint": (Checkpoints, "save", 2),
    "between checkpoint and evaluation": (RunRecorder, "evaluate", 3),
    "after the last round": (RunRecorder, "finish", 1),
}


def die_and_resume(
    run_app: RunApp, runs: Path, values: dict[str, Value], moment: tuple[type, str, int]
) -> Path:
    """The run that goes on where another of the same name died."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        _dying(patch, *moment)
        run_app(values)
    return run_app({**values, "resume": str(runs / str(values.get("run-name", "run")))})


SLOW = {"in a round", "before a checkpoint"}  # where a process that is killed dies, too, see below


@pytest.mark.parametrize(
    "moment",
    [
        pytest.param(moment, marks=pytest.mark.slow if name in SLOW else (), id=name)
        for name, moment in MOMENTS.items()
    ],
)
def test_a_run_that_died_at_any_moment_ends_with_the_same_bits_and_story(
    run_app: RunApp, tmp_path: Path, undisturbed: Path, moment: tuple[type, str, int]
) -> None:
    _assert_same_run(undisturbed, die_and_resume(run_app, tmp_path / "runs", ADAM, moment))


@pytest.mark.parametrize(
    "moment",
    [
        pytest.param((FedAdam, "aggregate_train", 2), id="in a round"),
        pytest.param((Checkpoints, "save", 2), marks=pytest.mark.slow, id="before a checkpoint"),
        pytest.param(
            (RunRecorder, "evaluate", 3),
            marks=pytest.mark.slow,
            id="between checkpoint and evaluation",
        ),
    ],
)
def test_a_run_of_a_plain_strategy_resumes_as_well(
    run_app: RunApp, shared_run: RunApp, tmp_path: Path, moment: tuple[type, str, int]
) -> None:
    plain: dict[str, Value] = {**ADAM, "runtime": "whole"}
    resumed = die_and_resume(run_app, tmp_path / "runs", plain, moment)
    _assert_same_run(shared_run(plain), resumed)


def test_checkpoints_every_second_round_lose_one_more_and_change_nothing(
    run_app: RunApp, tmp_path: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values: dict[str, Value] = {**ADAM, "checkpoint-every": 2}
    with monkeypatch.context() as patch, pytest.raises(Killed):
        _dying(patch, CollaPipe, "aggregate_train", 3)
        run_app(values)
    folder = tmp_path / "runs" / "run"
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["round-000002"]
    _assert_same_run(undisturbed, run_app({**values, "resume": str(folder)}))


def test_a_run_resumes_only_as_itself(run_app: RunApp, shared_run: RunApp, tmp_path: Path) -> None:
    run_dir = tmp_path / "copy"  # a resumed run writes into its folder
    shutil.copytree(shared_run({"num-server-rounds": 1}), run_dir)
    resume: dict[str, Value] = {"num-server-rounds": 1, "resume": str(run_dir)}
    with pytest.raises(ConfigError, match=r"train\.learning-rate is 0\.5, but the run in .* 0\.00"):
        run_app({**resume, "train.learning-rate": 0.5})
    with pytest.raises(ConfigError, match="is not the folder of a run"):
        run_app({**resume, "resume": str(tmp_path)})
    with pytest.raises(ConfigError, match="checkpoint-every is 0, but only"):
        run_app({**resume, "checkpoint-every": 0})


def test_a_run_whose_checkpoints_are_gone_is_refused_and_its_records_stay(
    run_app: RunApp, shared_run: RunApp, tmp_path: Path
) -> None:
    run_dir = tmp_path / "copy"
    shutil.copytree(shared_run({"num-server-rounds": 1}), run_dir)
    shutil.rmtree(run_dir / "checkpoints")
    before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    with pytest.raises(
        ConfigError, match=r"tells of 1 rounds, but .* put them back, or start a new"
    ):
        run_app({"num-server-rounds": 1, "resume": str(run_dir)})
    assert {p: p.read_bytes() for p in run_dir.rglob("*") if p.is_file()} == before


def test_a_completed_run_has_nothing_to_resume(run_app: RunApp, shared_run: RunApp) -> None:
    run_dir = shared_run({"num-server-rounds": 1})
    before = (run_dir / "summary.json").stat().st_mtime_ns
    with pytest.raises(ConfigError, match="is completed: all 1 rounds are done"):
        run_app({"num-server-rounds": 1, "resume": str(run_dir)})
    assert (run_dir / "summary.json").stat().st_mtime_ns == before


def test_the_rounds_of_a_run_change_only_where_its_learning_rate_does_not_depend_on_them(
    run_app: RunApp, shared_run: RunApp
) -> None:
    run_dir = shared_run({"num-server-rounds": 1})
    with pytest.raises(ConfigError, match=r"num-server-rounds is 2, but .* resume with .*=1, or"):
        run_app({"num-server-rounds": 2, "train.decay": "linear", "resume": str(run_dir)})
    steady: dict[str, Value] = {"train.decay": "none", "run-name": "steady"}
    run_dir = run_app({**steady, "num-server-rounds": 1})
    longer = run_app({**steady, "num-server-rounds": 2, "resume": str(run_dir)})
    whole = run_app({**steady, "run-name": "whole", "num-server-rounds": 2})
    first, second = (d / "model" / "model.safetensors" for d in (whole, longer))
    assert first.read_bytes() == second.read_bytes()


def test_the_untrained_models_score_is_on_disk_before_the_first_round(tmp_path: Path) -> None:
    recorder = RunRecorder(
        directory := RunDirectory(tmp_path / "run"),
        ProgressPrinter(ROUNDS),
        lambda _: {"accuracy": 0.25},
        story=RunStory(metric_name="accuracy", energy_budget_j={}),
        every=1,
    )
    recorder.evaluate(0, ArrayRecord())
    directory.append_event(RoundEvent(round_index=1, metrics={}, wall_s=0.1).as_json())  # then dies
    assert read_past(directory.path, done=1).initial == {"accuracy": 0.25}


@pytest.mark.long
def test_a_server_killed_for_good_is_resumed_by_another_process(
    run_app: RunApp, tmp_path: Path, undisturbed: Path
) -> None:
    values = {**TINY, **ADAM, "output-dir": str(tmp_path / "runs")}
    victim = start("tests.integration.run_process", json.dumps(values), "2", env=os.environ)
    assert victim.stdout is not None
    with victim.stdout as stdout:
        stdout.read()  # to its end
    assert victim.wait(60) == -signal.SIGKILL
    folder = tmp_path / "runs" / "run"
    assert len((folder / "events.jsonl").read_text().splitlines()) == 1
    assert not (folder / "model").exists()
    _assert_same_run(undisturbed, run_app({**ADAM, "resume": str(folder)}))


def _assert_same_run(whole: Path, resumed: Path) -> None:
    """The same trained bits, and the same story but for the seconds it took."""
    first, second = (d / "model" / "model.safetensors" for d in (whole, resumed))
    assert first.read_bytes() == second.read_bytes()
    assert _story(whole) == _story(resumed)


def _story(run_dir: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    lines = (run_dir / "events.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["rounds"] == ROUNDS and summary["status"] == "completed"
    for told in (*events, summary):
        assert told.pop("wall_s") > 0
        told.pop("evaluation_s", None)
        told.pop("bytes")  # headers differ by the digits of ports
        told["links"] = [{**k, "forward": None, "backward": None} for k in told["links"]]
    return events, summary

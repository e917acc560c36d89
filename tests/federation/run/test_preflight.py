"""A wrong run is refused before it starts: one sentence with the key and the way out."""

from __future__ import annotations

import gc
import importlib.util
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from collapipe_flwr.config.parsing import declared_config
from collapipe_flwr.config.schema import flatten, parse
from collapipe_flwr.core import errors, hub
from collapipe_flwr.core.errors import CollaPipeError, ConfigError
from collapipe_flwr.core.keys import Value
from collapipe_flwr.federation.planning import Planning
from collapipe_flwr.federation.run import running
from collapipe_flwr.federation.run.preflight import check_launch, preflight
from collapipe_flwr.federation.run.running import Attempt, launch_of
from collapipe_flwr.reporting.run_directory import RunDirectory
from collapipe_flwr.reporting.screen import Screen
from collapipe_flwr.scheduler.policies import make_scheduler
from collapipe_flwr.scheduler.protocol import Scheduler, SchedulerConfig
from tests.federation.wrong_inputs import (
    DATA,
    EXTRAS,
    FEDERATIONS,
    MODELS,
    RUNS,
    TAGGED,
    TAGS,
    TEXTS,
    write_files,
)

# datasets leaves it to the garbage collector to close a file that it could not read.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
PROJECT = Path(__file__).parents[3]
DECLARED = declared_config(PROJECT)
CHECKING = "checking run-config, data, model and plan"  # is said at once, as it takes seconds
WRONG = [
    *((TEXTS, *wrong) for wrong in (*DATA, *MODELS, *RUNS)),
    *((TAGS, *wrong) for wrong in TAGGED),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("inputs")
    write_files(path)
    yield path
    gc.collect()


@pytest.fixture(autouse=True)
def _here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


def check(values: Mapping[str, Value], **options: Any) -> str:
    config = parse({**DECLARED, "output-dir": "runs", **values})
    run_dir = Path(config.run.output_dir) / config.run.run_name if config.run.run_name else None
    return preflight(config, **{"run_dir": run_dir, **options})


def assert_one_sentence(sentence: str, key: str, way_out: str) -> None:
    assert key in sentence and way_out in sentence
    assert "\n" not in sentence and "Traceback" not in sentence and len(sentence) < 600


def test_a_model_that_learns_from_batches_as_a_whole_gets_them_uncut(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("collapipe_flwr.models.splitter.normalises_batches", lambda _: True)
    planned: list[SchedulerConfig] = []
    monkeypatch.setattr(
        Planning, "scheduler", property(lambda self: first_plan(planned, self.settings))
    )
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    check({**TEXTS, "scheduler.micro-batch-sizes": "4,8", "scheduler.micro-batches": "1,2"})
    assert {settings.batches for settings in planned} == {((4, 1), (8, 1), (16, 1))}
    (line,) = caplog.messages
    assert "whole batches, uncut, of 4 or 8 or 16 examples" in line and "\n" not in line


def first_plan(planned: list[SchedulerConfig], settings: SchedulerConfig) -> Scheduler:
    planned.append(settings)
    return make_scheduler("uniform", settings)


def test_there_are_enough_of_them() -> None:
    assert len(WRONG) + len(EXTRAS) + len(FEDERATIONS) >= 90


@pytest.mark.parametrize("good", [{}, TEXTS, TAGS], ids=["demo", "texts", "tags"])
def test_a_good_run_is_told_in_one_line(good: Mapping[str, Value]) -> None:
    assert re.fullmatch(r"\S+ of \d blocks for .* 2 clusters of 6 devices in all", check(good))


@pytest.mark.parametrize(("asked", "told"), [(5, True), (0, False), (10**6, False)])
def test_how_much_of_the_data_a_round_takes_is_told(asked: int, told: bool) -> None:
    values = {**TEXTS, "train.examples-per-round": asked}
    assert (f"training ({asked} of about " in check(values)) == told


@pytest.mark.parametrize(
    ("base", "wrong", "key", "way_out"),
    WRONG,
    ids=[" ".join(f"{k}={v}" for k, v in wrong.items()) for _, wrong, _, _ in WRONG],
)
def test_a_wrong_input_is_one_sentence_with_its_key_and_the_way_out(
    base: Mapping[str, Value],
    wrong: dict[str, Value],
    key: str,
    way_out: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    asked: list[object] = []  # nothing here may be a name on the hub
    monkeypatch.setattr(hub, "_ask", lambda *found: asked.append(found))
    before = sorted(folder.rglob("*"))
    with pytest.raises(CollaPipeError) as refusal:
        check({**base, **wrong})
    assert_one_sentence(str(refusal.value), key, way_out)
    assert sorted(folder.rglob("*")) == before  # a check writes nothing
    assert not asked and capfd.readouterr().err == ""


@pytest.mark.parametrize("closed", [True, False], ids=["without permission", "a file"])
def test_an_output_folder_that_is_none_is_told_and_not_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, closed: bool
) -> None:
    place = tmp_path / "place"
    if closed:
        place.mkdir()
        _close(place, monkeypatch)
    else:
        place.touch()
    launch = launch_of(PROJECT, output_dir=place)
    Attempt(launch, Screen(quiet=True, verbose=False))
    with pytest.raises(ConfigError) as refusal:
        check_launch(launch)
    assert_one_sentence(str(refusal.value), str(place), "choose another")


def test_an_app_without_the_keys_of_a_run_is_started_by_flwr() -> None:
    project = PROJECT / "examples" / "huggingface" / "collapipe"
    with pytest.raises(ConfigError, match=r"output-dir, run-name, train.state-dir .* `flwr run`"):
        launch_of(project)


def test_a_run_is_resumed_with_the_files_that_it_was_started_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("newest_checkpoint", "rounds_done"):
        monkeypatch.setattr(running, name, lambda _: 3)
    launch = replace(
        launch_of(PROJECT, output_dir=tmp_path),
        clusters=(tmp_path / "a.toml", tmp_path / "b.toml"),
        federation_config=tmp_path / "sim.toml",
    )
    monkeypatch.chdir(tmp_path)
    said = Attempt(launch, Screen(quiet=True, verbose=False))._way_on()
    files = "--cluster a.toml --cluster b.toml --federation-config sim.toml"
    assert f" {files} --resume {launch.run_name}`" in said


@pytest.mark.parametrize("own", ["", "state"], ids=["in the run", "elsewhere"])
def test_a_run_whose_folder_was_moved_finds_the_state_of_its_clusters(
    tmp_path: Path, own: str
) -> None:
    named = [f"train.state-dir={tmp_path / own}"] if own else []
    began = launch_of(PROJECT, named, output_dir=tmp_path / "runs")
    config = flatten(parse({**DECLARED, **began.settings}))
    RunDirectory(began.run_dir).write_config(config)
    moved = began.run_dir.rename(tmp_path / "moved")
    found = launch_of(PROJECT, resume=moved).settings["train.state-dir"]
    assert found == str(tmp_path / own if own else moved / "clusters")


def _close(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Take all rights to a folder away, also from root."""
    stat, access = os.stat, os.access

    def translate_errors(path: Any, *args: Any, **options: Any) -> os.stat_result:
        if folder in Path(str(path)).parents:
            raise PermissionError(13, "Permission denied", str(path))
        return stat(path, *args, **options)

    monkeypatch.setattr(os, "stat", translate_errors)
    monkeypatch.setattr(os, "access", lambda path, mode: path != folder and access(path, mode))


@pytest.mark.parametrize("package", EXTRAS)
def test_a_missing_extra_is_named_with_the_line_that_installs_it(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(errors, "find_spec", lambda name: None if name == package else found(name))
    wrong, name = EXTRAS[package]
    with pytest.raises(CollaPipeError) as refusal:
        check({**TEXTS, **wrong})
    way_out = package if package != "PIL" else "pillow"
    assert_one_sentence(str(refusal.value), f"the package {way_out}", f"pip install '{name}'")


HOME = """
id = "shed"
[[device]]
name = "pi"
address = "127.0.0.1:50071"
[edge]
address = "127.0.0.1:1"
[privacy]
labels = "home"
"""


def test_where_labels_stay_home_no_other_edge_is_asked_for_and_the_control_unit_needs_its_room(
    tmp_path: Path,
) -> None:
    file, values = tmp_path / "shed.toml", {**TEXTS, "clusters": 1}
    file.write_text(HOME)
    assert "1 cluster of 1 devices in all" in check(values, cluster_files=[file])
    file.write_text(HOME.replace('labels = "home"', ""))
    with pytest.raises(ConfigError, match=r"no edge at 127\.0\.0\.1:1 answers"):
        check(values, cluster_files=[file])
    file.write_text(f"{HOME}[control-unit]\nmemory-mb = 1\n")
    values["model.overrides"] = str(TEXTS["model.overrides"]).replace(
        "hidden_size=16", "hidden_size=512"
    )
    with pytest.raises(CollaPipeError, match=r"shed.*the control unit") as refusal:
        check(values, cluster_files=[file])
    assert_one_sentence(str(refusal.value), "the control unit", "add a device")


@pytest.mark.parametrize("name", FEDERATIONS)
def test_a_wrong_federation_config_is_one_sentence(name: str, folder: Path) -> None:
    with pytest.raises(CollaPipeError) as refusal:
        check(TEXTS, federation=folder / name)
    assert_one_sentence(str(refusal.value), "--federation-config", FEDERATIONS[name])


def test_a_hub_that_does_not_answer_is_given_up_soon_and_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from datasets import config as of_datasets
    from huggingface_hub import constants

    asked: list[object] = []
    for module in (constants, of_datasets):
        monkeypatch.setattr(module, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "LIMIT_S", 0.1)
    monkeypatch.setattr(hub, "_ask", lambda *found: asked.append(found))
    hub.is_reachable.cache_clear()
    try:
        for key in ("model.pretrained", "data.tokenizer", "data.train"):
            with pytest.raises(CollaPipeError) as refusal:
                check({**TEXTS, key: "nobody-has-this-name"})
            assert_one_sentence(str(refusal.value), key, "hub")
    finally:
        hub.is_reachable.cache_clear()
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("command", "arguments", "key", "way_out"),
    [
        (
            "run",
            ["-c", "data.task=classification", "-c", "data.train=nope.csv"],
            "data.train",
            "correct the path",
        ),
        pytest.param(
            "check-config",
            ["-c", "world.memory-share=0.000001"],
            "world.memory-share",
            "add a device",
            marks=pytest.mark.slow,  # which `run` starts, too
        ),
        ("run", ["--resume", "folder"], "--resume", "is not the folder of a run"),
    ],
    ids=["data", "memory", "resume"],
)
def test_the_commands_end_with_2_and_that_sentence_last(
    command: str, arguments: list[str], key: str, way_out: str, folder: Path
) -> None:
    words = [sys.executable, "-m", "collapipe_flwr.cli", command, str(PROJECT), *arguments]
    done = subprocess.run(words, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 2
    sentence = done.stderr.removeprefix(f"{CHECKING}\n").removesuffix("\n")
    assert_one_sentence(sentence, key, way_out)
    assert "completed" not in done.stdout and not (folder / "runs").exists()

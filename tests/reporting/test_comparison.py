"""Runs side by side: every metric of every run, and gaps where nothing was measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from collapipe_flwr.cli import app
from collapipe_flwr.core.errors import ConfigError, RunError
from collapipe_flwr.reporting.comparison import (
    choose_metrics,
    draw,
    draw_panels,
    read_runs,
    render_markdown,
)
from tests.full_disk import full_disk
from tests.reporting.pictures import assert_readable


def _run(folder: Path, scores: list[float], **rest: Any) -> str:
    folder.mkdir()
    summary = {
        "metric": {"name": "accuracy"},
        "wall_s": 12.3,
        "bytes": {"flower": 0, "d2d": 2_000_000, "d2e": 0},
        "peak_memory_bytes": {},
        **rest,
    }
    (folder / "summary.json").write_text(json.dumps(summary))
    _write_rounds(folder, [{"accuracy": score} for score in scores])
    return str(folder)


def _write_rounds(folder: str | Path, metrics: list[dict[str, float]]) -> None:
    rounds = ({"round_index": n, "metrics": each} for n, each in enumerate(metrics, start=1))
    lines = (json.dumps(event) + "\n" for event in rounds)
    (Path(folder) / "events.jsonl").write_text("".join(lines))


def test_runs_of_different_length_share_one_table(tmp_path: Path) -> None:
    memory = {"a/control-unit": 9_000_000, "a/1-phone": 4_000_000, "a/edge": 9_000_000}
    long = _run(tmp_path / "long", [0.1, 0.5, 0.75], peak_memory_bytes=memory)
    short = _run(tmp_path / "short", [0.1, 0.25], lost={"a": [1, 2], "b": [2]})
    lines = render_markdown(read_runs([f"long={long}", f"short={short}"])).splitlines()
    assert lines[0] == "| round | long: accuracy | short: accuracy |"
    assert lines[3] == "| 2 | 0.5000 | 0.2500 |"
    assert lines[4] == "| 3 | 0.7500 |  |"
    assert lines[-1] == "| largest device, peak MB | 4.0 |  |"
    assert "| device-to-device MB | 2.0 | 2.0 |" in lines
    assert "| rounds without a cluster |  | 2 |" in lines


def test_the_untrained_model_is_round_0(tmp_path: Path) -> None:
    run = _run(tmp_path / "run", [0.5], metric={"name": "accuracy", "initial": 0.25})
    lines = render_markdown(read_runs([f"run={run}"])).splitlines()
    assert lines[2:4] == ["| 0 | 0.2500 |", "| 1 | 0.5000 |"]


def test_metrics_can_be_chosen_and_losses_are_compared_with_the_first_run(tmp_path: Path) -> None:
    folders = [_run(tmp_path / name, [0.1, 0.2]) for name in "ab"]
    for folder, losses in zip(folders, ([3.0, 2.0], [3.5, 2.25]), strict=True):
        _write_rounds(folder, [{"loss": loss, "accuracy": 0.1} for loss in losses])
    curves = read_runs([f"a={folders[0]}", f"b={folders[1]}"])
    lines = render_markdown(curves, ["loss"]).splitlines()
    assert lines[0] == "| round | a: loss | b: loss |"
    assert "| largest difference of the loss |  | 5.0e-01 |" in lines
    with pytest.raises(ConfigError, match="no run has the metric 'f1'"):
        render_markdown(curves, ["f1"])


def test_that_runs_are_identical_is_said(tmp_path: Path) -> None:
    scores = {"a": [0.1, 0.2], "b": [0.1, 0.2], "shorter": [0.1], "other": [0.1, 0.3]}
    curves = read_runs([f"{name}={_run(tmp_path / name, s)}" for name, s in scores.items()])
    assert render_markdown(curves).splitlines()[-1].startswith("b: identical to a ")
    assert "identical" not in render_markdown([curves[0], *curves[2:]])


@pytest.mark.parametrize("source", ["no-run", "label=/nowhere/at/all"])
def test_what_is_no_run_is_refused(source: str) -> None:
    with pytest.raises(ConfigError, match=r"is not the folder of a run: it has no summary\.json"):
        read_runs([source])


def test_runs_of_another_user_are_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: Path) -> bool:
        raise PermissionError

    monkeypatch.setattr(Path, "is_file", refuse)
    with pytest.raises(ConfigError, match="its files are not for this user; run this command as"):
        read_runs([str(tmp_path)])


def test_plain_folders_are_runs_under_their_own_names(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    one, two = _run(tmp_path / "a=b", [0.1]), _run(tmp_path / "split", [0.2])
    again = _run(tmp_path / "other" / "split", [0.3])
    assert [c.name for c in read_runs([one, two])] == ["a=b", "split"]
    assert [c.name for c in read_runs([two, f"x={one}"])] == ["split", "x"]
    assert [c.name for c in read_runs([two, again])] == [two, again]


def test_the_picture_has_a_panel_for_every_metric_and_counts_whole_rounds(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    folders = [_run(tmp_path / name, [0.1, 0.2]) for name in ("a-run-with-a-long-name", "b")]
    for folder in folders:
        names = ("accuracy", "perplexity", "loss", "f1")
        _write_rounds(folder, [dict.fromkeys(names, 0.5 + index) for index in range(2)])
    curves = read_runs(folders)
    figure = draw_panels(curves, choose_metrics(curves))
    assert_readable(figure)
    panels = [axes for axes in figure.axes if axes.axison]
    assert {axes.get_title() for axes in panels} == {"accuracy", "perplexity", "loss", "f1"}
    for axes in panels:
        assert [line.get_label() for line in axes.lines] == ["a-run-with-a-long-name", "b"]
        first, last = axes.get_xlim()
        assert [tick for tick in axes.get_xticks() if first <= tick <= last] == [1, 2]
    with pytest.raises(ConfigError, match="no run has the metric 'recall'; known: accuracy, "):
        draw(curves, tmp_path / "picture.png", ["recall"])


def test_runs_that_were_never_evaluated_have_costs_but_no_picture(tmp_path: Path) -> None:
    folder = _run(tmp_path / "run", [])
    _write_rounds(folder, [{}])
    curves = read_runs([folder])
    assert "| wall-clock seconds | 12 |" in render_markdown(curves)
    with pytest.raises(ConfigError, match="no run was evaluated yet"):
        draw(curves, tmp_path / "picture.png")


def test_the_untrained_model_of_every_metric_is_known_to_newer_runs(tmp_path: Path) -> None:
    run = _run(tmp_path / "run", [0.5], untrained={"accuracy": 0.25, "loss": 3.0})
    (found,) = read_runs([run])
    assert found.untrained == {"accuracy": 0.25, "loss": 3.0}


def test_a_picture_that_cannot_be_written_is_one_sentence_and_no_half_of_one(
    tmp_path: Path,
) -> None:
    curves = read_runs([f"run={_run(tmp_path / 'run', [0.1, 0.5])}"])
    draw(curves, tmp_path / "curves.png")
    whole = (tmp_path / "curves.png").read_bytes()
    with full_disk(), pytest.raises(ConfigError, match=r"--plot .*curves\.png: cannot be written"):
        draw(curves, tmp_path / "curves.png")
    with pytest.raises(ConfigError, match=r"--plot .*/nowhere/curves\.png: cannot be written"):
        draw(curves, tmp_path / "nowhere" / "curves.png")
    for name in ("curves", "curves.bmp"):
        with pytest.raises(ConfigError, match=r"its name must end in \.png, \.pdf or"):
            draw(curves, tmp_path / name)
    assert (tmp_path / "curves.png").read_bytes() == whole
    assert {path.name for path in tmp_path.iterdir()} == {"run", "curves.png"}


def test_a_metric_that_no_run_has_ends_with_exit_code_2(tmp_path: Path) -> None:
    run = _run(tmp_path / "run", [0.1])
    done = CliRunner().invoke(app, ["compare", run, "--metrics", "nosuch"])
    assert isinstance(done.exception, ConfigError) and done.exception.exit_code == 2
    assert "accuracy" in str(done.exception) and not done.output


@pytest.mark.parametrize("command", ["compare", "report"])
def test_a_summary_that_is_no_object_is_one_sentence(tmp_path: Path, command: str) -> None:
    run = _run(tmp_path / "run", [0.1])
    (tmp_path / "run" / "summary.json").write_text("[]")
    done = CliRunner().invoke(app, [command, run])
    assert isinstance(done.exception, RunError) and done.exception.exit_code == 2
    assert "summary.json is damaged" in str(done.exception)


def test_costs_that_a_summary_does_not_know_are_empty(tmp_path: Path) -> None:
    run = _run(tmp_path / "run", [0.1])
    (tmp_path / "run" / "summary.json").write_text("{}")
    done = CliRunner().invoke(app, ["compare", run], catch_exceptions=False)
    assert "| wall-clock seconds |  |" in done.output and "| Flower MB |  |" in done.output


@pytest.mark.parametrize("command", ["compare", "report"])
@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"metric": "accuracy"}, "summary.json is damaged (metric is 'accuracy')"),
        ({"wall_s": "12"}, "summary.json is damaged (wall_s is '12')"),
        (dict.fromkeys(("metric", "bytes", "wall_s", "lost", "energy", "links")), ""),
    ],
)
def test_values_of_another_kind_are_one_sentence_and_null_is_unknown(
    tmp_path: Path, command: str, change: dict[str, Any], sentence: str
) -> None:
    run = _run(tmp_path / "run", [0.1], **change)
    done = CliRunner().invoke(app, [command, run])
    assert (sentence in str(done.exception)) if sentence else (done.exit_code == 0)


def test_runs_that_were_not_evaluated_are_said_to_be(tmp_path: Path) -> None:
    found = render_markdown(read_runs([_run(tmp_path / "run", [])]))
    assert found.startswith("No run was evaluated yet.")
    assert "largest difference" not in found


@pytest.mark.parametrize("command", ["compare", "report"])
def test_a_command_that_finds_no_run_ends_with_exit_code_2(command: str) -> None:
    done = CliRunner().invoke(app, [command, "no-run"])
    assert isinstance(done.exception, ConfigError) and done.exception.exit_code == 2

"""The run directory: lines as they come, a summary that is whole or absent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from collapipe_flwr.core.errors import ConfigError, RunError
from collapipe_flwr.reporting.console import summary_table
from collapipe_flwr.reporting.events import RoundEvent
from collapipe_flwr.reporting.output import write_json
from collapipe_flwr.reporting.run_data import RunStory
from collapipe_flwr.reporting.run_directory import (
    RunDirectory,
    read_config,
    read_events,
    read_past,
    read_pending,
    read_summary,
    read_written_summary,
    summary_stamp,
)
from tests.full_disk import full_disk
from tests.power_cuts import rebuilt, watched
from tests.reporting.made_up_runs import MadeUpRun


def _event(index: int, *, energy_j: float, memory: int, score: float | None) -> RoundEvent:
    return RoundEvent(
        round_index=index,
        plan=None,
        loss=1.0 / index,
        metrics={} if score is None else {"exact_match": score},
        predicted_latency_s=2.0,
        energy_j={"A/pi": energy_j},
        queues_j={"A/pi": 0.0},
        bytes={"d2d": 10, "d2e": 5, "flower": 1, "weights": 4, "spared": 3},
        memory_bytes={"A/pi": memory},
        wall_s=0.5,
    )


def _story() -> RunStory:
    story = RunStory(
        metric_name="exact_match",
        initial={"exact_match": 0.0},
        energy_budget_j={"A/pi": 3.0, "A/idle": 3.0},
    )
    story.add(_event(1, energy_j=4.0, memory=7, score=0.5))
    story.add(_event(2, energy_j=0.0, memory=9, score=None))
    return story


def test_summary_adds_up_bytes_averages_energy_and_keeps_peaks() -> None:
    summary = _story().summary(status="completed", wall_s=1.0)
    assert summary["bytes"] == {
        "d2d": 20,
        "d2e": 10,
        "flower": 2,
        "weights": 8,
        "spared": 6,
    }
    assert summary["energy"]["mean_j"] == {"A/pi": 2.0, "A/idle": 0.0}
    assert summary["peak_memory_bytes"] == {"A/pi": 9}
    assert summary["metric"] == {
        "name": "exact_match",
        "initial": 0.0,
        "final": 0.5,
        "curve": [0.5],
    }


def test_table_names_outcome_and_every_device() -> None:
    table = summary_table(_story().summary(status="completed", wall_s=1.0))
    cells = [str(cell) for column in table.columns for cell in column.cells]
    assert "energy A/idle" in cells
    assert "0 -> 0.5 on unseen examples" in cells


def test_events_and_summary_land_in_the_folder(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "runs" / "one")
    directory.append_event(_event(1, energy_j=1.0, memory=1, score=1.0).as_json())
    directory.append_event(_event(2, energy_j=1.0, memory=1, score=1.0).as_json())
    assert read_summary(directory.path) is None
    directory.write_summary({"status": "running"})
    directory.write_summary({"status": "completed"})
    assert [event["round_index"] for event in read_events(directory.path)] == [1, 2]
    assert read_summary(directory.path) == {"status": "completed"}
    assert sorted(p.name for p in directory.path.iterdir()) == ["events.jsonl", "summary.json"]


def test_the_summary_holds_the_last_plan_while_the_run_goes_on_and_after_it(
    tmp_path: Path,
) -> None:
    run = MadeUpRun(tmp_path / "one", clusters=4, devices=5)
    for _ in range(5):
        run.end_round()
    plans = [event["plan"] for event in read_events(run.path)]
    assert _summary_of(run)["plan"] == plans[-1]
    written = read_written_summary(run.path)
    assert written is not None and written["status"] == "running"
    run.die()
    assert _summary_of(run)["status"] == "interrupted"
    assert {**_summary_of(run), "status": "running", "reason": None} == {"reason": None, **written}


def test_what_is_no_curve_is_summed_round_by_round(tmp_path: Path) -> None:
    run = MadeUpRun(tmp_path / "one", measured=False)
    events = [run.end_round() for _ in range(5)]
    summary = run.story.summary(status="completed", wall_s=1.0)
    joules = {name: sum(e.energy_j[name] for e in events) / 5 for name in events[0].energy_j}
    assert summary["energy"]["mean_j"] == pytest.approx(joules)
    assert sum(link["forward"]["bytes"] for link in summary["links"]) == sum(
        link["forward"]["bytes"] for event in events for link in event.links
    )
    (role, *_), told = events[0].memory_bytes, summary["peak_memory_bytes"]
    assert told[role] == max(event.memory_bytes[role] for event in events)


def _summary_of(run: MadeUpRun) -> dict[str, Any]:
    summary = read_summary(run.path)
    assert summary is not None
    return summary


def test_an_existing_folder_is_never_written_into(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    with pytest.raises(ConfigError, match="exists already; choose another"):
        RunDirectory(tmp_path / "old")


def _round(index: int) -> dict[str, object]:
    return _event(index, energy_j=1.0, memory=1, score=0.5).as_json()


def test_after_every_cut_each_round_of_the_checkpoint_has_its_event_or_is_pending(
    tmp_path: Path,
) -> None:
    root = tmp_path / "disk"
    root.mkdir()
    with watched(root) as disk:
        directory = RunDirectory(root / "runs" / "one")
        directory.write_config({"run-name": "one"})
        run_id = directory.run_id
        directory.rewrite_events(())
        for index in (1, 2, 3):
            directory.write_pending(_round(index))
            disk.done = index  # the checkpoint of this round is on disk
            directory.append_event(_round(index))
            directory.write_summary({"status": "running", "wall_s": float(index)})
    for number, (done, tree) in enumerate(disk.found):
        folder = rebuilt(tree, tmp_path / str(number)) / "runs" / "one"
        if not done:
            continue
        again = RunDirectory.reopen(folder)
        assert again.run_id == run_id and read_config(folder) == {"run-name": "one"}
        past = read_past(folder, done)
        rounds = [event.round_index for event in (*past.events, past.pending) if event]
        assert rounds == list(range(1, done + 1))
        assert past.wall_s in (done - 1, done)


@pytest.mark.parametrize("tail", [b'{"round_index": 2, "lo', b"\0" * 40, b"\0" * 40 + b'": 1}\n'])
def test_what_a_power_cut_left_of_the_last_line_is_passed_over(tmp_path: Path, tail: bytes) -> None:
    directory = RunDirectory(tmp_path / "one")
    directory.append_event(_round(1))
    with (directory.path / "events.jsonl").open("ab") as file:
        file.write(tail)
    assert [event["round_index"] for event in read_events(directory.path)] == [1]


@pytest.mark.parametrize("line", [b"\xff{}", b"[]"])
def test_a_damaged_line_before_the_last_is_named(tmp_path: Path, line: bytes) -> None:
    directory = RunDirectory(tmp_path / "one")
    for index in (1, 2, 3):
        directory.append_event(_round(index))
    path = directory.path / "events.jsonl"
    first, _, last = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join((first, line, last, b"")))
    with pytest.raises(RunError, match=r"events\.jsonl, line 2: "):
        read_events(directory.path)


def test_a_full_disk_is_one_sentence_and_what_was_there_stays(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "one")
    directory.write_summary({"status": "running"})
    directory.append_event(_round(1))
    words = f"the run directory {directory.path} cannot be written"
    with full_disk():
        with pytest.raises(RunError, match=words):
            directory.write_summary({"status": "x" * 10_000})
        with pytest.raises(RunError, match=words):
            directory.append_event({"round_index": 2, "failures": "x" * 10_000})
        with pytest.raises(ConfigError, match=r"result\.json cannot be written"):
            write_json(tmp_path / "result.json", "x" * 10_000)
    assert read_summary(directory.path) == {"status": "running"}
    assert [event["round_index"] for event in read_events(directory.path)] == [1]
    assert [path.name for path in tmp_path.iterdir()] == ["one"]
    assert sorted(p.name for p in directory.path.iterdir()) == ["events.jsonl", "summary.json"]


@pytest.mark.parametrize("name", ["summary.json", "pending-round.json", "run-config.json"])
@pytest.mark.parametrize("content", [b'{"status": ', b"[]", b"null", b"1"])
def test_a_damaged_file_is_named(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(RunError, match=rf"{name} is damaged \(.*\): bring it back"):
        {"s": read_summary, "p": read_pending, "r": read_config}[name[0]](tmp_path)


def test_below_a_file_is_no_summary(tmp_path: Path) -> None:
    (tmp_path / "README.md").touch()
    assert summary_stamp(tmp_path / "README.md" / "run") is None

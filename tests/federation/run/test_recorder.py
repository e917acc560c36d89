"""The last word on a run: a report of it, and a status that nothing said afterwards changes."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path

import pytest
from flwr.app import ArrayRecord

from collapipe_flwr.core.errors import PrivacySpent
from collapipe_flwr.core.incident import Incident
from collapipe_flwr.core.measurements import ClusterMeasurement
from collapipe_flwr.core.outcome import ClusterOutcome, RoundOutcome
from collapipe_flwr.federation.round import RoundRecord
from collapipe_flwr.federation.run.recorder import RunRecorder
from collapipe_flwr.pipeline.config import NoiseConfig
from collapipe_flwr.reporting.console import ProgressPrinter
from collapipe_flwr.reporting.run_data import RunStory
from collapipe_flwr.reporting.run_directory import RunDirectory, read_summary


@pytest.fixture
def recorder(tmp_path: Path) -> RunRecorder:
    story = RunStory(
        metric_name="accuracy",
        energy_budget_j={},
        memory_limit_bytes={"attic/pi": 10**9},
        versions={"flwr": "1.41.0"},
    )
    directory = RunDirectory(tmp_path / "run")
    return RunRecorder(directory, ProgressPrinter(1), lambda _: {}, story=story, every=1)


def test_every_ending_leaves_a_report(recorder: RunRecorder, tmp_path: Path) -> None:
    report = tmp_path / "run" / "report.html"
    recorder.fail("no power in the attic")
    assert "failed: no power in the attic" in report.read_text()
    recorder.finish()
    assert "no power" not in report.read_text()


def test_a_run_that_was_stopped_has_not_failed(recorder: RunRecorder, tmp_path: Path) -> None:
    recorder.stop()
    summary = read_summary(tmp_path / "run")
    assert summary is not None
    assert (summary["status"], summary["reason"]) == ("stopped", "stopped by a signal")
    assert "stopped: stopped by a signal" in (tmp_path / "run" / "report.html").read_text()


def test_what_is_said_after_the_end_does_not_change_how_it_ended(
    recorder: RunRecorder, tmp_path: Path
) -> None:
    recorder.fail("no power")
    recorder.say("wandb did not take the last rounds")
    summary = read_summary(tmp_path / "run")
    assert summary is not None
    assert (summary["status"], summary["reason"]) == ("failed", "no power")
    assert summary["notes"] == ["wandb did not take the last rounds"]
    assert summary["memory_limit_bytes"] == {"attic/pi": 10**9}
    assert summary["versions"] == {"flwr": "1.41.0"}


@pytest.mark.parametrize(("of_others", "ends"), [(1.0, False), (3.0, True)])
def test_budgets_end_a_run_when_no_cluster_has_any_left(
    recorder: RunRecorder, of_others: float, ends: bool
) -> None:
    told = {"attic": 1e9, "cellar": of_others}  # whatever one says
    record = RoundRecord(
        server_round=1,
        plan=None,
        asked=tuple(told),
        train_metrics={},
        outcome=RoundOutcome(),
        flower_bytes_sent=0,
        flower_bytes_received=0,
        telemetry={
            name: ClusterMeasurement(
                cluster_id=name, examples=8, wall_s=1.0, losses=(), next_epsilon=epsilon
            )
            for name, epsilon in told.items()
        },
    )
    noise = NoiseConfig(clip_norm=1.0, noise_multiplier=1.0, max_epsilon=2.0)
    recorder.check_budget(noise)  # nothing is known yet
    recorder.on_round(record)
    recorder.check_budget(noise)  # the round is evaluated all the same
    recorder.evaluate(1, ArrayRecord())
    with pytest.raises(PrivacySpent, match="bring cellar to epsilon 3") if ends else nullcontext():
        recorder.check_budget(noise)


def test_an_event_says_of_what_kind_incidents_are() -> None:
    told = ClusterMeasurement(
        cluster_id="attic",
        examples=8,
        wall_s=1.0,
        losses=(1.0,),
    )
    told_by_kind = (
        Incident(kind="retry", text="all 2 clusters failed"),
        Incident(kind="lost", cluster="cellar", text="no reply"),
        Incident(kind="quarantined", cluster="attic", text="attic/nano: sent NaN"),
    )
    record = RoundRecord(
        server_round=2,
        plan=None,
        asked=("attic", "cellar"),
        train_metrics={},
        telemetry={"attic": told},
        outcome=RoundOutcome(
            clusters=(ClusterOutcome(cluster_id="attic", latency_s=1.0, energy_j={}, loss=1.5),)
        ),
        flower_bytes_sent=0,
        flower_bytes_received=0,
        incidents=told_by_kind,
    )
    event = record.event(wall_s=1.0).as_json()
    assert event["incidents"] == [asdict(each) for each in told_by_kind]
    assert event["failures"] == ["all 2 clusters failed", "cellar: no reply"]
    assert record.failures == {"cellar": "no reply"}
    assert event["clusters"]["attic"]["loss"] == 1.5

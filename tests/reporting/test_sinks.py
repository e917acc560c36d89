"""What every tool holds of a run afterwards, read back by the tool's own library."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

import pytest

from collapipe_flwr import Sinks
from collapipe_flwr.config.schema import SINKS
from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.reporting import sinks as kinds
from collapipe_flwr.reporting.events import KINDS, RoundEvent
from collapipe_flwr.reporting.sinks import Scalar, scalars
from tests.full_disk import full_disk

SETTINGS = {"seed": 7, "train.learning-rate": 0.002, "model.type": "bert"}
PLAN = {
    "clusters": [
        {
            "cluster_id": "attic",
            "segments": [
                {"device_id": "attic/pi-1", "first_block": 0, "stop_block": 2},
                {
                    "device_id": "attic/pi-2",
                    "first_block": 2,
                    "stop_block": 6,
                    "replicas": ["attic/pi-3"],
                },
            ],
        }
    ]
}
UNTRAINED = RoundEvent(round_index=0, wall_s=0.0, metrics={"accuracy": 0.1})


def event(index: int, *, loss: float | None = None) -> RoundEvent:
    return RoundEvent(
        round_index=index,
        wall_s=3.0,
        metrics={"accuracy": index / 8},
        loss=1.0 / index if loss is None else loss,
        plan=PLAN,
        latency_s=2.0,
        clusters={"attic": {"latency_s": 2.0, "predicted_s": None}},
        energy_j={"attic/pi-1": 4.0},
        bytes={**dict.fromkeys(KINDS, 0), "d2d": 10},
    )


def run(names: str, folder: Path, *events: RoundEvent, status: str = "completed") -> list[str]:
    """Write events as one process of a run does; what it was warned of."""
    warnings: list[str] = []
    sinks = Sinks(names, folder, settings=SETTINGS, metrics_address="0", warn=warnings.append)
    for each in events:
        sinks.write(each)
    sinks.close(status)
    return warnings


def make_run_id(folder: Path) -> None:
    Sinks("prometheus", folder, metrics_address="0").close()


def test_a_round_is_what_is_known_of_it_under_one_naming_scheme() -> None:
    found = {scalar.path: scalar.value for scalar in scalars(event(2))}
    assert found == {
        "test/accuracy": 0.25,
        "train/loss": 0.5,
        "time/wall_seconds": 3.0,
        "time/evaluation_seconds": 0.0,
        "time/round_seconds": 2.0,
        "traffic/d2d_bytes": 10,
        "traffic/d2e_bytes": 0,
        "traffic/flower_bytes": 0,
        "traffic/weights_bytes": 0,
        "traffic/spared_bytes": 0,
        "run/failures": 0,
        "run/lost_clusters": 0,
        "cluster/round_seconds/attic": 2.0,
        "device/energy_joules/attic/pi-1": 4.0,
        "device/blocks/attic/pi-1": 2,
        "device/blocks/attic/pi-2": 4,
        "device/blocks/attic/pi-3": 4,
    }
    assert [scalar.path for scalar in scalars(UNTRAINED)] == ["test/accuracy"]


def test_every_sink_of_the_schema_is_there() -> None:
    assert tuple(kinds.KINDS) == SINKS


def test_a_sink_that_is_unknown_or_not_installed_is_refused_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="no sink is called 'tensorbord'; there are tensorboard"):
        Sinks("tensorbord", tmp_path)
    monkeypatch.setitem(kinds.KINDS, "mlflow", (kinds.MLflow, "no_such_package"))
    with pytest.raises(ConfigError, match=r"pip install 'collapipe-flwr\[mlflow\]'"):
        Sinks("mlflow", tmp_path)
    assert not list(tmp_path.iterdir())


# TensorBoard


def tensorboard_scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    accumulator.Reload()
    tags = accumulator.Tags()["scalars"]
    return {tag: [(e.step, e.value) for e in accumulator.Scalars(tag)] for tag in tags}


def test_tensorboard_goes_on_where_a_resumed_run_does(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    # The first process dies after round 3, whose checkpoint was not written.
    assert run("tensorboard", folder, UNTRAINED, event(1), event(2), event(3, loss=9.0)) == []
    assert run("tensorboard", folder, event(3), event(4)) == []
    found = tensorboard_scalars(folder)
    assert [step for step, _ in found["test/accuracy"]] == [0, 1, 2, 3, 4]
    assert found["train/loss"] == [(1, 1.0), (2, 0.5), (3, pytest.approx(1 / 3)), (4, 0.25)]
    assert found["device/energy_joules/attic/pi-1"] == [(n, 4.0) for n in (1, 2, 3, 4)]


def test_tensorboard_shows_the_settings_as_hyperparameters(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams import metadata, plugin_data_pb2

    run("tensorboard", tmp_path / "run", event(1))
    accumulator = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    accumulator.Reload()
    content = accumulator.SummaryMetadata(metadata.SESSION_START_INFO_TAG).plugin_data.content
    started = plugin_data_pb2.HParamsPluginData.FromString(content).session_start_info
    assert {name: str(value) for name, value in started.hparams.items()}.keys() == SETTINGS.keys()
    assert started.hparams["model.type"].string_value == "bert"


# tensorboard's own thread ends by it, too
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_full_disk_is_told_once_and_ends_nothing(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    make_run_id(tmp_path / "run")
    with full_disk(16):
        warnings = run("tensorboard", tmp_path / "run", event(1), event(2), event(3))
    assert len(warnings) == 1
    assert warnings[0].startswith("reporting.sinks: tensorboard misses rounds (OSError")
    assert run("tensorboard", tmp_path / "run", event(4)) == []
    assert [step for step, _ in tensorboard_scalars(tmp_path / "run")["train/loss"]] == [4]


# MLflow


@pytest.fixture
def mlflow_here(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("mlflow_here")
@pytest.mark.filterwarnings("ignore")  # of its own libraries
def test_mlflow_has_one_run_however_often_it_is_resumed(tmp_path: Path) -> None:
    from mlflow import MlflowClient

    folder = tmp_path / "run"
    assert run("mlflow", folder, UNTRAINED, event(1), event(2), status="failed") == []
    (folder / "report.html").write_text("<html></html>")
    assert run("mlflow", folder, event(2), event(3)) == []
    client = MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("collapipe")
    (found,) = client.search_runs([experiment.experiment_id])
    assert found.info.run_name == "run"
    assert found.info.status == "FINISHED"
    assert found.data.params == {key: str(value) for key, value in SETTINGS.items()}
    losses = client.get_metric_history(found.info.run_id, "train/loss")
    assert [(m.step, m.value) for m in losses] == [(1, 1.0), (2, 0.5), (3, pytest.approx(1 / 3))]
    scores = client.get_metric_history(found.info.run_id, "test/accuracy")
    assert [m.step for m in scores] == [0, 1, 2, 3]
    assert found.data.metrics["device/blocks/attic/pi-2"] == 4
    assert [file.path for file in client.list_artifacts(found.info.run_id)] == ["report.html"]


@pytest.mark.usefixtures("mlflow_here")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("status", "word"), [("completed", "FINISHED"), ("failed", "FAILED"), ("stopped", "KILLED")]
)
def test_mlflow_tells_an_ending_in_its_own_word(tmp_path: Path, status: str, word: str) -> None:
    from mlflow import MlflowClient

    assert run("mlflow", tmp_path / "run", event(1), status=status) == []
    client = MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("collapipe")
    (found,) = client.search_runs([experiment.experiment_id])
    assert found.info.status == word


@pytest.mark.usefixtures("mlflow_here")
@pytest.mark.filterwarnings("ignore")
def test_a_server_that_is_away_is_told_once_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:1")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    warnings = run("mlflow", tmp_path / "run", event(1), event(2))
    assert len(warnings) == 1
    assert warnings[0].startswith("reporting.sinks: mlflow misses rounds (MlflowException")


# Weights & Biases


def wandb_records(path: Path) -> Iterator[Any]:
    """The records of an offline file: LevelDB's log format around W&B's own messages."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, place, piece = path.read_bytes(), 7, b""
    while place + 7 <= len(data):
        if 2**15 - place % 2**15 < 7:  # a block ends with less than a header
            place += 2**15 - place % 2**15
            continue
        _, size, kind = struct.unpack("<IHB", data[place : place + 7])
        piece += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield Record.FromString(piece)
            piece = b""


@pytest.mark.filterwarnings("ignore")
def test_wandb_keeps_the_run_offline_and_goes_on_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    for name in ("WANDB_MODE", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    folder = tmp_path / "run"
    assert run("wandb", folder, UNTRAINED, event(1), status="failed") == []
    (folder / "report.html").write_text("<html></html>")
    assert run("wandb", folder, event(2)) == []
    files = sorted(folder.glob("wandb/offline-run-*/*.wandb"))
    records = [[*wandb_records(path)] for path in files]
    begun = [r.run for part in records for r in part if r.WhichOneof("record_type") == "run"]
    assert {r.run_id for r in begun} == {(folder / "run-id").read_text()}
    assert {(r.project, r.display_name) for r in begun} == {("collapipe", "run")}
    settings = {u.key: json.loads(u.value_json) for u in begun[0].config.update}
    assert settings.items() >= SETTINGS.items()
    rows = [r.history for part in records for r in part if r.WhichOneof("record_type") == "history"]
    losses = {
        row.step.num: json.loads(item.value_json)
        for row in rows
        for item in row.item
        if "train/loss" in (item.key, *item.nested_key)
    }
    assert [row.step.num for row in rows] == [0, 1, 2]
    assert losses == {1: 1.0, 2: 0.5}
    assert [r.exit.exit_code for part in records for r in part if r.HasField("exit")] == [1, 0]
    assert [*folder.glob("wandb/offline-run-*/files/report.html")]


# Prometheus


def test_prometheus_scrapes_the_last_round_until_the_run_ends(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    from prometheus_client.openmetrics.parser import text_string_to_metric_families

    watched = kinds.WatchedRun(folder=tmp_path / "run", run_id="abc", metrics_address="0")
    sink = kinds.Prometheus(watched, 1)
    sink.write(1, scalars(event(1)))
    sink.write(2, scalars(event(2)))
    sink.write(2, [Scalar(name="ours", value=7.0)])
    wanted = Request(f"http://{sink.address}/metrics")
    wanted.add_header("Accept", "application/openmetrics-text; version=1.0.0")
    with urlopen(wanted, timeout=30) as answer:
        assert "openmetrics" in answer.headers["Content-Type"]
        families = [*text_string_to_metric_families(answer.read().decode())]
    found = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }
    assert found["collapipe_round",] == 2
    assert found["collapipe_train_loss",] == 0.5
    assert found["collapipe_ours",] == 7.0
    assert found["collapipe_run_info", ("id", "abc"), ("name", "run")] == 1
    device = (("cluster", "attic"), ("device", "pi-3"))
    assert found["collapipe_device_blocks", *device] == 4
    sink.close("completed", ())
    with pytest.raises(URLError):
        urlopen(wanted, timeout=30)

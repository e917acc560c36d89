"""Where the numbers of a run can go besides its folder: one class for each tool.

A sink is opened with the first round that it is to hold, and told which run it is: a run that is
resumed, or a tool that was away, is opened again and goes on where it was. Each is fed by a thread
of its own (`Feeder`), so that no tool can slow or end a run.

All have one naming scheme. A name is a path such as ``train/loss``. Numbers of a cluster or device
also have labels: ``device/energy_joules`` with ``cluster="attic"`` and ``device="pi-1"``. Tools
without labels get them at the end of the path, ``device/energy_joules/attic/pi-1``;
docs/monitoring.md lists all.
"""

from __future__ import annotations

import os
import queue
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from collapipe_flwr.config.schema import METRICS_ADDRESS
from collapipe_flwr.core.errors import ConfigError, require
from collapipe_flwr.host.metrics import MetricsServer
from collapipe_flwr.reporting.events import RoundEvent, holders

PROJECT = "collapipe"  # in W&B, and as experiment in MLflow, unless the environment names another
_ROUND = "run/round"  # in MLflow: the last round that is whole there
_MOST_METRICS, _MOST_PARAMETERS, _LONGEST_PARAMETER = 1000, 100, 6000  # of MLflow
_ENDINGS = {"completed": "FINISHED", "stopped": "KILLED"}  # as MLflow calls them; others: FAILED
_NOT_IN_MLFLOW = re.compile(r"[^\w\-. /]")
_NOT_IN_PROMETHEUS = re.compile(r"\W")


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedRun:
    """A run as sinks know it: its folder, the id by which they recognise it, its settings."""

    folder: Path
    run_id: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    metrics_address: str = METRICS_ADDRESS  # where Prometheus finds it

    @property
    def name(self) -> str:
        return self.folder.name


class Sink(Protocol):
    """An open connection to a tool."""

    def write(self, step: int, values: Sequence[Scalar]) -> None:
        """Store the numbers of a round; they are stored when this returns."""

    def close(self, status: str, artefacts: Iterable[Path]) -> None:
        """End the run with a status, "completed", "stopped" or another, and its files."""


class TensorBoard:
    """Event files in ``FOLDER/tensorboard``, by torch's own writer."""

    def __init__(self, run: WatchedRun, first: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._settings = run.settings
        # Rounds from `first` on that an earlier process wrote count no more.
        self._writer = SummaryWriter(run.folder / "tensorboard", purge_step=first)

    def write(self, step: int, values: Sequence[Scalar]) -> None:
        if self._settings:
            self._write_settings({v.path: 0 for v in values if not v.labels})
        for value in values:
            self._writer.add_scalar(value.path, value.value, step)
        self._writer.flush()

    def close(self, status: str, artefacts: Iterable[Path]) -> None:
        del status, artefacts
        self._writer.close()

    def _write_settings(self, metrics: dict[str, int]) -> None:
        """Write the tab HPARAMS; `add_hparams` would make another run of it."""
        from torch.utils.tensorboard.summary import hparams

        for summary in hparams(dict(self._settings), metrics):
            self._writer.file_writer.add_summary(summary)
        self._settings = {}


class WeightsAndBiases:
    """A run of W&B in ``FOLDER/wandb``; it stays there unless the environment says otherwise."""

    def __init__(self, run: WatchedRun, first: int) -> None:
        import wandb

        del first
        self._run = wandb.init(
            mode=os.environ.get("WANDB_MODE", "offline"),
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            dir=run.folder,
            id=run.run_id,
            name=run.name,
            resume="allow",
            config=dict(run.settings),
            settings=wandb.Settings(silent=True, console="off", save_code=False),
        )

    def write(self, step: int, values: Sequence[Scalar]) -> None:
        self._run.log({value.path: value.value for value in values}, step=step)

    def close(self, status: str, artefacts: Iterable[Path]) -> None:
        for path in artefacts:
            self._run.save(path, base_path=path.parent, policy="now")
        self._run.finish(exit_code=0 if status == "completed" else 1)


class MLflow:
    """A run in ``mlflow.db`` beside the folder, or on the server that the environment names."""

    def __init__(self, run: WatchedRun, first: int) -> None:
        from mlflow import MlflowClient

        del first
        store = run.folder.parent
        uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{store / 'mlflow.db'}"
        self._client = MlflowClient(uri)
        known = self._find_run(run, None if "MLFLOW_TRACKING_URI" in os.environ else store)
        self._id = known.info.run_id
        self._client.update_run(self._id, status="RUNNING")
        self._last = int(known.data.metrics.get(_ROUND, -1))
        self._write_settings({k: v for k, v in run.settings.items() if k not in known.data.params})

    def _find_run(self, run: WatchedRun, store: Path | None) -> Any:
        """Find the run by its id, or create it."""
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        found = self._client.get_experiment_by_name(name)
        place = None if store is None else (store / "mlflow-artefacts").as_uri()
        experiment = found.experiment_id if found else self._client.create_experiment(name, place)
        tag = "collapipe.run-id"
        before = self._client.search_runs([experiment], f"tags.`{tag}` = '{run.run_id}'")
        return (
            before[0]
            if before
            else self._client.create_run(experiment, tags={tag: run.run_id}, run_name=run.name)
        )

    def _write_settings(self, settings: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        params = [Param(key, str(value)[:_LONGEST_PARAMETER]) for key, value in settings.items()]
        for begin in range(0, len(params), _MOST_PARAMETERS):
            self._client.log_batch(self._id, params=params[begin : begin + _MOST_PARAMETERS])

    def write(self, step: int, values: Sequence[Scalar]) -> None:
        from mlflow.entities import Metric

        if step <= self._last:  # an earlier process wrote it, and was to train it again
            return
        now_ms = int(1000 * time.time())
        named = {_NOT_IN_MLFLOW.sub("_", value.path): value.value for value in values}
        metrics = [Metric(name, value, now_ms, step) for name, value in named.items()]
        metrics.append(Metric(_ROUND, float(step), now_ms, step))
        for begin in range(0, len(metrics), _MOST_METRICS):
            self._client.log_batch(self._id, metrics=metrics[begin : begin + _MOST_METRICS])

    def close(self, status: str, artefacts: Iterable[Path]) -> None:
        for path in artefacts:
            self._client.log_artifact(self._id, str(path))
        self._client.set_terminated(self._id, _ENDINGS.get(status, "FAILED"))


class Prometheus:
    """Serves the last round to scrapes while the run lasts."""

    def __init__(self, run: WatchedRun, first: int) -> None:
        self._run, self._round = run, first
        self._values: dict[str, Scalar] = {}
        self._server = MetricsServer(run.metrics_address, self)
        self.address = self._server.address

    def write(self, step: int, values: Sequence[Scalar]) -> None:
        kept = self._values if step == self._round else {}  # with numbers of the user's own
        self._round, self._values = step, {**kept, **{value.path: value for value in values}}

    def close(self, status: str, artefacts: Iterable[Path]) -> None:
        del status, artefacts
        self._server.close()

    def collect(self) -> Iterator[Any]:
        """Yield the metrics; prometheus_client asks for them at every scrape."""
        from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily

        known = {"name": self._run.name, "id": self._run.run_id}
        yield InfoMetricFamily("collapipe_run", "The run that this is.", known)
        yield GaugeMetricFamily("collapipe_round", "The last round that ended.", self._round)
        families: dict[str, Any] = {}
        for value in self._values.values():
            name = "collapipe_" + _NOT_IN_PROMETHEUS.sub("_", value.name)
            if name not in families:
                words = f"{value.name} of the last round."
                families[name] = GaugeMetricFamily(name, words, labels=tuple(value.labels))
            families[name].add_metric(tuple(value.labels.values()), value.value)
        yield from families.values()


# By name, which is also that of the extra: its class, and a module of the package that it needs.
KINDS: dict[str, tuple[Callable[[WatchedRun, int], Sink], str]] = {
    "tensorboard": (TensorBoard, "tensorboard"),
    "wandb": (WeightsAndBiases, "wandb"),
    "mlflow": (MLflow, "mlflow"),
    "prometheus": (Prometheus, "prometheus_client"),
}


def check_sinks(names: Iterable[str]) -> None:
    """Raise ConfigError for an unknown sink, or one whose package is not installed."""
    for name in names:
        if name not in KINDS:
            raise ConfigError(f"no sink is called {name!r}; there are {', '.join(KINDS)}")
        require(KINDS[name][1], name)


class Feeder:
    """Writes rounds to one sink in order; those that failed are retried with the next round.

    ``open_`` is called with the first round that the sink is to hold.
    """

    def __init__(self, name: str, open_: Callable[[int], Sink]) -> None:
        self._name, self._open = name, open_
        self._sink: Sink | None = None
        self._problem, self._told = "", False
        self._waiting: deque[tuple[int, Sequence[Scalar]]] = deque()
        self._end: tuple[str, Sequence[Path]] = ("", ())
        # Rounds; None says that the run has ended.
        self._inbox: queue.SimpleQueue[tuple[int, Sequence[Scalar]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._feed, name=f"sink-{name}", daemon=True)
        self._thread.start()

    def write(self, step: int, values: Sequence[Scalar]) -> None:
        """Queue a round; returns at once."""
        self._inbox.put((step, values))

    def end(self, status: str, artefacts: Sequence[Path]) -> None:
        """Queue the end of the run."""
        self._end = status, artefacts
        self._inbox.put(None)

    def wait(self, within_s: float) -> None:
        """Wait after :meth:`end` until the sink has everything, at most this long."""
        self._thread.join(within_s)
        if self._thread.is_alive():
            self._blame("it took too long")

    def take_problem(self) -> str:
        """Return the first failure as a sentence, once; empty if none is new."""
        if self._told or not self._problem:
            return ""
        self._told = True
        return self._problem

    def _feed(self) -> None:
        while True:
            item = self._inbox.get()
            # Third-party tools may raise anything, which must not end the run.
            try:
                self._take(item)
            except Exception as error:
                self._sink = None
                self._blame(f"{type(error).__name__}: {error}", for_good=item is None)
            if item is None:
                return

    def _take(self, item: tuple[int, Sequence[Scalar]] | None) -> None:
        if item is not None:
            self._waiting.append(item)
        while self._waiting:
            step, values = self._waiting[0]
            self._sink = self._sink or self._open(step)
            self._sink.write(step, values)
            self._waiting.popleft()
        if item is None and self._sink is not None:
            self._sink.close(*self._end)

    def _blame(self, why: str, *, for_good: bool = False) -> None:
        why = why.strip().splitlines()[0]
        if for_good:
            words, self._told = f"misses the end of the run ({why})", False
            if self._waiting:
                words = f"misses rounds ({why}) up to the end of the run"
        elif self._problem:
            return
        else:
            words = f"misses rounds ({why}); they are tried again"
        self._problem = f"reporting.sinks: {self._name} {words}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scalar:
    """One number of one round."""

    name: str
    value: float
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def path(self) -> str:
        """The name with the labels behind it."""
        return "/".join((self.name, *self.labels.values()))


def scalars(event: RoundEvent) -> list[Scalar]:
    """Return every known number of a round; round 0 has only the untrained model's scores."""
    found = [Scalar(name=f"test/{name}", value=value) for name, value in event.metrics.items()]
    if event.round_index:
        found += _of_training(event)
        found += _of_clusters(event)
        found += _of_devices(event)
    return found


def _of_training(event: RoundEvent) -> Iterator[Scalar]:
    values = {
        "train/loss": event.loss,
        "train/prequential_loss": event.prequential_loss,
        "train/fresh_examples": event.fresh_examples if event.prequential_loss else None,
        "clusters/loss": event.clusters_loss,
        **{f"clusters/{name}": value for name, value in event.clusters_metrics.items()},
        "time/wall_seconds": event.wall_s,
        "time/evaluation_seconds": event.evaluation_s,
        "time/round_seconds": event.latency_s,
        "time/predicted_seconds": event.predicted_latency_s,
        **{f"traffic/{name}_bytes": count for name, count in event.bytes.items()},
        "run/failures": len(event.failures),
        "run/lost_clusters": len(event.lost),
    }
    for name, value in values.items():
        if value is not None:
            yield Scalar(name=name, value=float(value))


def _of_clusters(event: RoundEvent) -> Iterator[Scalar]:
    names = {"round_seconds": "latency_s", "predicted_seconds": "predicted_s"}
    for cluster_id, told in event.clusters.items():
        for name, key in names.items():
            if told.get(key) is not None:
                labels = {"cluster": cluster_id}
                yield Scalar(name=f"cluster/{name}", value=float(told[key]), labels=labels)


def _of_devices(event: RoundEvent) -> Iterator[Scalar]:
    values: dict[str, Mapping[str, float]] = {
        "energy_joules": event.energy_j,
        "queue_joules": event.queues_j,
        "peak_memory_bytes": event.memory_bytes,
        "blocks": _planned_blocks(event.plan or {}),
    }
    for name, by_device in values.items():
        for key, value in by_device.items():
            cluster_id, _, device = key.rpartition("/")
            labels = {"cluster": cluster_id, "device": device}
            yield Scalar(name=f"device/{name}", value=float(value), labels=labels)


def _planned_blocks(plan: Mapping[str, Any]) -> dict[str, float]:
    """Count the blocks that each device of the plan holds."""
    return {
        device: segment["stop_block"] - segment["first_block"]
        for cluster in plan.get("clusters", ())
        for segment in cluster["segments"]
        for device in holders(segment)
    }

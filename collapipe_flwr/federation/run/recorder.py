"""Turns what the strategy reports and the evaluation finds into events, lines and the summary."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from flwr.app import ArrayRecord, MetricRecord
from torch import Tensor

from collapipe_flwr.config.schema import AppConfig, flatten, parse
from collapipe_flwr.core.errors import ConfigError, RunError
from collapipe_flwr.federation.arrays import decode_tensors
from collapipe_flwr.federation.checkpoint import Checkpoints
from collapipe_flwr.federation.privacy_account import check_budget
from collapipe_flwr.federation.round import RoundRecord
from collapipe_flwr.federation.run.sinks import Sinks
from collapipe_flwr.pipeline.config import NoiseConfig
from collapipe_flwr.pipeline.meter import write_trace
from collapipe_flwr.reporting.console import ProgressPrinter
from collapipe_flwr.reporting.events import RoundEvent
from collapipe_flwr.reporting.progress import Look, ProgressFile
from collapipe_flwr.reporting.report.page import write_closing_report
from collapipe_flwr.reporting.run_data import RunStory
from collapipe_flwr.reporting.run_directory import (
    Past,
    RunDirectory,
    is_new,
    read_config,
    read_past,
    read_summary,
    rounds_done,
)
from collapipe_flwr.reporting.run_lock import SERVER, check_not_written, hold_lock, note_process

log = logging.getLogger("flwr.collapipe")
_FAILED_S = 5.0  # for sinks to take the last rounds of a run that is not completed
Evaluate = Callable[[Mapping[str, Tensor]], dict[str, float]]


class RunRecorder:
    """Keeps one run's directory up to date.

    The strategy calls :meth:`on_round` when a round's replies are in and :meth:`evaluate` right
    after; the two make one event, which also goes to the ``sinks``. ``past`` holds the finished
    rounds of a resumed run, ``paced`` says whether senders keep to planned rates, and ``lost``
    returns the clusters that the last training lost.
    """

    def __init__(
        self,
        directory: RunDirectory,
        printer: ProgressPrinter,
        evaluate: Evaluate,
        *,
        story: RunStory,
        every: int,
        past: Past | None = None,
        paced: bool = False,
        lost: Callable[[], Collection[str]] = tuple,
        sinks: Sinks | None = None,
        progress: ProgressFile | None = None,
    ) -> None:
        self._status: tuple[str, str | None] = ("running", None)  # status and reason
        self._sinks = sinks or Sinks((), directory.path)
        self._sinks.warn = self.say
        self._paced, self._lost = paced, lost
        self._progress = progress or ProgressFile(None)
        self.training: Look | None = None  # says how far clusters are in a round
        self.testing: Look | None = None  # and how far the evaluation is
        past = past or Past()
        self.story = replace(story, initial=past.initial, notes=past.notes)
        for event in past.events:
            self.story.add(event)
        self._last = past.events[-1] if past.events else None
        self.weights: Mapping[str, Tensor] | None = None  # of the last round
        self._directory = directory
        self._printer = printer
        self._evaluate = evaluate
        self._every = every
        self._pending = past.pending  # the round that is not evaluated yet
        self._clusters: Mapping[str, float] = {}
        self._next_epsilon: dict[str, float] = {}  # by cluster
        self._started_s = self._round_started_s = time.monotonic() - past.wall_s
        if past.pending is not None:
            self._round_started_s = time.monotonic() - past.pending.wall_s
        directory.rewrite_events(event.as_json() for event in past.events)
        self._save("running")

    def say(self, sentence: str) -> None:
        """Print a note on the run, and keep it in the summary."""
        if sentence not in self.story.notes:
            self.story.notes += (sentence,)
        self._save(*self._status)
        self._printer.say(sentence)

    def on_round(self, record: RoundRecord) -> None:
        """Keep a round until it is evaluated."""
        event = record.event(time.monotonic() - self._round_started_s, paced=self._paced)
        lost, expected_s = self._names({*record.failures}), self.story.expected_wall_s(event)
        self._pending = replace(event, lost=lost, predicted_wall_s=expected_s)
        self._directory.write_pending(self._pending.as_json())
        self._next_epsilon |= {
            name: measured.next_epsilon
            for name, measured in record.telemetry.items()
            if measured.next_epsilon is not None
        }
        timelines = {name: measured.timeline for name, measured in record.telemetry.items()}
        if any(timelines.values()):
            write_trace(self._directory.timeline_path(record.server_round), timelines)

    def check_budget(self, noise: NoiseConfig) -> None:
        """Raise PrivacySpent if no cluster's budget may allow another round.

        One that has spent its own refuses by itself, and the others go on. A round that was trained
        is evaluated all the same.
        """
        if self._pending is not None or not self._next_epsilon:
            return
        cluster, least = min(self._next_epsilon.items(), key=lambda each: each[1])
        check_budget(noise, least, cluster)

    def on_clusters(self, metrics: Mapping[str, float]) -> None:
        """Keep the metrics that the clusters computed on their shares of the test set."""
        self._clusters = metrics

    def evaluate(self, server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        """Flower's ``evaluate_fn``; round 0 is the untrained model.

        A resumed run is asked again for the round of its checkpoint.
        """
        found = self._evaluated(server_round, arrays)
        if server_round != self.story.rounds_asked:
            self._progress.enter("training", round_index=server_round + 1, look=self.training)
        return found

    def _evaluated(self, server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        weights = decode_tensors(arrays)
        if self._last is not None and self._last.round_index == server_round:
            self.weights, self._round_started_s = weights, time.monotonic()
            return _metric_record(self._last.metrics)
        last = server_round == self.story.rounds_asked  # whose model is saved
        due = server_round % self._every == 0 or server_round <= 1 or last
        started_s = time.monotonic()
        if due:
            self._progress.enter(
                "evaluating" if server_round else "evaluating the untrained model",
                round_index=server_round,
                look=self.testing,
            )
        metrics = self._evaluate(weights) if due else {}
        if server_round == 0:
            self.story.initial = metrics
            self._round_started_s = time.monotonic()
            self._save("running")  # a resumed run cannot evaluate it again
            self._printer.show_untrained(metrics)
            self._sinks.write(RoundEvent(round_index=0, metrics=metrics, wall_s=0.0))
        else:
            self.weights = weights
            self._finish_round(server_round, metrics, time.monotonic() - started_s)
        return _metric_record(metrics)

    def fail(self, reason: str) -> None:
        """Write the final summary and report of a run that failed."""
        self._end("failed", reason)

    def stop(self) -> None:
        """Write the final summary and report of a run that was stopped by a signal."""
        self._end("stopped", "stopped by a signal")

    def _end(self, status: str, reason: str) -> None:
        self._save(status, reason)
        self._report(hasty=True)
        self._sinks.close(status, within_s=_FAILED_S)

    def finish(self, *, early: str = "") -> None:
        """Write the final summary and report; raises RunError if rounds are missing.

        ``early`` says why a run ends before its last round, as it should.
        """
        if early:
            self.say(early)
        done, asked = len(self.story.data.rounds), self.story.rounds_asked
        if asked is not None and done < asked and not early:
            raise RunError(f"only {done} of {asked} rounds were done")
        if never := self.story.never_trained:
            log.warning("every round went on without %s: never trained", ", ".join(never))
        self._save("completed")
        self._report()
        self._sinks.close()

    def _report(self, *, hasty: bool = False) -> None:
        self._progress.enter("writing the report")
        log.info("%s", write_closing_report(self._directory.path, hasty=hasty))

    def _finish_round(
        self, server_round: int, metrics: Mapping[str, float], evaluation_s: float
    ) -> None:
        now_s = time.monotonic()
        event = replace(
            self._pending
            or RoundEvent(round_index=server_round, metrics={}, wall_s=0.0, lost=self._names()),
            round_index=server_round,
            metrics=metrics,
            clusters_loss=self._clusters.get("loss"),
            clusters_metrics={k: v for k, v in self._clusters.items() if k != "loss"},
            wall_s=now_s - self._round_started_s,
            evaluation_s=evaluation_s,
        )
        self._round_started_s, self._pending, self._clusters = now_s, None, {}
        self._last = event
        self.story.add(event)
        self._directory.append_event(event.as_json())
        self._save("running")
        self._printer.show(event)
        self._sinks.write(event)

    def _names(self, failed: Collection[str] = ()) -> tuple[str, ...]:
        return tuple(sorted({*self._lost(), *failed}))

    def _save(self, status: str, reason: str | None = None) -> None:
        self._status = (status, reason)
        wall_s = time.monotonic() - self._started_s
        summary = self.story.summary(status=status, wall_s=wall_s, reason=reason)
        self._directory.write_summary(summary)


def _metric_record(metrics: Mapping[str, float]) -> MetricRecord | None:
    return MetricRecord(dict(metrics)) if metrics else None


# What a resumed run may change: none of these alters a round that is done or its data.
_ROUNDS = "num-server-rounds"  # free where the learning rate does not depend on it
_FREE = (
    _ROUNDS,
    "output-dir",
    "run-name",
    "resume",
    "checkpoint-every",
    "round-slack",
    "round-late",
    "round-retries",
    "train.state-dir",
    "reporting.sinks",
    "reporting.metrics",
)
_FREE_ENDS = (
    "timeout-s",
    "edge.heartbeat-s",
    "edge.heartbeat-misses",
    "edge.address",
    "evaluation.every",
    "evaluation.batch-size",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFolder:
    """The run's directory, its checkpoints (None: it has none), and its past rounds."""

    directory: RunDirectory
    checkpoints: Checkpoints | None
    past: Past = field(default_factory=Past)


def prepared_folder(config: AppConfig) -> Path | None:
    """Find the directory of a run that is about to begin, if it exists already."""
    if config.run.resume:
        path = Path(config.run.resume).resolve()
        return path if read_config(path) is not None else None
    path = Path(config.run.output_dir).resolve() / config.run.run_name
    return path if config.run.run_name and path.is_dir() and is_new(path) else None


def open_run(config: AppConfig, lock: ExitStack) -> RunFolder:
    """Create or reopen the directory, which ``lock`` marks as being written (`run_lock`).

    Raises ConfigError for another run's run-config.
    """
    if config.run.resume:
        path = Path(config.run.resume).resolve()
        directory, checkpoints = check_resumable(config, path)
        lock.enter_context(hold_lock(path))
        lock.enter_context(note_process(path, SERVER))
        past = read_past(path, checkpoints.newest_round())
        return RunFolder(directory=directory, checkpoints=checkpoints, past=past)
    name = config.run.run_name or time.strftime("%Y%m%d-%H%M%S")
    path = Path(config.run.output_dir).resolve() / name
    directory = RunDirectory(path, numbered=not config.run.run_name)
    directory.write_config(flatten(config), lock)
    lock.enter_context(note_process(directory.path, SERVER))
    return RunFolder(directory=directory, checkpoints=_checkpoints(config, directory))


def check_resumable(config: AppConfig, path: Path) -> tuple[RunDirectory, Checkpoints]:
    """Check that a run can be resumed; return its directory and checkpoints. Raises ConfigError.

    A run that died before its first checkpoint begins again.
    """
    directory = RunDirectory.reopen(path)
    check_not_written(path)
    check_same_run(config, path)
    checkpoints = _checkpoints(config, directory)
    if checkpoints is None:
        raise ConfigError(
            f"checkpoint-every is 0, but only a run with checkpoints can go on: resume {path} with "
            "checkpoint-every=1"
        )
    done, newest = rounds_done(path), checkpoints.newest_round()
    asked = config.run.num_server_rounds
    first_due = int((read_config(path) or {}).get("checkpoint-every", 1))
    if not newest and done >= max(first_due, 1):
        raise ConfigError(
            f'resume: "{path}" tells of {done} rounds, but {directory.checkpoint_path} holds none '
            "of their checkpoints: put them back, or start a new run"
        )
    if newest >= asked and (read_summary(path) or {}).get("status") == "completed":
        raise ConfigError(
            f'resume: the run in "{path}" is completed: all {asked} rounds are done; to train on, '
            f"raise num-server-rounds (it is {asked}), or start a new run from its model"
        )
    return directory, checkpoints


def _checkpoints(config: AppConfig, directory: RunDirectory) -> Checkpoints | None:
    if not config.run.checkpoint_every:
        return None
    return Checkpoints(
        folder=directory.checkpoint_path,
        resume=bool(config.run.resume),
        every=config.run.checkpoint_every,
    )


def check_same_run(config: AppConfig, path: Path) -> None:
    """Raise ConfigError for a changed key that the finished rounds depend on."""
    saved = read_config(path) or {}
    first = saved.get(_ROUNDS, config.run.num_server_rounds)
    if config.train.decay != "none" and first != config.run.num_server_rounds:
        raise ConfigError(
            f"{_ROUNDS} is {config.run.num_server_rounds}, but the run in {path} began with "
            f"{first}, over which train.decay={config.train.decay} lowers its learning rate: "
            f"resume with {_ROUNDS}={first}, or start a new run from its model"
        )
    now = flatten(config)
    then = flatten(parse({key: saved[key] for key in now if key in saved}))  # in new spelling
    for key, value in now.items():
        if key in _FREE or key.endswith(_FREE_ENDS) or key not in saved:
            continue
        if then[key] != value:
            raise ConfigError(
                f"{key} is {value!r}, but the run in {path} began with {then[key]!r}: "
                "leave it as it was, or start a new run"
            )

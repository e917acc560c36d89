"""The sinks of a strategy's rounds: TensorBoard, W&B, MLflow or Prometheus."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

from collapipe_flwr.config.schema import METRICS_ADDRESS
from collapipe_flwr.core.durable import make_folder
from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.federation.round import RoundRecord
from collapipe_flwr.reporting.events import RoundEvent
from collapipe_flwr.reporting.run_directory import run_id_of
from collapipe_flwr.reporting.sinks import KINDS, Feeder, Scalar, WatchedRun, check_sinks, scalars

log = logging.getLogger("flwr.collapipe")
_LAST_S = 60.0  # for all sinks to take what is left
_ARTEFACTS = ("summary.json", "events.jsonl", "report.html")


class Sinks:
    """Passes every round to the sinks in ``names``, for example "tensorboard,mlflow".

    Pass it as ``on_round`` of a :class:`CollaPipe`, and close it, or use it in a ``with`` block.
    The tools store their data in ``folder``; runs with the same folder are one run. ``settings``
    become hyperparameters. Prometheus scrapes ``metrics_address``.

    No sink slows or ends a run: ``warn`` gets one sentence about each that fails, which is tried
    again with the next round. Raises ConfigError for a sink that is unknown or not installed, and
    if the folder cannot be written.
    """

    def __init__(
        self,
        names: str | Iterable[str],
        folder: str | Path,
        *,
        settings: Mapping[str, Any] | None = None,
        metrics_address: str = METRICS_ADDRESS,
        warn: Callable[[str], None] = log.warning,
    ) -> None:
        wanted = names.split(",") if isinstance(names, str) else names
        chosen = list(dict.fromkeys(name.strip() for name in wanted if name.strip()))
        check_sinks(chosen)
        self._folder, self.warn = Path(folder).resolve(), warn
        self._round_began_s = time.monotonic()
        self._feeders: list[Feeder] = []
        if chosen:
            run = self._run(settings or {}, metrics_address)
            self._feeders = [Feeder(name, partial(KINDS[name][0], run)) for name in chosen]

    def _run(self, settings: Mapping[str, Any], metrics_address: str) -> WatchedRun:
        try:
            make_folder(self._folder)
            run_id = run_id_of(self._folder)
        except OSError as error:
            raise ConfigError(f"{self._folder} cannot be written ({error.strerror})") from error
        return WatchedRun(
            folder=self._folder, run_id=run_id, settings=settings, metrics_address=metrics_address
        )

    def __call__(self, record: RoundRecord) -> None:
        now_s = time.monotonic()
        self.write(record.event(now_s - self._round_began_s))
        self._round_began_s = now_s

    def write(self, event: RoundEvent) -> None:
        """Write an evaluated round."""
        self._hand_over(event.round_index, scalars(event))

    def log(self, server_round: int, metrics: Mapping[str, float]) -> None:
        """Write numbers of your own for a round, such as those of an ``evaluate_fn``."""
        self._hand_over(
            server_round, [Scalar(name=f"test/{name}", value=v) for name, v in metrics.items()]
        )

    def _hand_over(self, step: int, values: Sequence[Scalar]) -> None:
        for feeder in self._feeders:
            feeder.write(step, values)
        self._tell()

    def close(self, status: str = "completed", within_s: float = _LAST_S) -> None:
        """End the run in all sinks: "completed", "stopped" or another status; idempotent."""
        present = [path for name in _ARTEFACTS if (path := self._folder / name).is_file()]
        ends_s = time.monotonic() + within_s
        for feeder in self._feeders:
            feeder.end(status, present)
        for feeder in self._feeders:
            feeder.wait(max(0.0, ends_s - time.monotonic()))
        self._tell()
        self._feeders = []

    def _tell(self) -> None:
        for feeder in self._feeders:
            if sentence := feeder.take_problem():
                self.warn(sentence)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        stopped = isinstance(error, KeyboardInterrupt)
        if isinstance(error, SystemExit):  # 0 of Flower's handler; 128 and the signal of others
            code = error.code or 0
            stopped = isinstance(code, int) and (code == 0 or code >= 128)
        self.close("completed" if error is None else "stopped" if stopped else "failed")

"""A run that continues after its server died: checkpoints of a :class:`CollaPipe`.

    strategy = Checkpointed(CollaPipe(FedAdam()), Checkpoints(folder=Path("run/checkpoints")))
    strategy.start(grid, arrays, num_rounds=20)              # killed in round 13 ...
    # ... and started again with Checkpoints(folder=..., resume=True): rounds 13 to 20

Flower always counts from round 1, so a resumed run adds the finished rounds to every round number
of the strategies, the clients and the evaluation. Only the rounds since the newest checkpoint are
lost.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from collapipe_flwr.core.errors import CollaPipeError, RunError
from collapipe_flwr.federation.checkpoint import (
    Arrays,
    Checkpoint,
    Checkpoints,
    ComponentState,
    Resumable,
    check_same_class,
    encode_state,
    restore_rng_state,
    restore_state,
    rng_state,
    select_changed,
)
from collapipe_flwr.federation.inner import make_driver
from collapipe_flwr.federation.strategy import CollaPipe

log = logging.getLogger("flwr.collapipe")
Evaluate = Callable[[int, ArrayRecord], MetricRecord | None]
T = TypeVar("T")
_INNER = "inner"  # the inner strategy's place among the memories


class Checkpointed(Strategy):
    """Saves the run between rounds, and resumes it if ``checkpoints.resume`` is set.

    ``others`` are resumable parts of the run outside the strategy, by name.
    """

    def __init__(
        self,
        strategy: CollaPipe,
        checkpoints: Checkpoints,
        others: Mapping[str, Resumable] | None = None,
    ) -> None:
        self._strategy, self._bound_steps = strategy, strategy.inner_strategy
        self._others = dict(others or {})
        self._checkpoints = checkpoints
        self._first_state = encode_state(self._bound_steps, {})
        self._arrays = ArrayRecord()
        self._done = 0  # rounds before this process
        self._rng_state = ""  # to restore when the first round begins

    def summary(self) -> None:
        log.info("\t├──> Checkpoints in %s", self._checkpoints.folder)
        self._strategy.summary()

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Evaluate | None = None,
    ) -> Result:
        """Run the inner strategy's loop over the remaining rounds; ``num_rounds`` counts all.

        Raises RunError if the checkpoint cannot be read or is of another model or strategy.
        """
        with self._strategy.running(timeout, num_rounds):
            arrays = self._resume(initial_arrays)
            result = make_driver(self._bound_steps, self).start(
                grid,
                arrays,
                max(num_rounds - self._done, 0),
                timeout,
                train_config,
                evaluate_config,
                self._shift_evaluate(evaluate_fn),
            )
        return self._renumber(result, arrays)

    @property
    def _parts(self) -> dict[str, Resumable]:
        return {**self._strategy.resumable, **self._others}

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        self._arrays = arrays
        if self._rng_state:
            restore_rng_state(self._rng_state)
            self._rng_state = ""
        true_round = server_round + self._done
        self._checkpoints.note_rng_state(true_round - 1)
        return self._strategy.configure_train(true_round, arrays, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Aggregate, then save a checkpoint."""
        true_round = server_round + self._done
        arrays, metrics = self._strategy.aggregate_train(true_round, replies)
        self._arrays = arrays or self._arrays
        if self._checkpoints.is_due(true_round):
            self._checkpoints.save(self._make_checkpoint(true_round))
        return arrays, metrics

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        return self._strategy.configure_evaluate(server_round + self._done, arrays, config, grid)

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        return self._strategy.aggregate_evaluate(server_round + self._done, replies)

    def _make_checkpoint(self, server_round: int) -> Checkpoint:
        arrays = Arrays()
        state = select_changed(encode_state(self._bound_steps, arrays), self._first_state)
        inner = ComponentState(text=json.dumps(state), arrays=arrays)
        return Checkpoint(
            server_round=server_round,
            arrays=self._arrays,
            strategy=type(self._bound_steps).__name__,
            memories={_INNER: inner, **{name: p.dump() for name, p in self._parts.items()}},
            rng_state=rng_state(),
        )

    def _resume(self, initial: ArrayRecord) -> ArrayRecord:
        """Restore the newest checkpoint and return its arrays; ``initial`` without one."""
        checkpoint = self._checkpoints.read_newest()
        if checkpoint is None:
            return initial
        if not self._checkpoints.resume:
            raise RunError(
                f"{self._checkpoints.folder} holds a checkpoint of round "
                f"{checkpoint.server_round} already: resume that run or choose another folder"
            )
        _check_same_model(checkpoint.arrays, initial)
        check_same_class(self._bound_steps, checkpoint.strategy)
        with self._translate_errors(checkpoint, _INNER):
            inner = checkpoint.memories[_INNER]
            restore_state(self._bound_steps, json.loads(inner.text), dict(inner.arrays))
        for name, part in self._parts.items():
            with self._translate_errors(checkpoint, name):
                part.load(checkpoint.memories.get(name, ComponentState()))
        self._rng_state = checkpoint.rng_state
        self._done = checkpoint.server_round
        log.info("resumed after round %d", self._done)
        return checkpoint.arrays

    @contextmanager
    def _translate_errors(self, checkpoint: Checkpoint, part: str) -> Iterator[None]:
        """Raise RunError in place of the errors that a damaged memory causes."""
        try:
            yield
        except RunError:
            raise
        except (AttributeError, LookupError, TypeError, ValueError, CollaPipeError) as error:
            raise RunError(
                f"what the {part} remembers in {self._checkpoints.folder} of round "
                f"{checkpoint.server_round} cannot be read ({error}); delete that round to use the "
                "one before"
            ) from error

    def _shift_evaluate(self, evaluate: Evaluate | None) -> Evaluate | None:
        if evaluate is None:
            return None
        return lambda server_round, arrays: evaluate(server_round + self._done, arrays)

    def _renumber(self, result: Result, arrays: ArrayRecord) -> Result:
        """Put results under true rounds; if no round was left, take the checkpoint's model."""

        def shift(history: dict[int, T]) -> dict[int, T]:
            return {server_round + self._done: value for server_round, value in history.items()}

        return Result(
            arrays=result.arrays or (arrays if self._done else result.arrays),
            train_metrics_clientapp=shift(result.train_metrics_clientapp),
            evaluate_metrics_clientapp=shift(result.evaluate_metrics_clientapp),
            evaluate_metrics_serverapp=shift(result.evaluate_metrics_serverapp),
        )


def _check_same_model(saved: ArrayRecord, initial: ArrayRecord) -> None:
    """Raise RunError unless both hold the same arrays in the same shapes."""
    if set(saved) != set(initial):
        odd = sorted(set(saved) ^ set(initial))[0]
        raise RunError(f"the checkpoint is of another model (array {odd}): use its own run-config")
    for key, array in initial.items():
        if tuple(saved[key].shape) != tuple(array.shape):
            raise RunError(
                f"the checkpoint is of another model: {key} has shape {tuple(saved[key].shape)}, "
                f"this run's has {tuple(array.shape)}"
            )

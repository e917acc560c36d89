"""CollaPipe as a Flower strategy: it wraps any other one and adds plans, split models and dtypes.

    strategy = CollaPipe(FedAvg())          # an unmodified ClientApp keeps working
    result = strategy.start(grid=grid, initial_arrays=ArrayRecord(model.state_dict()))

The inner strategy samples, configures and aggregates as usual, and its own ``start`` runs. Each
node's message becomes a record of its own, with its cluster's plan if there is one; it carries the
whole model, and so does the reply. The inner strategy is not modified, and all other attributes of
a `CollaPipe` are the inner strategy's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.federation.attempts import DEFAULT_TIMEOUT_S
from collapipe_flwr.federation.inner import check_inner, make_driver, read_start_numbers
from collapipe_flwr.federation.wrapped_grid import polling

if TYPE_CHECKING:  # importing the strategy does not load torch
    from collapipe_flwr.config.schema import EdgeConfig
    from collapipe_flwr.federation.checkpoint import Resumable
    from collapipe_flwr.federation.hook_options import Learning
    from collapipe_flwr.federation.planner import (
        RoundPlanner,
    )
    from collapipe_flwr.federation.planning import Planning
    from collapipe_flwr.federation.round import RoundRecord
    from collapipe_flwr.models.any_splitter import DescribedModel
    from collapipe_flwr.reporting.progress import ClusterProgress
    from collapipe_flwr.scheduler.protocol import Scheduler

log = logging.getLogger("flwr.collapipe")
CONTINUE, RAISE = "continue", "raise"
DROP, JOIN = "drop", "join"


class CollaPipe(Strategy):
    """Any Flower strategy, planned and split over clusters of devices.

    With a ``model``, a :class:`SplitModel`, each client is a :class:`Cluster` that trains it on its
    devices and its edge. ``edge`` is that of clusters which name none: an address or
    :class:`EdgeConfig`, else one in this process while :meth:`start` runs. ``scheduler`` is the
    policy that plans rounds, by name or as :class:`Planning`; ``optimizer`` is that of all parts,
    as ``torch.optim`` class, ``functools.partial`` of one or :class:`OptimizerConfig`; ``learning``
    holds the other settings, for all rounds or by server round. ``on_round`` gets the record of
    every round.

    Without a model clients train whole models, and nothing is planned. Callers with clusters of
    their own pass a :class:`RoundPlanner`.

    A round in which every client fails is repeated up to ``retries`` times, after ever longer
    pauses. Then it leaves the arrays unchanged, as in Flower; ``on_total_failure="raise"`` ends the
    run with a RunError instead. With ``late="join"``, replies that miss a grid's deadline join a
    later round (`late`).

    Missing attributes are read from the inner strategy, and new ones are set there. Raises
    ConfigError for a strategy that cannot be wrapped.
    """

    def __init__(
        self,
        inner_strategy: Strategy,
        *,
        model: DescribedModel | None = None,
        scheduler: str | Scheduler | Planning | RoundPlanner | None = None,
        optimizer: object = None,
        learning: Learning | None = None,
        edge: str | EdgeConfig | None = None,
        on_round: Callable[[RoundRecord], None] | None = None,
        on_total_failure: str = CONTINUE,
        retries: int = 0,
        late: str = DROP,
    ) -> None:
        from collapipe_flwr.federation.hooks import StrategyHooks  # loads torch

        check_inner(inner_strategy, CollaPipe, split=model is not None)
        if on_total_failure not in (CONTINUE, RAISE):
            raise ConfigError(
                f"on_total_failure must be {CONTINUE!r} or {RAISE!r}, got {on_total_failure!r}"
            )
        if late not in (DROP, JOIN):
            raise ConfigError(f"late must be {DROP!r} or {JOIN!r}, got {late!r}")
        self._hooks = StrategyHooks(
            inner_strategy,
            model=model,
            scheduler=scheduler,
            optimizer=optimizer,
            learning=learning,
            edge=edge,
            on_round=on_round,
            raises=on_total_failure == RAISE,
            retries=retries,
            joins_late=late == JOIN,
        )
        self.inner_strategy = inner_strategy  # last: from now on, attributes are set there

    def __getattr__(self, name: str) -> Any:
        """Read an attribute of the inner strategy."""
        if name == "inner_strategy" or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.inner_strategy, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute of the inner strategy, unless this class has it."""
        own = vars(self)
        if "inner_strategy" not in own or name in own or hasattr(type(self), name):
            super().__setattr__(name, value)
        else:
            setattr(self.inner_strategy, name, value)

    @property
    def resumable(self) -> dict[str, Resumable]:
        """The parts around the inner strategy whose memory a checkpoint keeps, by name."""
        return self._hooks.resumable

    def cluster_progress(self) -> dict[str, ClusterProgress]:
        """Return the progress of each cluster in the open round, by id; from any thread."""
        return self._hooks.progress()

    def summary(self) -> None:
        where = "split over devices" if self._hooks.is_split else "whole models"
        log.info("\t├──> CollaPipe around %s: %s", type(self.inner_strategy).__name__, where)
        self.inner_strategy.summary()

    def start(self, *args: Any, **kwargs: Any) -> Result:
        """Run the inner strategy's own ``start``, with its arguments, around our hooks.

        An edge in this process ends with it. Flower's own grids are wrapped in a `PollingGrid`.
        """
        args = tuple(polling(given) if isinstance(given, Grid) else given for given in args)
        kwargs = {k: polling(v) if isinstance(v, Grid) else v for k, v in kwargs.items()}
        given = read_start_numbers(self.inner_strategy, args, kwargs)
        timeout_s = given.get("timeout", DEFAULT_TIMEOUT_S)
        with self.running(timeout_s, int(given.get("num_rounds", 0))):
            return make_driver(self.inner_strategy, self).start(*args, **kwargs)

    def running(
        self, round_timeout_s: float = DEFAULT_TIMEOUT_S, last_round: int = 0
    ) -> AbstractContextManager[None]:
        """Run the edge of clusters that name none for the rounds of a run.

        :meth:`start` does it; callers of the hooks without it have to. A repeated round closes
        after ``round_timeout_s``, and the ``last_round`` waits as long for late updates.
        """
        return self._hooks.running(round_timeout_s, last_round)

    def close(self) -> None:
        """Forget a round that is open."""
        self._hooks.close()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        return self._hooks.configure_train(server_round, arrays, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        return self._hooks.aggregate_train(server_round, replies)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        return self._hooks.configure_evaluate(server_round, arrays, config, grid)

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        return self._hooks.aggregate_evaluate(server_round, replies)

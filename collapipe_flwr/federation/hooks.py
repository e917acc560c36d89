"""The rounds of :class:`CollaPipe`: plans and split models around the inner strategy's messages."""

from __future__ import annotations

import atexit
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from collapipe_flwr.config.schema import EdgeConfig
from collapipe_flwr.core.errors import DevicesMissing, RunError
from collapipe_flwr.core.incident import (
    LOST,
    QUARANTINED,
    RECOVERED,
    REMARK,
    RETRY,
    Incident,
)
from collapipe_flwr.core.outcome import RoundOutcome
from collapipe_flwr.federation.accepted import AcceptedReplies
from collapipe_flwr.federation.arrays import find_not_finite, inner_view, load_into, narrow_raw
from collapipe_flwr.federation.attempts import DEFAULT_TIMEOUT_S, Attempts, are_permanent
from collapipe_flwr.federation.border import averages, evaluations
from collapipe_flwr.federation.checkpoint import (
    ComponentState,
    Resumable,
    restore_rng_state,
    rng_state,
)
from collapipe_flwr.federation.hook_options import (
    Learning,
    check_options,
    check_updates,
    learning_of,
)
from collapipe_flwr.federation.inner import check_returned, layers
from collapipe_flwr.federation.inner_state import (
    Undo,
    count_unsound,
    find_spoilt,
    remember,
    undo_nothing,
)
from collapipe_flwr.federation.late import LateUpdate, LateUpdates
from collapipe_flwr.federation.movement import MovementMeter
from collapipe_flwr.federation.open_round import OpenRound
from collapipe_flwr.federation.planner import (
    DescribedClusters,
    KnownClusters,
    RoundPlanner,
    planner_of,
)
from collapipe_flwr.federation.planning import Planning
from collapipe_flwr.federation.products import (
    check_products,
    restore_factors,
    show_model,
    shows_cores,
)
from collapipe_flwr.federation.records import EXAMPLES, replace_content, restore_arrays
from collapipe_flwr.federation.round import (
    ClosedRound,
    RoundPlan,
    RoundRecord,
    metrics_as_dict,
)
from collapipe_flwr.federation.split import DefaultEdge, PersonalArrays, SplitTraining, open_edge
from collapipe_flwr.federation.updates import EXACT
from collapipe_flwr.models.any_splitter import DescribedModel
from collapipe_flwr.models.spec import PRODUCTS
from collapipe_flwr.reporting.progress import ClusterProgress
from collapipe_flwr.scheduler.protocol import Scheduler

log = logging.getLogger("flwr.collapipe")
_UNSEEN = (
    "with retries, or with late updates that join, a CollaPipe cannot be wrapped in another "
    "strategy, which would not see all replies: put that inside, CollaPipe(OtherStrategy(FedAvg(), "
    "...), ...)"
)


class StrategyHooks:
    """The hooks around those of ``inner``; see :class:`CollaPipe` for the arguments."""

    def __init__(
        self,
        inner: Strategy,
        *,
        model: DescribedModel | None,
        scheduler: str | Scheduler | Planning | RoundPlanner | None,
        optimizer: object,
        learning: Learning | None,
        edge: str | EdgeConfig | None,
        on_round: Callable[[RoundRecord], None] | None,
        raises: bool,
        retries: int,
        joins_late: bool = False,
    ) -> None:
        check_options(
            model,
            optimizer=optimizer,
            learning=learning,
            edge=edge,
            on_round=on_round,
            retries=retries,
        )
        self.inner_strategy = inner
        self._model = model
        self._learning = learning_of(optimizer, learning, model)
        self._edge = EdgeConfig(address=edge) if isinstance(edge, str) else edge or EdgeConfig()
        self._running = ExitStack()
        self._default_edge: DefaultEdge | None = None  # from the first round on
        self.planner = planner_of(scheduler, model, self._learning, self._edge.address)
        self._accepted = AcceptedReplies()
        self._movement = MovementMeter()
        self._personal = PersonalArrays()
        self._on_round = on_round
        self._raises = raises  # if all clients of a round fail
        self._retries = retries
        self._attempts = Attempts(retries)
        self._grid: Grid  # of the newest round
        self._configure: Callable[[], list[Message]]  # plans and opens it, also another time
        self._undo: Undo = undo_nothing  # what the inner strategy did in the round
        self._unsound = Counter[str]()  # of its moments, before the round
        self._was_run = self._runs = False
        self._timeout_s = DEFAULT_TIMEOUT_S
        self._joins_late = joins_late
        self._averages = model is not None or averages(inner)
        self._last_round = 0  # 0: unknown
        self.late = LateUpdates()
        self._round: OpenRound | None = None
        self._planned: RoundPlan | None = None  # of the newest round

    @property
    def is_split(self) -> bool:
        return self._model is not None

    @property
    def resumable(self) -> dict[str, Resumable]:
        """See `CollaPipe.resumable`."""
        parts: dict[str, object] = {
            "planner": self.planner,
            "accepted": self._accepted,
            "movement": self._movement,
            "personal": self._personal if self._model and self._model.personal else None,
        }
        return {name: part for name, part in parts.items() if isinstance(part, Resumable)}

    @contextmanager
    def running(
        self, round_timeout_s: float = DEFAULT_TIMEOUT_S, last_round: int = 0
    ) -> Iterator[None]:
        """See `CollaPipe.running`."""
        self._timeout_s, self._last_round = round_timeout_s, last_round
        if self._was_run:
            self._forget_run()
        self._was_run = self._runs = True
        try:
            yield
        finally:
            self._runs = False
            self.late.close()
            self.close()
            self._close_edge()

    def _open_edge(self) -> DefaultEdge:
        """Return the edge of clusters that name none, opened in the first round.

        It ends with :meth:`running`, which a strategy around this one does not call, else with the
        process.
        """
        if self._default_edge is None:
            self._default_edge = self._running.enter_context(open_edge(self._edge))
            atexit.register(self._close_edge)
        return self._default_edge

    def _close_edge(self) -> None:
        atexit.unregister(self._close_edge)
        self._default_edge = None
        self._running.close()

    def _forget_run(self) -> None:
        """Begin a new run as if it were the first: nothing is accepted, learnt or kept yet."""
        self._accepted.forget()
        for part in (self.planner, self._movement, self._personal):
            if isinstance(part, Resumable):
                part.load(ComponentState())
        self._planned = None

    @property
    def _hidden_keys(self) -> frozenset[str]:
        return self._model.hidden_keys if self._model else frozenset()

    def close(self) -> None:
        """Forget a round that is still open."""
        self._round = None

    def progress(self) -> dict[str, ClusterProgress]:
        """See `CollaPipe.cluster_progress`."""
        opened, edge = self._round, self._default_edge
        if opened is None:
            return {}
        return opened.progress(edge.progress() if edge else {})

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Return the inner strategy's messages, each with its own plan.

        A split model is trained with the settings in their config (`asked_optimizer`). Raises
        ScheduleError, ConfigError, RunError.
        """
        if (self._retries or self._joins_late) and not self._runs:
            raise RunError(_UNSEEN)
        self._attempts = Attempts(self._retries)
        if self._accepted.holds(server_round):
            self._forget_run()
        self._grid, state, self._undo = grid, rng_state(), remember(self.inner_strategy)
        shown = show_model(arrays, self._model, self.inner_strategy)
        self._unsound = count_unsound(self.inner_strategy, shown)
        self._configure = partial(self._configure_round, server_round, arrays, shown, config, state)
        return self._with_retries(self._configure)

    def _with_retries(self, configure: Callable[[], list[Message]]) -> list[Message]:
        """Return the messages of a round, trying again while devices are missing."""
        while True:
            try:
                return configure()
            except DevicesMissing as error:
                if not self._attempts.retry(str(error)):
                    raise DevicesMissing(self._attempts.with_count(str(error))) from error

    def _configure_round(
        self,
        server_round: int,
        arrays: ArrayRecord,
        shown: ArrayRecord,
        config: ConfigRecord,
        rng_state: str,
    ) -> list[Message]:
        self.close()
        if self._attempts.failures:
            restore_rng_state(rng_state)  # the same draws as in the first attempt
            self._undo()
        view = inner_view(shown, self._hidden_keys)
        asked = self.inner_strategy.configure_train(server_round, view, config, self._grid)
        asked = check_returned(asked, self.inner_strategy, "configure_train")
        asked = restore_factors(asked, view, inner_view(arrays, self._hidden_keys))
        messages = self._select_idle(asked)
        nodes = [message.metadata.dst_node_id for message in messages]
        self._planned = self._plan(server_round, nodes)
        return self._open_round(self._planned, server_round, arrays, messages)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Pass whole models to the inner strategy, and return its arrays in the model's dtypes.

        The round continues with the clusters that replied. Clusters continue from this round only
        if the inner strategy aggregated their replies.
        """
        if self._round is None:
            raise RunError(f"round {server_round}: aggregate_train needs configure_train first")
        with closing(self):
            closed, joined = self._collect(replies)
            made = self.inner_strategy.aggregate_train(server_round, closed.replies)
            arrays, metrics = check_returned(made, self.inner_strategy, "aggregate_train")
            arrays = closed.after = self._restore(arrays, closed) if arrays else None
            self._undo = undo_nothing  # frees what it holds
            if arrays:
                self._round.accept(closed)
            self.late.settle(joined, closed)
            if closed.plan.plan is not None:
                closed.movement = self._movement.measure(closed)
            if arrays and closed.products:
                arrays, error = closed.products.factorize(arrays, self._round.template)
                closed.adapter_error = error
            self._report(closed, metrics)
        return arrays, metrics

    def _collect(self, replies: Iterable[Message]) -> tuple[ClosedRound, list[LateUpdate]]:
        """Close the round with its replies, or with those of its first successful repetition.

        Also returns the late updates that join it.
        """
        while True:
            assert self._round is not None
            closed = self._round.receive(replies)
            joined: list[LateUpdate] = []
            if not (total_loss := self._round.describe_total_loss(closed)):
                joined = self._join_late(closed)
                total_loss = self._round.describe_total_loss(closed)
            if not total_loss:
                return closed, joined
            if are_permanent(closed.replies) or not self._attempts.retry(total_loss):
                self._lose_round(self._attempts.with_count(total_loss))
                return closed, self._join_late(closed)
            messages = self._with_retries(self._configure)
            replies = self._grid.send_and_receive(messages, timeout=self._timeout_s)

    def _select_idle(self, messages: Iterable[Message]) -> list[Message]:
        """Keep the messages to nodes that do not train for an earlier round."""
        busy = self.late.nodes
        return [message for message in messages if message.metadata.dst_node_id not in busy]

    def _join_late(self, closed: ClosedRound) -> list[LateUpdate]:
        """Add late updates to a round; waits for a usable one if the round has nothing else.

        Those of the round itself that never come count as its failures.
        """
        if not self._joins_late:
            return []
        assert self._round is not None
        self.late.keep(self._round, closed.late)
        is_last = closed.plan.server_round == self._last_round
        while True:
            wanted = len(self.late.nodes) if is_last else int(not closed.models)
            self.late.pull(self._grid, within_s=self._timeout_s, wanted=wanted)
            joined = self.late.join(closed)
            if closed.models or not self.late.nodes:
                break
        self._round.give_up(closed, closed.models.keys() | self.late.of(self._round))
        return joined

    def _restore(self, made: ArrayRecord, closed: ClosedRound) -> ArrayRecord | None:
        """Return the new model in its own dtypes; None, which drops the round, if it is not finite.

        The same holds for the moments of the inner strategy, which returns to its state before.
        """
        before = closed.before
        arrays = narrow_raw(made, before) if self._model is None else load_into(before, made)
        if (key := find_not_finite(arrays, before)) is not None:
            what = f"{key} of the model"
        elif name := find_spoilt(self.inner_strategy, self._unsound, before):
            what = f"its {name}"
        else:
            return arrays
        self._undo()
        why = (
            f"round {closed.plan.server_round}: {type(self.inner_strategy).__name__} made {what} "
            "infinite or NaN from finite replies: change strategy-arguments"
        )
        closed.incidents.append(Incident(kind=REMARK, text=why))
        self._lose_round(why)
        return None

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Return the inner strategy's messages, none of whose records is shared.

        A split model is evaluated by this round's plan, on the clusters of the plan; clusters that
        did not train get a plan first.
        """
        view = inner_view(arrays, self._hidden_keys)
        configure = self.inner_strategy.configure_evaluate
        messages = self._select_idle(configure(server_round, view, config, grid))
        if self._model is None:
            return [
                replace_content(m, restore_arrays(m.content, arrays, (), exact=False))
                for m in messages
            ]
        if self._planned is None:
            raise RunError(f"round {server_round}: configure_evaluate needs configure_train first")
        self.close()
        plan, planner = self._planned, self.planner
        nodes = [message.metadata.dst_node_id for message in messages]
        if isinstance(planner, KnownClusters) and not plan.cluster_ids.keys() >= set(nodes):
            if isinstance(planner, DescribedClusters) and not planner.query_unknown(grid, nodes):
                plan = RoundPlan.of_nobody(server_round)
            else:
                plan = planner.plan_evaluation(server_round, nodes)
        self._attempts = Attempts(self._retries)
        return self._with_retries(lambda: self._open_round(plan, server_round, arrays, messages))

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        with closing(self):
            if self._round is not None:
                usable = self._round.check_evaluations(replies)
            else:
                names = self._planned.cluster_ids if self._planned is not None else {}
                weighted_by = find_weight_key(self.inner_strategy)
                usable = evaluations(replies, names, weighted_by, averages=self._averages)
            return self.inner_strategy.aggregate_evaluate(server_round, usable)

    def _lose_round(self, why: str) -> None:
        """Raise RunError, or log a warning, for a round that is lost."""
        if self._raises:
            raise RunError(why)
        log.warning("%s; the model stays as it is", why)

    def _plan(self, server_round: int, nodes: Sequence[int]) -> RoundPlan:
        if not nodes:  # the inner strategy trains no client in this round
            return RoundPlan.of_nobody(server_round)
        planner = self.planner
        if isinstance(planner, DescribedClusters) and not planner.query_unknown(self._grid, nodes):
            return RoundPlan.of_nobody(server_round, unknown=nodes)
        return planner.plan(server_round, nodes)

    def _open_round(
        self, plan: RoundPlan, server_round: int, arrays: ArrayRecord, messages: Iterable[Message]
    ) -> list[Message]:
        """Open a round and return its messages; an error closes it again."""
        split = None
        if self._model is not None:
            edge = self._open_edge()
            learning = self._learning(server_round)
            if learning.updates != EXACT:
                check_updates(
                    self.inner_strategy,
                    learning.updates,
                    outermost=self._runs,
                    products=self._model.aggregate == PRODUCTS,
                )
            if self._model.aggregate == PRODUCTS:
                check_products(
                    self._model,
                    self.inner_strategy,
                    keeps_optimizer=learning.keep_optimizer,
                    joins_late=self._joins_late,
                )
            whole = not shows_cores(self.inner_strategy)
            split = SplitTraining(self._model, edge, learning, whole_products=whole)
        self._round = OpenRound(
            plan,
            arrays,
            split,
            self._accepted,
            self._personal,
            weighted_by=find_weight_key(self.inner_strategy),
            waits_for_late=self._joins_late,
            averages=self._averages,
        )

        with ExitStack() as undo:
            undo.callback(self.close)
            addressed = self._round.address(messages)
            self.late.forget([sent.cluster_id for sent in self._round.sent])
            undo.pop_all()
        return addressed

    def _report(self, closed: ClosedRound, metrics: MetricRecord | None) -> None:
        record = RoundRecord(
            server_round=closed.plan.server_round,
            plan=closed.plan.plan,
            asked=tuple(sent.cluster_id for sent in closed.sent),
            incidents=tuple(self._list_incidents(closed)),
            joined=closed.joined,
            train_metrics=metrics_as_dict(metrics),
            telemetry=closed.telemetry,
            outcome=self.planner.settle(closed) if closed.plan.cluster_ids else RoundOutcome(),
            flower_bytes_sent=sum(sent.content_bytes for sent in closed.sent),
            flower_bytes_received=closed.received_bytes,
            adapter_error=closed.adapter_error,
        )
        if self._on_round is not None:
            self._on_round(record)

    def _list_incidents(self, closed: ClosedRound) -> Iterator[Incident]:
        """Yield what went wrong in a round, by kind."""
        for text in self._attempts.failures:
            yield Incident(kind=RETRY, text=text)
        yield from closed.incidents
        for cluster, why in closed.failures.items():
            yield Incident(kind=LOST, cluster=cluster, text=why)
        for cluster, measured in closed.telemetry.items():
            for text in measured.incidents:
                yield Incident(kind=RECOVERED, cluster=cluster, text=text)
            for device, why in measured.quarantined.items():
                yield Incident(kind=QUARANTINED, cluster=cluster, text=f"{device}: {why}")


def find_weight_key(strategy: Strategy) -> str:
    """Return the metric by which a strategy, or one that it wraps, weighs replies."""
    keys = (getattr(layer, "weighted_by_key", None) for layer in layers(strategy))
    return next((key for key in keys if isinstance(key, str)), EXAMPLES)

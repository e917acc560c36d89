"""The rounds of a run as :class:`CollaPipe` has them: plans around the inner strategy's messages.

Each node's message becomes a record of its own with its own plan. With a model to split it carries
only embedding and encoder, the decoder goes to the edge, and both are one model again before the
inner strategy aggregates.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from collapipe_flwr.cluster.fleet import LearningSettings
from collapipe_flwr.config.schema import EdgeConfig
from collapipe_flwr.core.errors import ConfigError, ProtocolError, RunError
from collapipe_flwr.federation.arrays import inner_view, load_into, narrow_raw
from collapipe_flwr.federation.checkpoint import Resumable
from collapipe_flwr.federation.default_profile import DefaultProfilePlanner
from collapipe_flwr.federation.described import DescribedClusters, Meets, Planning
from collapipe_flwr.federation.inner import layers
from collapipe_flwr.federation.messages import readdressed, restored, with_content
from collapipe_flwr.federation.open_round import OpenRound
from collapipe_flwr.federation.personal import PersonalArrays
from collapipe_flwr.federation.records import EXAMPLES, take_telemetry
from collapipe_flwr.federation.rounds import (
    AcceptedRounds,
    ClosedRound,
    Outcome,
    RoundPlan,
    RoundPlanner,
    RoundRecord,
    metrics_as_dict,
)
from collapipe_flwr.federation.rpc_gateway import RpcEdgeGateway, open_edge
from collapipe_flwr.federation.split import EdgeGateway, SplitRound
from collapipe_flwr.models.described import DescribedModel
from collapipe_flwr.models.profile import profile_model
from collapipe_flwr.models.split_model import SplitModel
from collapipe_flwr.pipeline.optimizer import OptimizerConfig
from collapipe_flwr.pipeline.user_optimizer import optimizer_config
from collapipe_flwr.scheduler.protocol import Scheduler

log = logging.getLogger("flwr.collapipe")
Learning = LearningSettings | Callable[[int], LearningSettings]  # the same, or by server round

_NOT_RUNNING = (
    "a CollaPipe with a model to split does not run as the inside of another strategy, which would "
    "see parts of updates: put that inside, CollaPipe(OtherStrategy(FedAvg(), ...), model=...)"
)


class Rounds:
    """The hooks of a strategy around those of ``inner``; :class:`CollaPipe` explains the rest."""

    def __init__(
        self,
        inner: Strategy,
        *,
        model: DescribedModel | None,
        scheduler: str | Scheduler | Planning | RoundPlanner | None,
        optimizer: object,
        learning: Learning | None,
        edge: str | EdgeConfig | EdgeGateway | None,
        on_round: Callable[[RoundRecord], None] | None,
        raises: bool,
    ) -> None:
        check_model(model, optimizer=optimizer, learning=learning, edge=edge)
        self.inner_strategy = inner
        self._model = model
        self._learning = learning_of(optimizer, learning, model)
        self._edge = EdgeConfig(address=edge) if isinstance(edge, str) else edge or EdgeConfig()
        self._gateway = self._edge if isinstance(self._edge, EdgeGateway) else None
        self.planner = planner_of(scheduler, model, self._learning)
        self._accepted = AcceptedRounds()
        self._personal = PersonalArrays()
        self._on_round = on_round
        self._raises = raises  # where all clients of a round fail
        self._round: OpenRound | None = None
        self._planned: RoundPlan | None = None  # of the newest round

    @property
    def is_split(self) -> bool:
        """Whether clusters and edge share a model."""
        return self._model is not None

    @property
    def resumable(self) -> dict[str, Resumable]:
        """The parts around the inner strategy whose memory a checkpoint keeps, by name."""
        parts: dict[str, object] = {
            "planner": self.planner,
            "edge": self._gateway,
            "accepted": self._accepted,
            "personal": self._personal if self._model and self._model.personal else None,
        }
        return {name: part for name, part in parts.items() if isinstance(part, Resumable)}

    @contextmanager
    def running(self) -> Iterator[None]:
        """Hold open what the rounds of a run need: the way to the edge, and its sessions.

        :meth:`start` does it; whoever calls the hooks without it has to. Raises LinkError.
        """
        with ExitStack() as stack:
            if self._model is not None and isinstance(self._edge, EdgeConfig):
                self._gateway = RpcEdgeGateway(stack.enter_context(open_edge(self._edge)))
                stack.callback(self._forget_gateway)
            stack.callback(self.close)
            yield

    def _forget_gateway(self) -> None:
        self._gateway = None

    @property
    def _hidden_keys(self) -> frozenset[str]:
        return self._model.hidden_keys if self._model else frozenset()

    def close(self) -> None:
        """End the edge sessions of a round that is still open."""
        if self._round is not None:
            self._round.close()
            self._round = None

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """The inner strategy's messages, each with its own plan and its part of the model.

        A split model learns as their config asks (`asked_optimizer`). Raises ScheduleError if
        nothing can be planned, LinkError if the edge cannot be reached, ConfigError for settings
        that make no sense, and RunError outside :meth:`running`.
        """
        if self._model is not None and self._gateway is None:
            raise RunError(_NOT_RUNNING)
        self.close()
        view = inner_view(arrays, self._hidden_keys)
        messages = list(self.inner_strategy.configure_train(server_round, view, config, grid))
        nodes = [message.metadata.dst_node_id for message in messages]
        self._planned = self._plan(server_round, nodes, arrays, grid)
        return self._opened(self._new_round(self._planned, server_round, arrays), messages)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Whole models to the inner strategy, and its arrays as it made them.

        Those of a split model, and those that numpy lacks a dtype for, get the model's dtypes back
        as by `load_state_dict`. The round goes on with the clusters that replied. Clusters continue
        from this round only if the inner strategy aggregated their replies.
        """
        if self._round is None:
            raise RunError(f"round {server_round}: aggregate_train needs configure_train first")
        with closing(self):
            closed = self._round.receive(replies, weight_key(self.inner_strategy))
            self._judge(self._round.total_loss(closed))
            arrays, metrics = self.inner_strategy.aggregate_train(server_round, closed.replies)
            if arrays:
                arrays = self._restored(arrays, closed.before)
                closed.after = arrays
                self._round.accept(closed)
            self._report(closed, metrics)
        return arrays, metrics

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """The inner strategy's messages, none of whose records is shared.

        A split model is evaluated as it was trained: by this round's plan, with the new decoder
        at the edge, on the clusters that the plan asks; clusters that did not train get a plan.
        """
        view = inner_view(arrays, self._hidden_keys)
        messages = list(self.inner_strategy.configure_evaluate(server_round, view, config, grid))
        if self._model is None:
            return [readdressed(m, restored(m.content, arrays, (), exact=False)) for m in messages]
        if self._planned is None:
            raise RunError(f"round {server_round}: configure_evaluate needs configure_train first")
        self.close()
        plan, nodes = self._planned, [message.metadata.dst_node_id for message in messages]
        if isinstance(self.planner, Meets) and not plan.cluster_ids.keys() >= set(nodes):
            self.planner.meet(grid, nodes)
            plan = self.planner.plan_evaluation(server_round, nodes, arrays)
        return self._opened(self._new_round(plan, server_round, arrays), messages)

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """The inner strategy's average of the clients' metrics."""
        with closing(self):
            bare = [_without_telemetry(reply) for reply in replies]
            if self._round is not None:
                bare = self._round.weighed(bare, weight_key(self.inner_strategy))
            return self.inner_strategy.aggregate_evaluate(server_round, bare)

    def _judge(self, total_loss: str) -> None:
        if total_loss and self._raises:
            raise RunError(total_loss)
        if total_loss:
            log.warning("%s; the model stays as it is", total_loss)

    def _restored(self, arrays: ArrayRecord, before: ArrayRecord) -> ArrayRecord:
        if self._model is None:
            return narrow_raw(arrays, before)
        return load_into(before, arrays)

    def _plan(
        self, server_round: int, nodes: Sequence[int], arrays: ArrayRecord, grid: Grid
    ) -> RoundPlan:
        if not nodes:  # the inner strategy trains nobody in this round
            return RoundPlan(server_round=server_round, plan=None, cluster_ids={}, binding=True)
        if isinstance(self.planner, Meets):
            self.planner.meet(grid, nodes)
        return self.planner.plan(server_round, nodes, arrays)

    def _new_round(self, plan: RoundPlan, server_round: int, arrays: ArrayRecord) -> OpenRound:
        split = None
        if self._model is not None and self._gateway is not None:
            learning = self._learning(server_round)
            split = SplitRound(self._model, self._gateway, learning, server_round, plan.whole)
        return OpenRound(plan, arrays, split, self._accepted, self._personal)

    def _opened(self, opened: OpenRound, messages: Iterable[Message]) -> list[Message]:
        """Messages of a round that is open from now on; closed again if one cannot be made."""
        self._round = opened
        with ExitStack() as undo:
            undo.callback(self.close)
            addressed = opened.address(messages)
            undo.pop_all()
        return addressed

    def _report(self, closed: ClosedRound, metrics: MetricRecord | None) -> None:
        record = RoundRecord(
            server_round=closed.plan.server_round,
            plan=closed.plan.plan,
            asked=tuple(sent.cluster_id for sent in closed.sent),
            failures=closed.failures,
            train_metrics=metrics_as_dict(metrics),
            telemetry=closed.telemetry,
            outcome=self.planner.settle(closed) if closed.plan.cluster_ids else Outcome(),
            flower_bytes_sent=sum(sent.content_bytes for sent in closed.sent),
            flower_bytes_received=closed.received_bytes,
        )
        if self._on_round is not None:
            self._on_round(record)


def check_model(model: object, **options: object) -> None:
    """Raise ConfigError for another kind of model, or for options that need one."""
    if not isinstance(model, DescribedModel | None):
        raise ConfigError(
            f"model must be a SplitModel, got {type(model).__name__}: describe it, "
            "CollaPipe(..., model=SplitModel(model, example=batch))"
        )
    given = [name for name, value in options.items() if value is not None]
    if model is None and given:
        raise ConfigError(
            f"{given[0]} has no effect without a model to split, since clients train as they "
            "like: pass model=SplitModel(...) too, or leave it out"
        )


def planner_of(
    scheduler: str | Scheduler | Planning | RoundPlanner | None,
    model: DescribedModel | None,
    learning: Callable[[int], LearningSettings],
) -> RoundPlanner:
    """What plans rounds: a planner as it is; for a ``model`` one of clusters that describe
    themselves, else one of assumed clusters. Raises ConfigError for a bad name.
    """
    if isinstance(scheduler, RoundPlanner):
        return scheduler
    if isinstance(scheduler, Planning):
        planning = scheduler
    else:
        planning = Planning(policy=scheduler or ("dssda" if model else "fedavg"))
    if model is None:
        return DefaultProfilePlanner(planning.scheduler)
    if model.batch_size is not None:
        planning = planning.for_batches(model.batch_size, cut=not model.splitter.whole_batches)
    optimizer = learning(1).optimizer
    return DescribedClusters(
        planning, lambda: profile_model(model.splitter, model.shape, optimizer.state_bytes)
    )


def learning_of(
    given: object, learning: Learning | None, model: DescribedModel | None
) -> Callable[[int], LearningSettings]:
    """How clusters learn by server round, with the optimizer that is ``given`` if there is one."""
    if given is not None:
        given = optimizer_config(given, model.model if isinstance(model, SplitModel) else None)
    return partial(_learning, learning or LearningSettings(), given)


def _learning(
    learning: Learning, optimizer: OptimizerConfig | None, server_round: int
) -> LearningSettings:
    settings = learning(server_round) if callable(learning) else learning
    return settings if optimizer is None else replace(settings, optimizer=optimizer)


def _without_telemetry(reply: Message) -> Message:
    if reply.has_error():
        return reply
    try:
        content, _ = take_telemetry(reply.content)
    except ProtocolError as error:
        log.warning("telemetry of node %s ignored: %s", reply.metadata.src_node_id, error)
        return reply
    return with_content(reply, content)


def weight_key(strategy: Strategy) -> str:
    """The metric by which a strategy, or the one that it wraps, weighs replies."""
    keys = (getattr(layer, "weighted_by_key", None) for layer in layers(strategy))
    return next((key for key in keys if isinstance(key, str)), EXAMPLES)

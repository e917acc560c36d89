"""CollaPipe as a Flower strategy: it wraps any other one and adds plans, split models and dtypes.

    strategy = CollaPipe(FedAvg())          # an unmodified ClientApp keeps working
    result = strategy.start(grid=grid, initial_arrays=ArrayRecord(model.state_dict()))

The inner strategy samples, configures and aggregates as ever. Around it, each node's message
becomes a record of its own with its own plan; with a model to split the message carries only
embedding and encoder, the decoder goes to the edge, and both are one model again before the inner
strategy aggregates. Nothing of the inner strategy is changed in place.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from collapipe_flwr.cluster.fleet import LearningSettings
from collapipe_flwr.config.schema import EdgeConfig
from collapipe_flwr.core.errors import ConfigError, ProtocolError, RunError
from collapipe_flwr.federation.arrays import averaging_view, restore
from collapipe_flwr.federation.checkpoint import Resumable
from collapipe_flwr.federation.default_profile import DefaultProfilePlanner
from collapipe_flwr.federation.described import DescribedClusters, Meets, Planning
from collapipe_flwr.federation.messages import readdressed, restored, with_content
from collapipe_flwr.federation.open_round import OpenRound
from collapipe_flwr.federation.records import EXAMPLES, take_telemetry
from collapipe_flwr.federation.rounds import (
    AcceptedRounds,
    ClosedRound,
    RoundPlan,
    RoundPlanner,
    RoundRecord,
    metrics_as_dict,
)
from collapipe_flwr.federation.rpc_gateway import Learning, open_split
from collapipe_flwr.federation.split import SplitRound, SplitSetup
from collapipe_flwr.models.profile import profile_model
from collapipe_flwr.models.split_model import SplitModel
from collapipe_flwr.pipeline.optimizer import OptimizerSettings
from collapipe_flwr.scheduler.protocol import Scheduler

log = logging.getLogger("flwr.collapipe")

PROXIMAL = "proximal-mu"  # as FedProx spells it


class CollaPipe(Strategy):
    """Any Flower strategy, planned and split over clusters of devices.

    With a ``model`` each client is a :class:`Cluster` that holds embedding and blocks, and the head
    is trained at the ``edge``: the address of a running one or how to reach it, else one that lives
    in this process as long as :meth:`start` runs. ``scheduler`` is the policy that plans rounds, by
    name or as :class:`Planning`; ``optimizer`` is what all parts train with, as ``torch.optim``
    class, ``functools.partial`` of one or :class:`OptimizerConfig`; ``learning`` says the rest, for
    all rounds or by server round. ``on_round`` gets the record of every round.

    Without a model clients train whole models as ever, and plans are advice. ``split`` is what
    ``model`` comes to, from a caller that keeps the edge itself; ``scheduler`` may then be a
    :class:`RoundPlanner`.
    """

    def __init__(
        self,
        inner_strategy: Strategy,
        *,
        model: SplitModel | None = None,
        scheduler: str | Scheduler | Planning | RoundPlanner | None = None,
        optimizer: OptimizerSettings | None = None,
        learning: Learning | None = None,
        edge: str | EdgeConfig | None = None,
        split: SplitSetup | None = None,
        on_round: Callable[[RoundRecord], None] | None = None,
    ) -> None:
        self.inner_strategy = inner_strategy
        self._model = model
        self._learning = learning_of(optimizer, learning)
        self._edge = EdgeConfig(address=edge) if isinstance(edge, str) else edge or EdgeConfig()
        self.planner = planner_of(scheduler, model)
        self._accepted = AcceptedRounds()
        self._split = split
        self._on_round = on_round
        self._round: OpenRound | None = None
        self._planned: RoundPlan | None = None  # of the newest round

    @property
    def resumable(self) -> dict[str, Resumable]:
        """The parts around the inner strategy whose memory a checkpoint keeps, by name."""
        edge = None if self._split is None else self._split.edge
        parts: dict[str, object] = {
            "planner": self.planner,
            "edge": edge,
            "accepted": self._accepted,
        }
        return {name: part for name, part in parts.items() if isinstance(part, Resumable)}

    def summary(self) -> None:
        """Log what wraps what, then the inner strategy's own summary."""
        where = "split between clusters and edge" if self._split else "whole models"
        log.info("\t├──> CollaPipe around %s: %s", type(self.inner_strategy).__name__, where)
        self.inner_strategy.summary()

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Flower's own loop; edge sessions, and an edge of its own, end with it in any case."""
        with self._edge_open():
            return super().start(
                grid,
                initial_arrays,
                num_rounds,
                timeout,
                train_config,
                evaluate_config,
                evaluate_fn,
            )

    @contextmanager
    def _edge_open(self) -> Iterator[None]:
        with ExitStack() as stack:
            if self._model is not None:
                opening = open_split(self._model, self._edge, self._learning)
                self._split = stack.enter_context(opening)
            stack.callback(self.close)
            yield

    @property
    def _constant_keys(self) -> frozenset[str]:
        return self._split.constant_keys if self._split else frozenset()

    def close(self) -> None:
        """End the edge sessions of a round that is still open."""
        if self._round is not None:
            self._round.close()
            self._round = None

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """The inner strategy's messages, each with its own plan and its part of the model.

        Raises ScheduleError if nothing can be planned, LinkError if the edge cannot be reached,
        and ConfigError for a split model that should be trained with a proximal term.
        """
        self.close()
        view = averaging_view(arrays, self._constant_keys)
        messages = list(self.inner_strategy.configure_train(server_round, view, config, grid))
        if self._split:
            refuse_proximal_term(messages)
        nodes = [message.metadata.dst_node_id for message in messages]
        if isinstance(self.planner, Meets):
            self.planner.meet(grid, nodes)
        plan = self.planner.plan(server_round, nodes, arrays)
        split = SplitRound(self._split, server_round) if self._split else None
        self._planned = plan
        return self._opened(OpenRound(plan, arrays, split, self._accepted), messages)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Whole models to the inner strategy, its average back in the model's own dtypes.

        The round goes on with the clusters that replied; raises RunError if none did. Clusters
        continue from this round only if the inner strategy aggregated their replies.
        """
        if self._round is None:
            raise RunError(f"round {server_round}: aggregate_train needs configure_train first")
        with closing(self):
            closed = self._round.receive(replies, weight_key(self.inner_strategy))
            self._round.refuse_total_loss(closed)
            arrays, metrics = self.inner_strategy.aggregate_train(server_round, closed.replies)
            if arrays:
                strict = self._split is not None
                arrays = restore(arrays, closed.before, closed.heaviest, strict=strict)
                closed.after = arrays
                self._round.accept(closed)
            self._report(closed, metrics)
        return arrays, metrics

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """The inner strategy's messages with every array in its own dtype, none shared.

        A split model is evaluated as it was trained: by this round's plan, with the new decoder
        at the edge, on the clusters that the plan asks.
        """
        view = averaging_view(arrays, self._constant_keys)
        messages = self.inner_strategy.configure_evaluate(server_round, view, config, grid)
        if self._split is None:
            constant = self._constant_keys
            return [readdressed(m, restored(m.content, arrays, constant)) for m in messages]
        if self._planned is None:
            raise RunError(f"round {server_round}: configure_evaluate needs configure_train first")
        self.close()
        split = SplitRound(self._split, server_round)
        return self._opened(OpenRound(self._planned, arrays, split, self._accepted), messages)

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """The inner strategy's average of the clients' metrics."""
        with closing(self):
            bare = [_without_telemetry(reply) for reply in replies]
            return self.inner_strategy.aggregate_evaluate(server_round, bare)

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
            outcome=self.planner.settle(closed),
            flower_bytes_sent=sum(sent.content_bytes for sent in closed.sent),
            flower_bytes_received=closed.received_bytes,
        )
        if self._on_round is not None:
            self._on_round(record)


def planner_of(
    scheduler: str | Scheduler | Planning | RoundPlanner | None, model: SplitModel | None
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
    return DescribedClusters(
        planning.for_batches(model.batch_size), lambda: profile_model(model.splitter, model.shape)
    )


def learning_of(optimizer: OptimizerSettings | None, learning: Learning | None) -> Learning:
    """How clusters learn, with ``optimizer`` where it is given."""
    if learning is None:
        return LearningSettings(optimizer=optimizer or OptimizerSettings())
    if optimizer is None:
        return learning
    if callable(learning):
        return lambda server_round: replace(learning(server_round), optimizer=optimizer)
    return replace(learning, optimizer=optimizer)


def weight_key(strategy: Strategy) -> str:
    """The metric by which a strategy, or the one that it wraps, weighs replies."""
    key = getattr(strategy, "weighted_by_key", None)
    if isinstance(key, str):
        return key
    wrapped = getattr(strategy, "strategy", None)
    return weight_key(wrapped) if isinstance(wrapped, Strategy) else EXAMPLES


def refuse_proximal_term(messages: Iterable[Message]) -> None:
    """Raise ConfigError where FedProx asks clients for a term that a split cluster lacks.

    Silently left out, the run would be one of FedAvg under another name.
    """
    records = (c for message in messages for c in message.content.config_records.values())
    asked = next((record[PROXIMAL] for record in records if record.get(PROXIMAL)), None)
    if asked is not None:
        raise ConfigError(
            f"{PROXIMAL} is {asked!r}, but the loss of a split model has no proximal term: use "
            "FedAvg, FedAvgM or FedAdam inside CollaPipe, or FedProx without split"
        )


def _without_telemetry(reply: Message) -> Message:
    if reply.has_error():
        return reply
    try:
        content, _ = take_telemetry(reply.content)
    except ProtocolError as error:
        log.warning("telemetry of node %s ignored: %s", reply.metadata.src_node_id, error)
        return reply
    return with_content(reply, content)

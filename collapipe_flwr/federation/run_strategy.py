"""The strategy of a run, its planner and its edge server, from the run-config."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import reduce
from math import fsum
from operator import mul
from typing import cast

from flwr.app import ConfigRecord, MetricRecord, RecordDict
from flwr.serverapp.strategy import Strategy

from collapipe_flwr.cluster.fleet import LearningSettings
from collapipe_flwr.config.schema import AppConfig
from collapipe_flwr.core.domain import ClusterProfile, ModelProfile
from collapipe_flwr.core.errors import blaming
from collapipe_flwr.data.metrics import added
from collapipe_flwr.data.tasks import Task
from collapipe_flwr.federation.described import Planning
from collapipe_flwr.federation.learner import Learner, scores
from collapipe_flwr.federation.planner import ScheduledRounds
from collapipe_flwr.federation.recorder import RunRecorder
from collapipe_flwr.federation.records import (
    UnsplitTask,
    read_tally,
    unsplit_task_config,
)
from collapipe_flwr.federation.rpc_gateway import open_edge, split_setup
from collapipe_flwr.federation.strategy import RAISE, CollaPipe
from collapipe_flwr.federation.strategy_names import make_strategy
from collapipe_flwr.simulation.world import EnergyBudget

log = logging.getLogger("flwr.collapipe")
Aggregate = Callable[[list[RecordDict], str], MetricRecord]
Tell = Callable[[float], None]
TellScores = Callable[[Mapping[str, float]], None]


@contextmanager
def run_strategy(
    inner: Strategy,
    config: AppConfig,
    learner: Learner,
    planner: ScheduledRounds | None,
    recorder: RunRecorder,
    run_id: str,
) -> Iterator[tuple[Strategy, ConfigRecord]]:
    """The strategy, and what it tells every client; the edge lives as long as it does."""
    if planner is None:
        yield inner, unsplit_task_config(_whole_task(config, learner, run_id))
        return
    with open_edge(config.edge) as client:
        split = split_setup(
            client,
            learner.splitter,
            learner.shape,
            lambda server_round: _learning(config, server_round, run_id),
            vocabulary_json=learner.task.vocabulary.to_json(),
            keep_optimizer=config.train.optimizer_state == "keep",
        )
        strategy = CollaPipe(
            inner,
            scheduler=planner,
            split=split,
            on_round=recorder.on_round,
            on_total_failure=RAISE,
        )
        yield strategy, ConfigRecord()


def _learning(config: AppConfig, server_round: int, run_id: str) -> LearningSettings:
    return LearningSettings(
        optimizer=config.optimizer(server_round),
        schedule=config.scheduler.settings.schedule,
        deadline_s=config.edge.timeout_s,
        seed=config.run.seed,
        execution=config.execution,
        snapshot_every=config.train.snapshot_every,
        heartbeat=config.edge.heartbeat,
        run_id=run_id,
    )


def _whole_task(config: AppConfig, learner: Learner, run_id: str) -> UnsplitTask:
    """The batches of a plan with the largest micro-batch and count, on the unsplit model."""
    grid = config.scheduler.settings
    size, rounds = max(grid.micro_batch_sizes), config.run.num_server_rounds
    return UnsplitTask(
        model_spec_json=learner.spec.to_json(),
        vocabulary_json=learner.task.vocabulary.to_json(),
        batch_size=size * max(grid.micro_batches),
        micro_batch_size=size,
        optimizers=tuple(config.optimizer(r + 1) for r in range(rounds)),
        execution=config.execution,
        run_id=run_id,
    )


def make_planner(
    config: AppConfig,
    model: ModelProfile,
    clusters: Mapping[int, ClusterProfile],
    names: Mapping[int, str],
) -> ScheduledRounds:
    """DSSDA (or the chosen policy) for the described clusters.

    ``names`` are the clusters' by node, as they are at any time.

    Raises ConfigError for unknown names and InfeasibleError when no plan fits the devices.
    """
    planning = Planning(
        policy=config.scheduler.policy,
        settings=config.scheduling,
        radio=config.world.radio,
        channel=config.world.channel,
        seed=config.run.seed,
        budget=EnergyBudget(share=config.world.energy_share, radio_s=0.0),
        paced=config.links.paced,
    )
    with blaming("scheduler.policy"):
        scheduler = planning.scheduler
    profiles = sorted(clusters.values(), key=lambda profile: profile.cluster_id)
    rounds = planning.rounds(profiles, names, model)
    with blaming("world.devices, world.memory-share"):
        scheduler.step(scheduler.init(snapshot := rounds.world.snapshot(1, model)), snapshot)
    return rounds


def inner_strategy(
    config: AppConfig, task: Task, on_training: Tell, on_evaluation: TellScores
) -> Strategy:
    """The Flower strategy that CollaPipe wraps; it goes on with the clusters that are connected.

    The run as a whole has waited for all of them before.

    ``on_training`` gets the mean training loss of a round, ``on_evaluation`` loss and metrics of
    the clusters on the test set, where the run evaluates there. Raises ConfigError.
    """
    return make_strategy(
        config,
        fraction_evaluate=float(config.evaluation.federated),
        min_train_nodes=1,
        min_evaluate_nodes=1,
        min_available_nodes=1,
        train_metrics_aggr_fn=_mean_loss(on_training),
        evaluate_metrics_aggr_fn=_joined_scores(task, on_evaluation),
    )


def _mean_loss(tell: Tell) -> Aggregate:
    """Flower's average of the loss in the replies' metrics, told to ``tell``, too."""

    def mean_loss(replies: list[RecordDict], weighted_by: str) -> MetricRecord:
        loss = _weighted_loss([_metrics(reply) for reply in replies], weighted_by)
        tell(loss)
        return MetricRecord({"loss": loss})

    return mean_loss


def _joined_scores(task: Task, tell: TellScores) -> Aggregate:
    """The metrics of all clusters' shares together: their counts are added, not averaged."""

    def joined_scores(replies: list[RecordDict], weighted_by: str) -> MetricRecord:
        found = [_metrics(reply) for reply in replies]
        tally = reduce(added, map(read_tally, found))
        joined = scores(task, _weighted_loss(found, weighted_by), tally)
        tell(joined)
        return MetricRecord(dict(joined))

    return joined_scores


def _metrics(reply: RecordDict) -> MetricRecord:
    return next(iter(reply.metric_records.values()))


def _weighted_loss(found: Sequence[MetricRecord], weighted_by: str) -> float:
    counts = [cast(float, metrics[weighted_by]) for metrics in found]
    losses = [cast(float, metrics["loss"]) for metrics in found]
    return fsum(map(mul, losses, counts)) / (fsum(counts) or 1.0)

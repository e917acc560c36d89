"""The strategy that an app wraps, its clients' settings and its planner, from the run-config."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import reduce
from math import fsum
from operator import mul
from typing import cast

from flwr.app import MetricRecord, RecordDict
from flwr.serverapp.strategy import Strategy

from collapipe_flwr.cluster.order import LearningSettings
from collapipe_flwr.config.schema import AppConfig
from collapipe_flwr.core.domain import ClusterProfile, ModelProfile
from collapipe_flwr.core.errors import InfeasibleError, prefix_errors
from collapipe_flwr.data.metrics import add_counts
from collapipe_flwr.data.tasks import Task
from collapipe_flwr.federation.late import RoundDeadline
from collapipe_flwr.federation.planner import (
    KnownClusters,
    RankProfile,
)
from collapipe_flwr.federation.planning import Planning
from collapipe_flwr.federation.products import check_rank
from collapipe_flwr.federation.records import read_tally
from collapipe_flwr.federation.run.learner import scores
from collapipe_flwr.federation.run.strategies import make_strategy
from collapipe_flwr.simulation.world import EnergyBudget

log = logging.getLogger("flwr.collapipe")
Aggregate = Callable[[list[RecordDict], str], MetricRecord]
TellScores = Callable[[Mapping[str, float]], None]


def make_clock(config: AppConfig) -> RoundDeadline | None:
    """Make the deadline that closes rounds early, if the run has one."""
    slack = config.run.round_slack
    return RoundDeadline(slack, joins_late=config.run.round_late == "join") if slack else None


def learning_settings(config: AppConfig, run_id: str, server_round: int) -> LearningSettings:
    """Build the learning settings of one round."""
    return LearningSettings(
        optimizer=config.optimizer(server_round),
        deadline_s=config.edge.timeout_s,
        seed=config.run.seed,
        execution=config.execution,
        snapshot_every=config.train.snapshot_every,
        heartbeat=config.edge.heartbeat,
        run_id=run_id,
        keep_optimizer=config.train.optimizer_state == "keep",
        labels_at_home=config.privacy.labels_at_home,
        trusted_blocks=config.privacy.trusted_blocks,
        privacy=config.noise,
        audit_share=config.trust.audit_share,
        updates=config.links.updates,
        cache=config.cache,
    )


def make_planner(
    config: AppConfig,
    model: ModelProfile,
    clusters: Mapping[int, ClusterProfile],
    names: Mapping[int, str],
    *,
    whole_batches: bool = False,
    leaves_out: bool = False,
    of_rank: RankProfile | None = None,
) -> KnownClusters:
    """Make the planner with the run's policy; ``names`` maps nodes to the ids of ``clusters``.

    With ``whole_batches``, a batch is one micro-batch. Raises ConfigError for unknown names and
    InfeasibleError for a cluster that cannot be planned. With ``leaves_out``, clusters of machines
    that cannot may sit out, as long as there are others. ``of_rank`` profiles the model with
    adapters of a cluster's own rank.
    """
    settings = config.scheduling
    if whole_batches:
        settings = settings.uncut
        log.warning(
            "%s gets whole batches, uncut, of %s examples: its layers learn from batches as a "
            "whole",
            config.model.type,
            " or ".join(map(str, settings.micro_batch_sizes)),
        )
    elif config.noise.on_gradients:
        log.warning(
            "micro-batches hold one example each, in steps of %s: privacy.clip-norm clips every "
            "example's gradient",
            " or ".join(map(str, settings.micro_batches)),
        )
    planning = Planning(
        policy=config.scheduler.policy,
        settings=settings,
        radio=config.world.radio,
        channel=config.world.channel,
        seed=config.run.seed,
        budget=EnergyBudget(share=config.world.energy_share, radio_s=0.0),
        paced=config.links.paced,
        truth_error=config.world.truth_error,
        labels_at_home=config.privacy.labels_at_home,
        trusted_blocks=config.privacy.trusted_blocks,
        updates=config.links.updates,
        edge_address=config.edge.address,
        ranks=config.lora.ranks,
    )
    model, profiles = planning.check(model), sorted(clusters.values(), key=lambda c: c.cluster_id)
    for found in profiles:
        check_rank(found.lora_rank, config.lora.rank, config.lora.aggregate, found.cluster_id)
    world = planning.world(profiles, model)
    with prefix_errors("scheduler.policy"):
        planner = KnownClusters(planning, world, model, names, of_rank)
    simulated = not any(profile.real_links for profile in profiles)
    with prefix_errors("world.devices, world.memory-share") if simulated else nullcontext():
        left_out = planner.plan_evaluation(1, list(names)).left_out
        if left_out and (simulated or not leaves_out):
            raise InfeasibleError(next(iter(left_out.values())))
    return planner


def inner_strategy(config: AppConfig, task: Task, on_evaluation: TellScores) -> Strategy:
    """Make the Flower strategy that CollaPipe wraps; it needs only one connected cluster per round.

    ``on_evaluation`` gets loss and metrics of the clusters on the test set, if the run evaluates
    there. Raises ConfigError.
    """
    return make_strategy(
        config,
        fraction_evaluate=float(config.evaluation.federated),
        min_train_nodes=1,
        min_evaluate_nodes=1,
        min_available_nodes=1,
        train_metrics_aggr_fn=_mean_loss,
        evaluate_metrics_aggr_fn=_joined_scores(task, on_evaluation),
    )


def _mean_loss(replies: list[RecordDict], weighted_by: str) -> MetricRecord:
    """Flower's average of the training loss."""
    found = [_metrics(reply) for reply in replies]
    if not all("train_loss" in metrics for metrics in found):
        return MetricRecord()  # private training tells no losses
    return MetricRecord({"loss": _weighted_mean(found, "train_loss", weighted_by)})


def _joined_scores(task: Task, tell: TellScores) -> Aggregate:
    """Make the function that joins the metrics over all clusters' shares by adding their counts."""

    def joined_scores(replies: list[RecordDict], weighted_by: str) -> MetricRecord:
        found = [_metrics(reply) for reply in replies]
        tally = reduce(add_counts, map(read_tally, found))
        joined = scores(task, _weighted_mean(found, "eval_loss", weighted_by), tally)
        tell(joined)
        return MetricRecord(dict(joined))

    return joined_scores


def _metrics(reply: RecordDict) -> MetricRecord:
    return next(iter(reply.metric_records.values()))


def _weighted_mean(found: Sequence[MetricRecord], key: str, weighted_by: str) -> float:
    counts = [cast(float, metrics[weighted_by]) for metrics in found]
    losses = [cast(float, metrics[key]) for metrics in found]
    return fsum(map(mul, losses, counts)) / (fsum(counts) or 1.0)

"""The strategy of a run, its clients' settings and its planner, from the run-config.

The app itself decides on the number of nodes, the names of records, and how metrics are joined.
Strategies of boosted trees and those that need a mod in the ClientApp have no name in a run-config.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from inspect import Parameter, signature
from math import fsum
from operator import mul
from typing import Any, cast

from flwr.app import MetricRecord, RecordDict
from flwr.serverapp import strategy as strategies
from flwr.serverapp.strategy import FedAvg, Strategy

from collapipe_flwr.cluster.order import LearningSettings
from collapipe_flwr.config.schema import STRATEGIES, AppConfig
from collapipe_flwr.core.domain import ClusterProfile, ModelProfile
from collapipe_flwr.core.errors import ConfigError, blaming
from collapipe_flwr.core.keys import read_assignments
from collapipe_flwr.data.metrics import added
from collapipe_flwr.data.tasks import Task
from collapipe_flwr.federation.deadline import RoundClock
from collapipe_flwr.federation.planner import ScheduledRounds
from collapipe_flwr.federation.planning import Planning
from collapipe_flwr.federation.records import read_tally
from collapipe_flwr.federation.run.learner import scores
from collapipe_flwr.simulation.world import EnergyBudget

log = logging.getLogger("flwr.collapipe")
_OURS = {"strategy", "accountant", "selection_rule", "fraction_evaluate", "train_loss_key"}
_OUR_ENDINGS = ("_nodes", "_key", "_aggr_fn")
_COUNT = "num_malicious_nodes"
Aggregate = Callable[[list[RecordDict], str], MetricRecord]
TellScores = Callable[[Mapping[str, float]], None]


def make_strategy(config: AppConfig, **own: Any) -> Strategy:
    """The strategy of a run; ``own`` are the arguments of every FedAvg.

    Raises ConfigError for arguments that its class does not take or refuses.
    """
    name = config.run.strategy
    kind = _kind(name)
    given = read_assignments(config.run.strategy_arguments)
    chosen = {**_suited(name, config), **given}
    _check_arguments(name, given, chosen)
    _check_clusters(name, given, config.run.clusters)
    try:
        made: Strategy = (
            kind(**own, **chosen) if issubclass(kind, FedAvg) else kind(FedAvg(**own), **chosen)
        )
    except ValueError as error:
        raise ConfigError(f"strategy-arguments: {error}") from error
    return made


def _kind(name: str) -> Any:
    return getattr(strategies, STRATEGIES[name])


def known_arguments(name: str) -> dict[str, Parameter]:
    """The arguments of a strategy that the run-config may set."""
    parameters = signature(_kind(name).__init__).parameters.items()
    return {k: p for k, p in parameters if k != "self" and not _is_ours(k)}


def _is_ours(argument: str) -> bool:
    return argument in _OURS or (argument.endswith(_OUR_ENDINGS) and argument != _COUNT)


def _suited(name: str, config: AppConfig) -> dict[str, Any]:
    """Default arguments that follow from the rest of the run-config."""
    if name.startswith("dp-"):
        return {"num_sampled_clients": config.run.clusters}
    if name == "qfedavg":
        rate = config.train.optimizer.learning_rate
        return {"client_learning_rate": rate}
    return {}


def _check_arguments(name: str, given: Mapping[str, object], chosen: Mapping[str, object]) -> None:
    known = known_arguments(name)
    for argument, value in given.items():
        if argument not in known:
            raise ConfigError(
                f"strategy-arguments: {name} has no argument {argument}; known: {', '.join(known)}"
            )
        whole = type(known[argument].default) is int
        if type(value) not in ((int,) if whole else (int, float)):
            wanted = "a whole number" if whole else "a number"
            raise ConfigError(f"strategy-arguments: {argument} must be {wanted}, got {value!r}")
    missing = [k for k, p in known.items() if p.default is p.empty and k not in chosen]
    if missing:
        raise ConfigError(
            f"strategy {name} needs {' and '.join(missing)}: set "
            f'strategy-arguments="{" ".join(f"{k}=..." for k in missing)}"'
        )


def _check_clusters(name: str, given: Mapping[str, object], clusters: int) -> None:
    """Raise ConfigError where Bulyan would drop every round: it needs 4 f + 3 replies."""
    if name != "bulyan":
        return
    malicious = int(str(given.get(_COUNT, 0)))
    if clusters < (needed := 4 * malicious + 3):
        raise ConfigError(
            f"strategy bulyan with {_COUNT}={malicious} needs {needed} clusters, clusters is "
            f"{clusters}: use more, or krum"
        )


def make_clock(config: AppConfig) -> RoundClock | None:
    """What closes the rounds early, if the run has it; raises ConfigError where it cannot."""
    slack, joins_late = config.run.round_slack, config.run.round_late == "join"
    if config.run.runtime == "whole" and (slack or joins_late):
        key = f"round-slack={slack:g}" if slack else "round-late=join"
        raise ConfigError(
            f"{key} has no effect with runtime=whole, whose rounds have no predicted duration: "
            "leave it out, or set runtime=pipeline"
        )
    if joins_late and not slack:
        raise ConfigError("round-late=join has no effect without round-slack: set it, too, to 1.5")
    return RoundClock(slack, joins_late=joins_late) if slack else None


def learning_settings(config: AppConfig, run_id: str, server_round: int) -> LearningSettings:
    """The learning settings of one round."""
    return LearningSettings(
        optimizer=config.optimizer(server_round),
        schedule=config.scheduler.settings.schedule,
        deadline_s=config.edge.timeout_s,
        seed=config.run.seed,
        execution=config.execution,
        snapshot_every=config.train.snapshot_every,
        heartbeat=config.edge.heartbeat,
        run_id=run_id,
        keep_optimizer=config.train.optimizer_state == "keep",
        labels_at_home=config.privacy.labels_at_home,
    )


def make_planner(
    config: AppConfig,
    model: ModelProfile,
    clusters: Mapping[int, ClusterProfile],
    names: Mapping[int, str],
) -> ScheduledRounds:
    """The planner with the run's policy; ``names`` maps nodes to the ids of ``clusters``.

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
        truth_error=config.world.truth_error,
        labels_at_home=config.privacy.labels_at_home,
    )
    with blaming("scheduler.policy"):
        scheduler = planning.scheduler
    world = planning.world(sorted(clusters.values(), key=lambda c: c.cluster_id), model)
    with blaming("world.devices, world.memory-share"):
        scheduler.step(scheduler.init(snapshot := world.snapshot(1, model)), snapshot)
    return ScheduledRounds(planning, world, model, names)


def inner_strategy(config: AppConfig, task: Task, on_evaluation: TellScores) -> Strategy:
    """The Flower strategy that CollaPipe wraps; it needs only one connected cluster per round.

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
    return MetricRecord({"loss": _weighted_mean(found, "train_loss", weighted_by)})


def _joined_scores(task: Task, tell: TellScores) -> Aggregate:
    """The metrics over all clusters' shares: counts are added, not averaged."""

    def joined_scores(replies: list[RecordDict], weighted_by: str) -> MetricRecord:
        found = [_metrics(reply) for reply in replies]
        tally = reduce(added, map(read_tally, found))
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

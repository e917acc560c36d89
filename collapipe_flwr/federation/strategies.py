"""Flower's own strategies, and what they tell of a round."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from math import fsum
from operator import mul
from typing import cast

from flwr.app import MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAdam, FedAvg, FedAvgM, Strategy

from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.data.metrics import added
from collapipe_flwr.data.tasks import Task
from collapipe_flwr.federation.evaluator import scores
from collapipe_flwr.federation.records import read_tally

_STRATEGIES: dict[str, Callable[..., Strategy]] = {
    "fedavg": FedAvg,
    "fedavgm": FedAvgM,
    "fedadam": FedAdam,
}
Aggregate = Callable[[list[RecordDict], str], MetricRecord]
Tell = Callable[[float], None]
TellScores = Callable[[Mapping[str, float]], None]


def inner_strategy(
    name: str, task: Task, on_training: Tell, on_evaluation: TellScores, *, evaluates: bool
) -> Strategy:
    """The Flower strategy that CollaPipe wraps; it goes on with the clusters that are connected.

    The run as a whole has waited for all of them before.

    ``on_training`` gets the mean training loss of a round, ``on_evaluation`` loss and metrics of
    the clusters on the test set, where the run ``evaluates`` there. Raises ConfigError.
    """
    if name not in _STRATEGIES:
        raise ConfigError(f"strategy must be one of {', '.join(_STRATEGIES)}")
    return _STRATEGIES[name](
        fraction_evaluate=float(evaluates),
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

"""How many examples a reply counts for: the cluster's claim, as far as it is possible.

The number of examples weighs a reply in averages, so a cluster that claims too many would replace
the model by its own. The edge counts the micro-batches of every cluster, and the plan contains
their size: a claim above the product is reduced to it. Where nothing was counted, only impossible
numbers are refused.
"""

from __future__ import annotations

import math

from flwr.app import MetricRecord, RecordDict

from collapipe_flwr.core.domain import ClusterPlan
from collapipe_flwr.core.errors import ProtocolError
from collapipe_flwr.federation.records import EXAMPLES, examples_of
from collapipe_flwr.federation.telemetry import ClusterTelemetry

MOST_EXAMPLES = 1e12  # of one cluster in one round, tokens included


def check_weight(examples: float, weighted_by: str, cluster_id: str) -> None:
    """Raise ProtocolError for a weight that would spoil the average."""
    if not (math.isfinite(examples) and examples > 0):
        raise ProtocolError(
            f"cluster {cluster_id} replied with {weighted_by} = {examples:g} or without it: it "
            "weighs the reply, so it must be > 0"
        )
    check_possible(examples, weighted_by, cluster_id)


def check_possible(examples: float, weighted_by: str, cluster_id: str) -> None:
    """Raise ProtocolError for a number of examples that no client can have."""
    if weighted_by == EXAMPLES and not 0 <= examples <= MOST_EXAMPLES:
        raise ProtocolError(
            f"cluster {cluster_id} claims {weighted_by} = {examples:g}, which no round reaches: it "
            "would outweigh all others, so its reply is not used"
        )


def counted_examples(plan: ClusterPlan | None, told: ClusterTelemetry | None) -> int | None:
    """Trained micro-batches, counted by the edge, times their planned size; None if not counted.

    ``plan`` is the one that was sent; a cluster that lost devices keeps its micro-batches.
    """
    if plan is None or told is None or told.edge is None or not told.edge.micro_batches:
        return None
    return told.edge.micro_batches * plan.micro_batch_size


def weighing(content: RecordDict, weighted_by: str, factor: float) -> RecordDict:
    """``content`` with its weight in averages multiplied by ``factor``, as a new RecordDict."""
    changed = RecordDict(dict(content))
    for name, metrics in content.metric_records.items():
        if weighted_by in metrics:
            weight = factor * examples_of(content, weighted_by)
            changed[name] = MetricRecord({**metrics, weighted_by: weight})
    return changed


def with_examples(content: RecordDict, examples: int) -> RecordDict:
    """``content`` with another number of examples, as a new RecordDict."""
    name, metrics = next(iter(content.metric_records.items()))
    return RecordDict({**content, name: MetricRecord({**metrics, EXAMPLES: examples})})

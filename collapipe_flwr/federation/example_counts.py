"""How many examples a reply counts for: what its cluster says, as far as it can be true.

A number of examples weighs a reply in averages, so a cluster that claims too many would replace the
model by its own. The edge counts every micro-batch that a cluster trained on, and the plan says how
many examples one holds: a claim beyond their product is not believed, and the product counts. Where
nobody else counted, only numbers that no round reaches are refused.
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
    """Raise ProtocolError for a number of examples that no client has, where it is one."""
    if weighted_by == EXAMPLES and not 0 <= examples <= MOST_EXAMPLES:
        raise ProtocolError(
            f"cluster {cluster_id} claims {weighted_by} = {examples:g}, which no round reaches: it "
            "would outweigh all others, so its reply is not used"
        )


def counted_examples(plan: ClusterPlan | None, told: ClusterTelemetry | None) -> int | None:
    """What the edge saw of a round: micro-batches times their planned size. None: nobody counted.

    ``plan`` is the one that was sent; a cluster that lost devices keeps its micro-batches.
    """
    if plan is None or told is None or told.edge is None or not told.edge.micro_batches:
        return None
    return told.edge.micro_batches * plan.micro_batch_size


def weighing(content: RecordDict, weighted_by: str, factor: float) -> RecordDict:
    """A new RecordDict: ``content`` whose weight in averages is multiplied by a factor."""
    changed = RecordDict(dict(content))
    for name, metrics in content.metric_records.items():
        if weighted_by in metrics:
            weight = factor * examples_of(content, weighted_by)
            changed[name] = MetricRecord({**metrics, weighted_by: weight})
    return changed


def with_examples(content: RecordDict, examples: int) -> RecordDict:
    """A new RecordDict: ``content`` with another number of examples."""
    name, metrics = next(iter(content.metric_records.items()))
    return RecordDict({**content, name: MetricRecord({**metrics, EXAMPLES: examples})})

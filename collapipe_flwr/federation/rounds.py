"""What a round is, as values: the plan that opens it and the record that closes it.

:class:`RoundPlanner` is the seam between the strategy and whatever decides: DSSDA over described
clusters, priors for clients that describe nothing, or a test.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from flwr.app import ArrayRecord, MetricRecord

from collapipe_flwr.core.domain import ClusterPlan, Plan
from collapipe_flwr.federation.telemetry import ClusterTelemetry
from collapipe_flwr.transport.weights import TransferStats


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundPlan:
    """Which node is which cluster this round, and what the scheduler decided for them.

    A binding plan is executed: clusters that it leaves out are not asked. One that is not
    binding rests on assumptions about clients that described nothing, and everyone is asked.
    """

    server_round: int
    plan: Plan | None
    cluster_ids: Mapping[int, str]
    binding: bool

    def cluster_plan(self, node_id: int) -> ClusterPlan | None:
        """The plan of one node's cluster, None where it has none."""
        return None if self.plan is None else self.plan.cluster(self.cluster_ids[node_id])

    def takes_part(self, node_id: int) -> bool:
        """Whether the node is asked to train."""
        return not self.binding or self.cluster_plan(node_id) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedRound:
    """A round after aggregation, as a planner may learn from it; mappings are by cluster id."""

    plan: RoundPlan
    before: ArrayRecord
    after: ArrayRecord | None  # None where the inner strategy dropped the round
    models: Mapping[str, ArrayRecord]  # of the clusters that replied
    examples: Mapping[str, float]
    telemetry: Mapping[str, ClusterTelemetry]
    failures: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What the round came to: the plan priced under the world's state of that round.

    Energy and queues are by cluster and device; the queues are those after the round.
    """

    latency_s: float | None = None
    energy_j: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    queues_j: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


@runtime_checkable
class RoundPlanner(Protocol):
    """Decides before a round and learns after it."""

    def plan(self, server_round: int, nodes: Sequence[int], arrays: ArrayRecord) -> RoundPlan:
        """The plan for ``nodes``; raises ScheduleError where none exists."""

    def settle(self, closed: ClosedRound) -> Outcome:
        """Price what happened, update queues and estimates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundRecord:
    """Everything worth keeping of one round; handed to ``on_round``."""

    server_round: int
    plan: Plan | None
    asked: tuple[str, ...]  # cluster ids
    failures: Mapping[str, str]  # cluster id: its sentence
    train_metrics: Mapping[str, float | Sequence[float]]
    telemetry: Mapping[str, ClusterTelemetry]
    outcome: Outcome
    flower_bytes_sent: int
    flower_bytes_received: int

    @property
    def link_bytes(self) -> dict[str, int]:
        """Bytes on the links of all clusters, by kind ("d2d", "d2e")."""
        totals: dict[str, int] = {}
        for told in self.telemetry.values():
            for kind, count in told.link_bytes.items():
                totals[kind] = totals.get(kind, 0) + count
        return totals

    def executed(self, cluster_id: str) -> ClusterPlan | None:
        """The plan by which a cluster ended the round."""
        told = self.telemetry.get(cluster_id)
        planned = None if self.plan is None else self.plan.cluster(cluster_id)
        return (told.replanned if told else None) or planned

    @property
    def moved(self) -> TransferStats:
        """Weights that travelled between control units and their devices, or did not have to."""
        return sum((told.moved for told in self.telemetry.values()), TransferStats())

    @property
    def fresh_examples(self) -> int:
        """Examples of all clusters that arrived since the last round."""
        return sum(told.fresh_examples for told in self.telemetry.values())

    @property
    def prequential_loss(self) -> float | None:
        """Mean loss on fresh examples before training on them; None where nothing is fresh."""
        told = [t for t in self.telemetry.values() if t.prequential_loss is not None]
        count = sum(t.fresh_examples for t in told)
        losses = (t.fresh_examples * (t.prequential_loss or 0.0) for t in told)
        return sum(losses) / count if count else None


def metrics_as_dict(metrics: MetricRecord | None) -> dict[str, float | Sequence[float]]:
    """The aggregated metrics as plain numbers."""
    return dict(metrics.items()) if metrics is not None else {}

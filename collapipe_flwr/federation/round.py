"""One round: the plan that opens it, what came back (`open_round`), and the record of it all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from flwr.app import ArrayRecord, Message, MetricRecord

from collapipe_flwr.core.domain import ClusterPlan, Plan
from collapipe_flwr.core.incident import LOST, Incident
from collapipe_flwr.core.json_codec import to_plain
from collapipe_flwr.core.links import LinkReport
from collapipe_flwr.core.measurements import ClusterMeasurement, TransferStats
from collapipe_flwr.core.outcome import Movement, RoundOutcome
from collapipe_flwr.federation.products import ShownProducts
from collapipe_flwr.federation.records import Sent
from collapipe_flwr.reporting.events import RoundEvent, cluster_json, link_json

_UNKNOWN = "it does not describe its cluster: look into its log"


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundPlan:
    """The clusters behind the nodes of a round, and the scheduler's plan for them.

    Clusters that the plan leaves out are not asked; without a plan all are, and train whole models.
    ``left_out`` says why clusters, or nodes that described none, could not be planned.
    """

    server_round: int
    plan: Plan | None
    cluster_ids: Mapping[int, str]
    bundles: frozenset[str] = frozenset()  # clusters, see ClusterProfile
    left_out: Mapping[str, str] = field(default_factory=dict)
    ranks: Mapping[str, int] = field(default_factory=dict)  # of clusters with their own

    @classmethod
    def of_nobody(cls, server_round: int, unknown: Sequence[int] = ()) -> RoundPlan:
        """Make the plan of a round in which no cluster is asked."""
        return cls(
            server_round=server_round,
            plan=None,
            cluster_ids={},
            left_out={f"node-{node}": _UNKNOWN for node in unknown},
        )

    def cluster_plan(self, node_id: int) -> ClusterPlan | None:
        """Return the plan of a node's cluster, if it has one."""
        cluster_id = self.cluster_ids.get(node_id)
        return (
            None if self.plan is None or cluster_id is None else self.plan.find_cluster(cluster_id)
        )

    def takes_part(self, node_id: int) -> bool:
        planned = self.plan is None or self.cluster_plan(node_id) is not None
        return planned and node_id in self.cluster_ids


@dataclass(slots=True, kw_only=True)
class ClosedRound:
    """A round whose replies are in; mappings are by cluster id.

    ``replies`` are those for the inner strategy, in order of arrival: usable ones and errors. With
    ``products``, adapters of all models are shown as these.
    """

    plan: RoundPlan
    before: ArrayRecord
    after: ArrayRecord | None = None  # None where the inner strategy dropped the round
    sent: list[Sent] = field(default_factory=list)
    replies: list[Message] = field(default_factory=list)
    models: dict[str, ArrayRecord] = field(default_factory=dict)  # unsplit, of those that replied
    examples: dict[str, float] = field(default_factory=dict)
    telemetry: dict[str, ClusterMeasurement] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    late: list[Sent] = field(default_factory=list)  # that may join a later round
    joined: dict[str, ClusterPlan] = field(default_factory=dict)  # earlier plans that end now
    incidents: list[Incident] = field(default_factory=list)  # besides failures
    received_bytes: int = 0
    movement: Movement = field(default_factory=Movement)
    products: ShownProducts | None = None
    adapter_error: float | None = None  # of the global adapters, relative to the mean product


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundRecord:
    """The record of one round, passed to ``on_round``."""

    server_round: int
    plan: Plan | None
    asked: tuple[str, ...]  # cluster ids
    train_metrics: Mapping[str, float | Sequence[float]]
    telemetry: Mapping[str, ClusterMeasurement]
    outcome: RoundOutcome
    flower_bytes_sent: int
    flower_bytes_received: int
    incidents: tuple[Incident, ...] = ()
    joined: Mapping[str, ClusterPlan] = field(default_factory=dict)  # late
    adapter_error: float | None = None  # of aggregated products that got the global rank

    def __str__(self) -> str:
        """Write a line for the round, then one per cluster: devices, blocks, micro-batches."""
        numbers = (f"{k} {v:.4g}" for k, v in self.train_metrics.items() if isinstance(v, float))
        lines = [f"round {self.server_round}: {', '.join(numbers) or 'nothing was aggregated'}"]
        for plan in filter(None, map(self.executed, sorted(self.asked))):
            held = ", ".join(
                f"{' and '.join(s.device_ids)} blocks {s.first_block}-{s.stop_block - 1}"
                for s in plan.segments
            )
            cut = f"{plan.micro_batches} x {plan.micro_batch_size} examples"
            lines.append(f"  {plan.cluster_id}: {held}; {cut}, predicted {plan.latency_s:.3g} s")
        return "\n".join([*lines, *(f"  {incident}" for incident in self.incidents)])

    @property
    def failures(self) -> dict[str, str]:
        """Why clusters have no part in the round, by cluster."""
        return {each.cluster: each.text for each in self.incidents if each.kind == LOST}

    @property
    def link_bytes(self) -> dict[str, int]:
        """Bytes on the links of all clusters, by kind ("d2d", "d2e")."""
        totals: Counter[str] = Counter()
        for measured in self.telemetry.values():
            totals.update(measured.link_bytes)
        return totals

    def event(self, wall_s: float, *, paced: bool = False) -> RoundEvent:
        """Make the line of ``events.jsonl``, before the round's evaluation.

        ``paced`` says whether senders kept to planned rates.
        """
        links, metrics, outcome = self.link_bytes, self.train_metrics, self.outcome
        loss = metrics.get("train_loss", metrics.get("loss"))  # as clusters, or our app, name it
        spent = {name: measured.epsilon for name, measured in self.telemetry.items()}
        return RoundEvent(
            round_index=self.server_round,
            plan=None if self.plan is None else to_plain(self.plan),
            loss=loss if isinstance(loss, float) else None,
            metrics={},
            predicted_latency_s=None if self.plan is None else self.plan.latency_s,
            latency_s=outcome.latency_s,
            clusters={
                found.cluster_id: cluster_json(self.planned(found.cluster_id), found)
                for found in outcome.clusters
            },
            energy_j=_flatten(outcome.energy_j),
            queues_j=_flatten(outcome.queues_j),
            bytes={
                "d2d": links["d2d"],
                "d2e": links["d2e"],
                "flower": self.flower_bytes_sent + self.flower_bytes_received,
                "weights": self.moved.sent_bytes + self.moved.received_bytes,
                "spared": self.moved.spared_bytes,
            },
            links=tuple(map(link_json, self.links(paced=paced))),
            memory_bytes={
                role if role.startswith(f"{name}/") else f"{name}/{role}": size
                for name, measured in self.telemetry.items()
                for role, size in measured.peak_memory_bytes.items()
            },
            fresh_examples=self.fresh_examples,
            prequential_loss=self.prequential_loss,
            wall_s=wall_s,
            incidents=self.incidents,
            epsilon={name: epsilon for name, epsilon in spent.items() if epsilon is not None},
            spared={name: asdict(spared) for name, spared in outcome.spared.items()},
            adapter_error=self.adapter_error,
        )

    def links(self, *, paced: bool) -> tuple[LinkReport, ...]:
        """Return every hop of every cluster that replied; see `ClusterMeasurement.report_links`."""
        return tuple(
            link
            for name, measured in self.telemetry.items()
            if (plan := self.executed(name)) is not None
            for link in measured.report_links(plan, paced=paced)
        )

    def executed(self, cluster_id: str) -> ClusterPlan | None:
        """Return the plan with which a cluster finished; an earlier round's if it joined late."""
        measured = self.telemetry.get(cluster_id)
        return (measured.replanned if measured else None) or self.planned(cluster_id)

    def planned(self, cluster_id: str) -> ClusterPlan | None:
        """Return the plan with which a cluster began."""
        now = None if self.plan is None else self.plan.find_cluster(cluster_id)
        return self.joined.get(cluster_id, now)

    @property
    def moved(self) -> TransferStats:
        """Weights transferred between control units and devices, or spared."""
        return sum((measured.moved for measured in self.telemetry.values()), TransferStats())

    @property
    def fresh_examples(self) -> int:
        """Examples that arrived since the last round, over all clusters."""
        return sum(measured.fresh_examples for measured in self.telemetry.values())

    @property
    def prequential_loss(self) -> float | None:
        """Mean loss on fresh examples before training on them, if there are any."""
        measured = [t for t in self.telemetry.values() if t.prequential_loss is not None]
        count = sum(t.fresh_examples for t in measured)
        losses = (t.fresh_examples * (t.prequential_loss or 0.0) for t in measured)
        return sum(losses) / count if count else None


def _flatten(nested: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Flatten cluster, device to device: the ids of devices contain that of their cluster."""
    return {device: value for devices in nested.values() for device, value in devices.items()}


def metrics_as_dict(metrics: MetricRecord | None) -> dict[str, float | Sequence[float]]:
    return dict(metrics.items()) if metrics is not None else {}

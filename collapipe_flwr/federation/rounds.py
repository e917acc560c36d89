"""The values of a round: the plan that opens it and the record that closes it.

:class:`RoundPlanner` is the interface between the strategy and its planner.

A cluster cannot know whether the server used its reply, which may be late, refused or lost. So the
server counts the replies that it aggregated (:class:`AcceptedReplies`), and every order to train
names the last of them. The cluster continues from its state at the end of that round, and discards
the results of other rounds since. A round that is repeated has several orders, of which a cluster
may still carry out an old one, so each order is named as well. The counts are part of a checkpoint,
so a resumed run continues from the rounds that the checkpoint's model contains.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

from flwr.app import ArrayRecord, Message, MetricRecord

from collapipe_flwr.core.domain import ClusterPlan, Movement, Plan, RoundOutcome
from collapipe_flwr.core.errors import ProtocolError
from collapipe_flwr.core.incident import LOST, Incident
from collapipe_flwr.core.json_codec import from_json, to_json
from collapipe_flwr.core.links import LinkReport
from collapipe_flwr.core.measurements import ClusterMeasurement, TransferStats
from collapipe_flwr.federation.checkpoint import KEPT_CHECKPOINTS, ComponentState

_UNKNOWN = "it does not describe its cluster: look into its log"


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The accepted rounds of one cluster.

    ``rounds`` is their number, ``last_round`` the server round of the newest, 0 before the first,
    and ``attempt`` which of the orders for it. ``saved`` are the values of ``last_round`` in the
    checkpoints from which the run may resume.
    """

    rounds: int = 0
    last_round: int = 0
    attempt: int = 0
    saved: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Raise ProtocolError for numbers that no count of rounds gives."""
        if not 0 <= self.rounds <= self.last_round or (self.last_round and not self.rounds):
            raise ProtocolError(
                f"{self.rounds} accepted rounds cannot end with round {self.last_round}"
            )

    @property
    def needed(self) -> tuple[int, ...]:
        """The rounds from whose end the cluster may be asked to continue."""
        return (self.last_round, *self.saved)


def new_attempt() -> int:
    """Draw a name for an order that no other order has; of a fixed length."""
    return 2**31 + secrets.randbits(31)


@dataclass(slots=True)
class AcceptedReplies:
    """Counts the accepted rounds of every cluster."""

    clusters: Mapping[str, Progress] = field(default_factory=dict)
    saved: tuple[Mapping[str, int], ...] = ()  # the last rounds in each checkpoint, oldest first

    def progress(self, cluster_id: str) -> Progress:
        """Return the progress that an order to train contains."""
        saved = {rounds[cluster_id] for rounds in self.saved if cluster_id in rounds}
        return replace(self.clusters.get(cluster_id, Progress()), saved=tuple(sorted(saved)))

    def holds(self, server_round: int) -> bool:
        """Return whether this round or a later one was accepted: then it is of another run."""
        return any(known.last_round >= server_round for known in self.clusters.values())

    def forget(self) -> None:
        """Count from the start again."""
        self.clusters, self.saved = {}, ()

    def accept(self, cluster_id: str, server_round: int, attempt: int = 0) -> None:
        """Count a round whose reply, to this order, is part of the global model."""
        rounds = self.progress(cluster_id).rounds + 1
        now = Progress(rounds=rounds, last_round=server_round, attempt=attempt)
        self.clusters = {**self.clusters, cluster_id: now}

    def dump(self) -> ComponentState:
        """Return the counts; later progress includes the rounds that this checkpoint needs."""
        now = {name: progress.last_round for name, progress in self.clusters.items()}
        self.saved = (*self.saved, now)[-KEPT_CHECKPOINTS:]
        return ComponentState(text=to_json(self))

    def load(self, memory: ComponentState) -> None:
        """Restore from a checkpoint; raises ProtocolError for other data."""
        kept = from_json(AcceptedReplies, memory.text, "the accepted rounds of the checkpoint")
        self.clusters, self.saved = kept.clusters, kept.saved


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
        return None if self.plan is None or cluster_id is None else self.plan.cluster(cluster_id)

    def takes_part(self, node_id: int) -> bool:
        planned = self.plan is None or self.cluster_plan(node_id) is not None
        return planned and node_id in self.cluster_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """A training message as it was sent."""

    node_id: int
    cluster_id: str
    message: Message
    content_bytes: int
    arrays: ArrayRecord = field(default_factory=ArrayRecord)  # of a model to split
    updates: str = "fp32"  # the codec of the reply


@dataclass(slots=True, kw_only=True)
class ClosedRound:
    """A round whose replies are in; mappings are by cluster id.

    ``replies`` are those for the inner strategy, in order of arrival: usable ones and errors.
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


@runtime_checkable
class RoundPlanner(Protocol):
    """Plans a round, and learns from its result."""

    def plan(self, server_round: int, nodes: Sequence[int]) -> RoundPlan:
        """Return the plan for ``nodes``; raises ScheduleError if there is none."""

    def settle(self, closed: ClosedRound) -> RoundOutcome:
        """Price the round, and update queues and estimates."""


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

    def links(self, *, paced: bool) -> tuple[LinkReport, ...]:
        """Return every hop of every cluster that replied; see `ClusterMeasurement.links`."""
        return tuple(
            link
            for name, measured in self.telemetry.items()
            if (plan := self.executed(name)) is not None
            for link in measured.links(plan, paced=paced)
        )

    def executed(self, cluster_id: str) -> ClusterPlan | None:
        """Return the plan with which a cluster finished; an earlier round's if it joined late."""
        measured = self.telemetry.get(cluster_id)
        return (measured.replanned if measured else None) or self.planned(cluster_id)

    def planned(self, cluster_id: str) -> ClusterPlan | None:
        """Return the plan with which a cluster began."""
        now = None if self.plan is None else self.plan.cluster(cluster_id)
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


def metrics_as_dict(metrics: MetricRecord | None) -> dict[str, float | Sequence[float]]:
    return dict(metrics.items()) if metrics is not None else {}

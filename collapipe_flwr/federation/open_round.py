"""One round between asking and aggregating: messages out, replies in, edge sessions held.

This is where a message becomes a cluster's own and a reply becomes a whole model again.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace

from flwr.app import ArrayRecord, Message, RecordDict

from collapipe_flwr.core.domain import ClusterPlan
from collapipe_flwr.core.errors import LinkError, ProtocolError, RunError
from collapipe_flwr.federation.arrays import averaged_keys, averaging_view, restore
from collapipe_flwr.federation.messages import (
    LATE,
    Sent,
    as_failed,
    sender_of,
    sentence,
    with_content,
)
from collapipe_flwr.federation.records import (
    RoundAssignment,
    content_bytes,
    examples_of,
    take_telemetry,
    write_assignment,
    write_progress,
)
from collapipe_flwr.federation.rounds import AcceptedRounds, ClosedRound, RoundPlan
from collapipe_flwr.federation.split import SplitRound
from collapipe_flwr.federation.telemetry import ClusterTelemetry

log = logging.getLogger("flwr.collapipe")


@dataclass(slots=True, kw_only=True)
class Received:
    """The replies of a round, in their order of arrival, as the inner strategy may see them."""

    sent: list[Sent]
    replies: list[Message] = field(default_factory=list)  # usable ones and errors
    models: dict[str, ArrayRecord] = field(default_factory=dict)  # whole, by cluster
    examples: dict[str, float] = field(default_factory=dict)  # by cluster
    telemetry: dict[str, ClusterTelemetry] = field(default_factory=dict)  # by cluster
    failures: dict[str, str] = field(default_factory=dict)  # by cluster
    content_bytes: int = 0

    @property
    def heaviest(self) -> ArrayRecord:
        """The model from the most examples; among equals the first by name."""
        names = sorted(self.models, key=lambda name: (-self.examples[name], name))
        return self.models[names[0]] if names else ArrayRecord()


class OpenRound:
    """A round whose messages are out; :meth:`close` ends its edge sessions.

    Messages tell every cluster its progress by ``accepted``; :meth:`accept` adds to it.
    """

    def __init__(
        self,
        plan: RoundPlan,
        template: ArrayRecord,
        split: SplitRound | None,
        accepted: AcceptedRounds,
    ) -> None:
        self.plan = plan
        self.template = template
        self.constant = split.constant_keys if split is not None else frozenset()
        self.sent: list[Sent] = []
        self._split = split
        self._accepted = accepted

    def address(self, messages: Iterable[Message]) -> list[Message]:
        """A message of its own for every node that takes part; raises LinkError, RunError."""
        for message in messages:
            if self.plan.takes_part(message.metadata.dst_node_id):
                self.sent.append(self._address(message))
        return [sent.message for sent in self.sent]

    def receive(self, replies: Iterable[Message], weighted_by: str) -> Received:
        """Sort the replies; one that cannot be used becomes an error for the inner strategy."""
        received = Received(sent=self.sent)
        for reply, sent in self._attributed(replies):
            received.replies.append(self._receive(reply, sent, weighted_by, received))
        for sent in self.sent:
            if sent.cluster_id not in received.models and sent.cluster_id not in received.failures:
                received.failures[sent.cluster_id] = "no reply before the round's timeout"
        return received

    def refuse_total_loss(self, received: Received) -> None:
        """Raise RunError if clusters were asked and none gave a usable reply.

        One that was late by plan is no loss: the next round waits longer for it.
        """
        late = (r for r in received.replies if r.has_error() and r.error.code == LATE)
        if not self.sent or received.models or any(late):
            return
        cluster_id, why = next(iter(received.failures.items()))
        raise RunError(
            f"round {self.plan.server_round}: all {len(self.sent)} clusters failed, "
            f"first {cluster_id}: {why}"
        )

    def accept(self, received: Received) -> None:
        """The replies are part of the global model: their clusters continue from this round."""
        for cluster_id in received.models:
            if self._split is not None:
                self._split.accept(cluster_id)
            self._accepted.accept(cluster_id, self.plan.server_round)

    def settled(self, received: Received, after: ArrayRecord | None) -> ClosedRound:
        """The round as its planner may learn from it."""
        return ClosedRound(
            plan=self.plan,
            before=self.template,
            after=after or None,
            models=received.models,
            examples=received.examples,
            telemetry=received.telemetry,
            failures=received.failures,
        )

    def close(self) -> None:
        """End the edge sessions."""
        if self._split is not None:
            self._split.close()

    def _address(self, message: Message) -> Sent:
        node_id = message.metadata.dst_node_id
        cluster_id = self.plan.cluster_ids[node_id]
        plan = self.plan.cluster_plan(node_id)
        content = restored(message.content, self.template, self.constant)
        task = None
        if self._split is not None:
            name, arrays = only_arrays(content, "the inner strategy's message")
            task = self._split.open(cluster_id, arrays, edge_depth(plan))
            content[name] = self._split.for_cluster(arrays)
        assignment = RoundAssignment(
            server_round=self.plan.server_round,
            cluster_id=cluster_id,
            plan=plan,
            split=task,
        )
        content = write_assignment(content, assignment)
        content = write_progress(content, self._accepted.progress(cluster_id))
        return Sent(
            node_id=node_id,
            cluster_id=cluster_id,
            message=readdressed(message, content),
            content_bytes=content_bytes(content),
        )

    def _attributed(self, replies: Iterable[Message]) -> list[tuple[Message, Sent]]:
        """Replies with who was asked; split rounds in a fixed order, so that sums repeat."""
        pairs = []
        for reply in replies:
            sent = sender_of(reply, self.sent)
            if sent is None:
                log.warning("a reply of node %s was not asked for", reply.metadata.src_node_id)
            else:
                pairs.append((reply, sent))
        return sorted(pairs, key=lambda pair: pair[1].cluster_id) if self._split else pairs

    def _receive(self, reply: Message, sent: Sent, weighted_by: str, received: Received) -> Message:
        name = sent.cluster_id
        if reply.has_error():
            received.failures[name] = why = sentence(reply.error)
            log.warning("cluster %s failed: %s", name, why)
            return reply
        received.content_bytes += content_bytes(reply.content)
        try:
            examples = examples_of(reply.content, weighted_by)
            if self._split is not None:
                check_weight(examples, weighted_by, name)
            content, telemetry = self._unpack(reply.content, name)
            shown = viewed(content, self.constant)
        except LinkError as error:
            received.failures[name] = str(error)
            log.warning("the reply of cluster %s is unusable: %s", name, error)
            return as_failed(sent, str(error))
        received.models[name] = next(iter(content.array_records.values()), ArrayRecord())
        received.examples[name] = examples
        if telemetry is not None:
            received.telemetry[name] = telemetry
        return with_content(reply, shown)

    def _unpack(
        self, content: RecordDict, cluster_id: str
    ) -> tuple[RecordDict, ClusterTelemetry | None]:
        """The whole model and the whole telemetry; raises ProtocolError, LinkError."""
        content, telemetry = take_telemetry(content)
        if telemetry is not None and telemetry.cluster_id != cluster_id:
            raise ProtocolError(f"cluster {cluster_id} sent telemetry of {telemetry.cluster_id!r}")
        if self._split is not None:
            name, arrays = only_arrays(content, f"the reply of cluster {cluster_id}")
            content[name] = self._split.join(cluster_id, arrays, self.template)
            if telemetry is not None:
                telemetry = replace(telemetry, edge=self._split.report(cluster_id))
        return content, telemetry


def check_weight(examples: float, weighted_by: str, cluster_id: str) -> None:
    """Raise ProtocolError for a weight that would spoil the average."""
    if not (math.isfinite(examples) and examples > 0):
        raise ProtocolError(
            f"cluster {cluster_id} replied with {weighted_by} = {examples:g}, it must be > 0"
        )


def edge_depth(plan: ClusterPlan | None) -> int:
    """Micro-batches in flight that the plan gives the edge, the last stage."""
    return plan.warmup_depth[-1] if plan is not None and plan.warmup_depth else 1


def only_arrays(content: RecordDict, what: str) -> tuple[str, ArrayRecord]:
    """Name and arrays of the one ArrayRecord; raises ProtocolError if there is not just one."""
    found = list(content.array_records.items())
    if len(found) != 1:
        raise ProtocolError(f"{what} must hold exactly one ArrayRecord, got {len(found)}")
    return found[0]


def viewed(content: RecordDict, constant: Collection[str]) -> RecordDict:
    """A new RecordDict whose arrays are what the inner strategy may average."""
    shown = RecordDict(dict(content))
    for name, record in content.array_records.items():
        shown[name] = averaging_view(record, constant)
    return shown


def restored(
    content: RecordDict, template: ArrayRecord, constant: Collection[str] = ()
) -> RecordDict:
    """A new RecordDict with arrays of the global model in their own dtypes, all records copied."""
    averaged = set(averaged_keys(template, constant))
    own = RecordDict()
    for name, record in content.items():
        if isinstance(record, ArrayRecord) and set(record) == averaged:
            record = restore(record, template, template)
        own[name] = record.copy()
    return own


def readdressed(message: Message, content: RecordDict) -> Message:
    """A new message to the same node with other content."""
    meta = message.metadata
    return Message(
        content, meta.dst_node_id, meta.message_type, ttl=meta.ttl, group_id=meta.group_id
    )

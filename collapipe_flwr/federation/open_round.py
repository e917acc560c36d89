"""One round between configuration and aggregation: each message gets its plan and its part of the
model, each reply is joined with the edge's part.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from flwr.app import ArrayRecord, Message, RecordDict

from collapipe_flwr.core.errors import Diverged, LinkError, ProtocolError
from collapipe_flwr.federation import messages, records
from collapipe_flwr.federation.arrays import inner_view, not_finite, shifted
from collapipe_flwr.federation.rounds import AcceptedRounds, ClosedRound, RoundPlan, Sent
from collapipe_flwr.federation.split import PersonalArrays, SplitRound
from collapipe_flwr.federation.telemetry import ClusterTelemetry
from collapipe_flwr.pipeline.config import PassesDone
from collapipe_flwr.reporting.progress import ClusterProgress

log = logging.getLogger("flwr.collapipe")
_UNKNOWN = "it does not describe its cluster: look into its log"
_ONE_MODEL = ": leave out the split model, or choose a strategy that sends the model and no more"


class OpenRound:
    """A round whose messages were sent; :meth:`close` ends its edge sessions.

    Messages carry each cluster's progress from ``accepted``; :meth:`accept` updates it.
    """

    def __init__(
        self,
        plan: RoundPlan,
        template: ArrayRecord,
        split: SplitRound | None,
        accepted: AcceptedRounds,
        personal: PersonalArrays,
        *,
        weighted_by: str,
        waits_for_late: bool,
    ) -> None:
        self.plan = plan
        self._weighted_by = weighted_by
        self._waits_for_late = waits_for_late
        self.template = template
        self._hidden = split.model.hidden_keys if split is not None else frozenset[str]()
        self.sent: list[Sent] = []
        self._split = split
        self._accepted = accepted
        self._personal = personal

    def address(self, asked: Iterable[Message]) -> list[Message]:
        """The messages to the clusters that take part; raises LinkError, RunError."""
        for message in asked:
            if self.plan.takes_part(message.metadata.dst_node_id):
                self.sent.append(self._message_for(message))
        return [sent.message for sent in self.sent]

    def progress(self) -> dict[str, ClusterProgress]:
        """The progress of the clusters that were asked, as far as the edge knows it."""
        passes = self._split.passes() if self._split is not None else {}
        found = {}
        for sent in list(self.sent):
            done = passes.get(sent.cluster_id, PassesDone())
            progress = ClusterProgress(trained=done.trained, tested=done.tested)
            if (plan := self.plan.cluster_plan(sent.node_id)) is not None:
                progress = replace(
                    progress,
                    of=plan.local_steps * plan.micro_batches,
                    per_step=plan.micro_batches,
                    examples=plan.micro_batch_size,
                    predicted_s=plan.latency_s,
                )
            found[sent.cluster_id] = progress
        return found

    def receive(self, replies: Iterable[Message]) -> ClosedRound:
        """Sort the replies; unusable ones become errors for the inner strategy."""
        closed = ClosedRound(plan=self.plan, before=self.template, sent=self.sent)
        closed.failures |= {f"node-{node}": _UNKNOWN for node in self.plan.unknown}
        for reply, sent in self._attributed(replies):
            late = reply.has_error() and reply.error.code == messages.LATE
            if sent is not None and late and self._waits_for_late:
                closed.late.append(sent)
                continue
            shown = reply if sent is None else self._receive(reply, sent, closed)
            closed.replies.append(shown)
        self.give_up(closed, closed.models.keys() | {sent.cluster_id for sent in closed.late})
        return closed

    def give_up(self, closed: ClosedRound, there: Collection[str]) -> None:
        """Count the clusters as failed that were asked and are not ``there``, nor late any more."""
        closed.late = [sent for sent in closed.late if sent.cluster_id in there]
        for name in (sent.cluster_id for sent in self.sent):
            if name not in there:
                closed.failures.setdefault(name, "no reply before the round's timeout")

    def total_loss(self, closed: ClosedRound) -> str:
        """The error message for a round whose clusters all failed, else empty.

        A cluster that is late by plan has not failed: the next round waits longer for it.
        """
        late = any(r.has_error() and r.error.code == messages.LATE for r in closed.replies)
        asked = len(self.sent) or len(self.plan.unknown)
        if not asked or closed.models or closed.late or late:
            return ""
        cluster_id, why = next(iter(closed.failures.items()))
        return (
            f"round {self.plan.server_round}: all {asked} clusters failed, "
            f"first {cluster_id}: {why}"
        )

    def receive_late(self, reply: Message, sent: Sent, closed: ClosedRound) -> bool:
        """Add a reply to this round to a later one, see `late_updates`.

        Returns whether it can be used; if not, ``closed.failures`` has the reason.
        """
        alone = ClosedRound(plan=self.plan, before=self.template, sent=[sent])
        shown, name = self._receive(reply, sent, alone), sent.cluster_id
        closed.received_bytes += alone.received_bytes
        closed.remarks += alone.remarks
        late_by = closed.plan.server_round - self.plan.server_round
        if name not in alone.models:
            closed.failures[name] = f"late by {late_by} rounds: {alone.failures[name]}"
            closed.replies += [] if late_by else [shown]
            return False
        weight = 1.0 / math.sqrt(1.0 + late_by)
        moved = shifted(alone.models[name], self.template, closed.before)
        examples = weight * records.examples_of(shown.content, self._weighted_by)
        content = messages.weighing(shown.content, self._weighted_by, examples)
        content[next(iter(content.array_records))] = inner_view(moved, self._hidden).copy()
        closed.replies.append(messages.with_content(shown, content))
        closed.models[name], closed.examples[name] = moved, weight * alone.examples[name]
        closed.telemetry |= alone.telemetry
        if not late_by:  # its round had nothing else, or was the last
            return True
        if (plan := self.plan.cluster_plan(sent.node_id)) is not None:
            closed.joined[name] = plan
        remark = f"cluster {name} joins late by {late_by} rounds, weight {weight:.2f}"
        closed.remarks.append(remark)
        closed.joined_late.append(remark)
        return True

    def accept(self, closed: ClosedRound) -> None:
        """Count the replies as part of the global model, from which clusters continue.

        Late updates are accepted one by one.
        """
        for sent in self.sent:
            if sent.cluster_id in closed.models and sent not in closed.late:
                self.accept_cluster(sent.cluster_id, closed.models[sent.cluster_id])

    def accept_cluster(self, cluster_id: str, model: ArrayRecord) -> None:
        if self._split is not None:
            self._split.accept(cluster_id)
            self._personal.keep(cluster_id, model, self._split.model.personal_keys)
        self._accepted.accept(cluster_id, self.plan.server_round)

    def close(self, keep: Collection[str] = ()) -> None:
        """End the edge sessions except those of the clusters to ``keep``."""
        if self._split is not None:
            self._split.close(keep)

    def _message_for(self, message: Message) -> Sent:
        node_id = message.metadata.dst_node_id
        cluster_id = self.plan.cluster_ids[node_id]
        plan = self.plan.cluster_plan(node_id)
        exact = self._split is not None
        content = messages.restored(message.content, self.template, self._hidden, exact=exact)
        task = None
        if self._split is not None:
            name, arrays = messages.only_arrays(content, "the inner strategy's message", _ONE_MODEL)
            content[name] = self._personal.insert(cluster_id, arrays)
            depth = plan.warmup_depth[-1] if plan is not None and plan.warmup_depth else 1
            task = self._split.open(cluster_id, name, content, depth)
        assignment = records.RoundAssignment(
            server_round=self.plan.server_round,
            cluster_id=cluster_id,
            plan=plan,
            split=task,
            bundles=task is not None and cluster_id in self.plan.bundles,
            progress=self._accepted.progress(cluster_id),
        )
        content = records.write_assignment(content, assignment)
        return Sent(
            node_id=node_id,
            cluster_id=cluster_id,
            message=messages.readdressed(message, content),
            content_bytes=records.content_bytes(content),
        )

    def _attributed(self, replies: Iterable[Message]) -> Sequence[tuple[Message, Sent | None]]:
        """Pair replies with their messages; split rounds in a fixed order, so that sums repeat.

        A reply to no message of this round is passed to the inner strategy if the model is not
        split.
        """
        pairs = [(reply, messages.sender_of(reply, self.sent)) for reply in replies]
        for reply, sent in pairs:
            if sent is None:
                log.warning("a reply of node %s was not asked for", reply.metadata.src_node_id)
        if self._split is None:
            return pairs
        ours = [(reply, sent) for reply, sent in pairs if sent is not None]
        ours.sort(key=lambda pair: pair[1].cluster_id)
        return ours

    def weighed(self, reply: Message) -> Message:
        """A reply to an evaluation; an error if its weight is unusable."""
        sent = messages.sender_of(reply, self.sent)
        if sent is None or reply.has_error():
            return reply
        try:
            messages.check_weight(reply.content, self._weighted_by, sent.cluster_id)
        except ProtocolError as error:
            log.warning("the evaluation of cluster %s is unusable: %s", sent.cluster_id, error)
            return messages.as_failed(sent, error)
        return reply

    def _receive(self, reply: Message, sent: Sent, closed: ClosedRound) -> Message:
        name = sent.cluster_id
        if reply.has_error():
            closed.failures[name] = why = messages.error_text(reply.error)
            log.warning("cluster %s failed: %s", name, why)
            return reply
        closed.received_bytes += records.content_bytes(reply.content)
        try:
            content, telemetry = self._unpack(reply.content, name)
            counted = messages.counted_examples(self.plan.cluster_plan(sent.node_id), telemetry)
            if counted is not None and telemetry is not None:
                content = self._capped(content, counted, name, closed)
                telemetry = replace(telemetry, examples=min(telemetry.examples, counted))
            check = messages.check_possible if self._split is None else messages.check_weight
            examples = check(content, self._weighted_by, name)
            shown = messages.viewed(content, self._hidden)
        except (Diverged, LinkError) as error:
            closed.failures[name] = str(error)
            log.warning("the reply of cluster %s is unusable: %s", name, error)
            return messages.as_failed(sent, error)
        closed.models[name] = next(iter(content.array_records.values()), ArrayRecord())
        closed.examples[name] = examples
        if telemetry is not None:
            closed.telemetry[name] = telemetry
        return messages.with_content(reply, shown)

    def _capped(
        self, content: RecordDict, counted: int, cluster_id: str, closed: ClosedRound
    ) -> RecordDict:
        """The reply with the examples that the edge counted, where it claims more."""
        claimed = records.examples_of(content, records.EXAMPLES)
        if self._weighted_by != records.EXAMPLES or not claimed > counted:
            return content
        remark = (
            f"cluster {cluster_id} claims {claimed:g} examples, but the edge counted {counted}"
            f" at most: its reply weighs {counted}"
        )
        log.warning("%s", remark)
        closed.remarks.append(remark)
        return messages.weighing(content, records.EXAMPLES, counted)

    def _unpack(
        self, content: RecordDict, cluster_id: str
    ) -> tuple[RecordDict, ClusterTelemetry | None]:
        """The unsplit model and the complete telemetry; raises Diverged, LinkError."""
        content, telemetry = records.take_telemetry(content)
        if telemetry is not None and (others := telemetry.cluster_ids - {cluster_id}):
            raise ProtocolError(f"cluster {cluster_id} sent telemetry of {min(others)!r}")
        if self._split is None:
            for arrays in content.array_records.values():
                if (key := not_finite(arrays, self.template)) is not None:
                    raise Diverged(f"cluster {cluster_id}: {messages.diverged(key)}")
        else:
            name, arrays = messages.only_arrays(content, f"the reply of cluster {cluster_id}")
            content[name] = self._split.join(cluster_id, arrays, self.template)
            if telemetry is not None:
                telemetry = replace(telemetry, edge=self._split.report(cluster_id))
        return content, telemetry

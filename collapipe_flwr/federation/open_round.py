"""A round whose messages were sent: each gets its cluster's plan, each reply is checked.

What the inner strategy sees has passed every check; `round` has the plan and the record.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from flwr.app import ArrayRecord, Message, RecordDict

from collapipe_flwr.core.errors import Diverged, LinkError, ProtocolError, RunError
from collapipe_flwr.core.incident import LATE, Incident
from collapipe_flwr.federation import border, records
from collapipe_flwr.federation.accepted import AcceptedReplies, new_attempt
from collapipe_flwr.federation.arrays import add_change, find_not_finite, inner_view
from collapipe_flwr.federation.products import ShownProducts, convert, with_rank
from collapipe_flwr.federation.records import Sent
from collapipe_flwr.federation.round import ClosedRound, RoundPlan
from collapipe_flwr.federation.split import PersonalArrays, SplitTraining
from collapipe_flwr.federation.updates import EXACT
from collapipe_flwr.models.any_splitter import DescribedModel
from collapipe_flwr.models.spec import PRODUCTS
from collapipe_flwr.pipeline.config import PassesDone
from collapipe_flwr.reporting.progress import ClusterProgress

log = logging.getLogger("flwr.collapipe")
_ONE_MODEL = ": leave out the split model, or choose a strategy that sends the model and no more"


class OpenRound:
    """A round whose messages were sent.

    Messages carry each cluster's progress from ``accepted``; :meth:`accept` updates it.
    """

    def __init__(
        self,
        plan: RoundPlan,
        template: ArrayRecord,
        split: SplitTraining | None,
        accepted: AcceptedReplies,
        personal: PersonalArrays,
        *,
        weighted_by: str,
        waits_for_late: bool,
        averages: bool,
    ) -> None:
        """With ``averages`` all replies must have the same names and shapes."""
        self.plan = plan
        self.attempt = new_attempt()
        self._weighted_by = weighted_by
        self._averages = averages
        self._waits_for_late = waits_for_late
        self.template = template
        self._hidden = split.model.hidden_keys if split is not None else frozenset[str]()
        self.sent: list[Sent] = []
        self._split = split
        self._models = dict[str, DescribedModel]()  # as clusters have it, by id
        self._accepted = accepted
        self._personal = personal

    def address(self, asked: Iterable[Message]) -> list[Message]:
        """Make the messages to the clusters that take part; raises RunError, ConfigError."""
        for message in asked:
            if self.plan.takes_part(message.metadata.dst_node_id):
                self.sent.append(self._address_one(message))
        return [sent.message for sent in self.sent]

    def progress(self, passes: Mapping[str, PassesDone]) -> dict[str, ClusterProgress]:
        """Return the progress of the clusters that were asked, as far as ``passes`` tell it."""
        found = {}
        for sent in list(self.sent):
            done = passes.get(sent.cluster_id)
            if done is None or done.attempt != self.attempt:  # it has not begun this round yet
                done = PassesDone()
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
        closed.failures |= self.plan.left_out
        for reply, sent in self._match_replies(replies):
            late = reply.has_error() and reply.error.code == records.LATE
            if sent is not None and late and self._waits_for_late:
                closed.late.append(sent)
                continue
            shown = reply if sent is None else self._receive(reply, sent, closed)
            closed.replies.append(shown)
        self._show_products(closed)
        self._agree(closed)
        self.give_up(closed, closed.models.keys() | {sent.cluster_id for sent in closed.late})
        return closed

    def _show_products(self, closed: ClosedRound) -> None:
        """Show the adapters of all models as products, if these are aggregated."""
        split = self._split
        if split is None or split.model.aggregate != PRODUCTS or not closed.models:
            return
        products = closed.products = ShownProducts.of(
            split.model, [self.template, *closed.models.values()], whole=split.whole_products
        )
        closed.before = products.show(self.template, split.model)
        for name, arrays in closed.models.items():
            closed.models[name] = products.show(arrays, self._models[name])
        for number, reply in enumerate(closed.replies):
            if reply.has_content() and (sent := records.sender_of(reply, self.sent)) is not None:
                name, arrays = records.only_arrays(reply.content, "a reply")
                content = RecordDict(dict(reply.content))
                content[name] = products.show(arrays, self._models[sent.cluster_id])
                closed.replies[number] = records.with_content(reply, content)

    def give_up(self, closed: ClosedRound, there: Collection[str]) -> None:
        """Count the clusters as failed that were asked and are not ``there``, nor late any more."""
        closed.late = [sent for sent in closed.late if sent.cluster_id in there]
        for name in (sent.cluster_id for sent in self.sent):
            if name not in there:
                closed.failures.setdefault(name, "no reply before the round's timeout")

    def describe_total_loss(self, closed: ClosedRound) -> str:
        """Return the error message for a round whose clusters all failed, else "".

        A cluster that is late by plan has not failed: the next round waits longer for it.
        """
        late = any(r.has_error() and r.error.code == records.LATE for r in closed.replies)
        asked = [sent.cluster_id for sent in self.sent] or list(self.plan.left_out)
        if not asked or closed.models or closed.late or late:
            return ""
        first = next(name for name in closed.failures if name in asked)
        return (
            f"round {self.plan.server_round}: all {len(asked)} clusters failed, "
            f"first {first}: {closed.failures[first]}"
        )

    def receive_late(self, reply: Message, sent: Sent, closed: ClosedRound) -> bool:
        """Add a reply to this round to a later one, see `late`.

        Returns whether it can be used; if not, ``closed.failures`` has the reason.
        """
        alone = ClosedRound(plan=self.plan, before=self.template, sent=[sent])
        shown, name = self._receive(reply, sent, alone), sent.cluster_id
        usable = [other.content for other in closed.replies if other.has_content()]
        shape = border.common_shape(usable) if self._averages else None
        if name in alone.models and shape is not None:
            shown = self._check_agrees(shown, sent, shape, alone)
        closed.received_bytes += alone.received_bytes
        closed.incidents += alone.incidents
        late_by = closed.plan.server_round - self.plan.server_round
        if name not in alone.models:
            closed.failures[name] = f"late by {late_by} rounds: {alone.failures[name]}"
            closed.replies += [] if late_by else [shown]
            return False
        weight = 1.0 / math.sqrt(1.0 + late_by)
        moved = add_change(alone.models[name], self.template, closed.before)
        examples = weight * records.examples_of(shown.content, self._weighted_by)
        content = records.with_weight(shown.content, self._weighted_by, examples)
        content[next(iter(content.array_records))] = inner_view(moved, self._hidden).copy()
        closed.replies.append(records.with_content(shown, content))
        closed.models[name], closed.examples[name] = moved, weight * alone.examples[name]
        closed.telemetry |= alone.telemetry
        if not late_by:  # its round had nothing else, or was the last
            return True
        if (plan := self.plan.cluster_plan(sent.node_id)) is not None:
            closed.joined[name] = plan
        text = f"cluster {name} joins late by {late_by} rounds, weight {weight:.2f}"
        closed.incidents.append(Incident(kind=LATE, text=text))
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
            self._personal.keep(cluster_id, model, self._split.model.personal_keys)
        self._accepted.accept(cluster_id, self.plan.server_round, self.attempt)

    def _address_one(self, message: Message) -> Sent:
        node_id = message.metadata.dst_node_id
        cluster_id = self.plan.cluster_ids[node_id]
        plan = self.plan.cluster_plan(node_id)
        exact = self._split is not None
        content = records.restore_arrays(message.content, self.template, self._hidden, exact=exact)
        task, updates, sent_arrays = None, EXACT, ArrayRecord()
        if self._split is not None:
            name, arrays = records.only_arrays(content, "the inner strategy's message", _ONE_MODEL)
            if any(sent.cluster_id == cluster_id for sent in self.sent):
                raise RunError(f"cluster {cluster_id} is asked twice in a round: give it one node")
            trains = message.metadata.message_type.partition(".")[0] == "train"
            rank = self.plan.ranks.get(cluster_id, 0) if trains else 0
            model = self._models[cluster_id] = with_rank(self._split.model, rank, cluster_id)
            arrays = convert(arrays, self._split.model, model)
            sent_arrays = self._personal.insert(cluster_id, arrays)
            content[name] = sent_arrays.copy()
            task = self._split.make_task(name, content, model)
            updates = task.learning.updates
        assignment = records.TaskAssignment(
            server_round=self.plan.server_round,
            cluster_id=cluster_id,
            plan=plan,
            split=task,
            bundles=task is not None and cluster_id in self.plan.bundles,
            attempt=self.attempt,
            progress=self._accepted.progress(cluster_id),
        )
        content = records.write_assignment(content, assignment)
        return Sent(
            node_id=node_id,
            cluster_id=cluster_id,
            message=records.replace_content(message, content),
            content_bytes=records.content_bytes(content),
            arrays=sent_arrays,
            updates=updates,
        )

    def _match_replies(self, replies: Iterable[Message]) -> Sequence[tuple[Message, Sent | None]]:
        """Pair replies with their messages; split rounds in a fixed order, so that sums repeat.

        A reply to no message of this round is passed to the inner strategy if the model is not
        split.
        """
        pairs: list[tuple[Message, Sent | None]] = []
        for reply in replies:
            sent = records.sender_of(reply, self.sent)
            if sent is None:
                log.warning("a reply of node %s was not asked for", reply.metadata.src_node_id)
            elif any(sent is before for _, before in pairs):
                log.warning("cluster %s replied twice: the first reply counts", sent.cluster_id)
                continue
            pairs.append((reply, sent))
        if self._split is None:
            return pairs
        ours = [(reply, sent) for reply, sent in pairs if sent is not None]
        ours.sort(key=lambda pair: pair[1].cluster_id)
        return ours

    def _agree(self, closed: ClosedRound) -> None:
        """Refuse replies of another shape than most: they cannot be averaged with the others."""
        usable = [reply.content for reply in closed.replies if reply.has_content()]
        if not self._averages or (shape := border.common_shape(usable)) is None:
            return
        for number, reply in enumerate(closed.replies):
            sent = records.sender_of(reply, self.sent)
            if sent is not None and reply.has_content():
                closed.replies[number] = self._check_agrees(reply, sent, shape, closed)

    def _check_agrees(
        self, reply: Message, sent: Sent, shape: border.Shape, closed: ClosedRound
    ) -> Message:
        """Return the reply, or an error if its shape is another; then ``closed`` forgets it."""
        name = sent.cluster_id
        try:
            border.check_shape(reply.content, shape, name)
        except ProtocolError as error:
            for kept in (closed.models, closed.examples, closed.telemetry):
                kept.pop(name, None)
            return self._refuse(reply, sent, error, closed)
        return reply

    def check_evaluations(self, replies: Iterable[Message]) -> list[Message]:
        """Return replies to an evaluation, with errors in the place of unusable ones."""
        names = {sent.node_id: sent.cluster_id for sent in self.sent}
        weighted_by, averages = self._weighted_by, self._averages
        return border.evaluations(replies, names, weighted_by, averages=averages, weighs=True)

    def _receive(self, reply: Message, sent: Sent, closed: ClosedRound) -> Message:
        name, plan = sent.cluster_id, self.plan.cluster_plan(sent.node_id)
        if reply.has_error():
            closed.failures[name] = why = records.error_text(reply.error)
            log.warning("cluster %s failed: %s", name, why)
            return records.with_printable_error(reply)
        closed.received_bytes += records.content_bytes(reply.content)
        try:
            content, telemetry = border.trained(reply.content, sent, plan, self._weighted_by)
            content = self._check_model(content, sent)
            most = int(border.MOST_EXAMPLES)
            telemetry = telemetry and replace(telemetry, examples=min(telemetry.examples, most))
            check = border.check_possible if self._split is None else border.check_weight
            examples = check(content, self._weighted_by, name)
            shown = records.hide_arrays(content, self._hidden)
        except (Diverged, LinkError) as error:
            return self._refuse(reply, sent, error, closed)
        closed.models[name] = next(iter(content.array_records.values()), ArrayRecord())
        closed.examples[name] = examples
        if telemetry is not None:
            closed.telemetry[name] = telemetry
        return records.with_content(reply, shown)

    def _refuse(self, reply: Message, sent: Sent, error: Exception, closed: ClosedRound) -> Message:
        """Put the error in the place of a reply that cannot be used."""
        closed.failures[sent.cluster_id] = str(error)
        log.warning("the reply of cluster %s is unusable: %s", sent.cluster_id, error)
        return records.as_failed(reply, error)

    def _check_model(self, content: RecordDict, sent: Sent) -> RecordDict:
        """Check that the model is like the one sent, and finite; raises Diverged, LinkError."""
        cluster_id = sent.cluster_id
        if self._split is None:
            for arrays in content.array_records.values():
                if (key := find_not_finite(arrays, self.template)) is not None:
                    raise Diverged(f"cluster {cluster_id}: {border.explain_divergence(key)}")
            return content
        name, arrays = records.only_arrays(content, f"the reply of cluster {cluster_id}")
        content[name] = self._split.check_reply(cluster_id, arrays, sent.arrays)
        return content

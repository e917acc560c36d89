"""Messages of a round: their content, the sender and weight of each reply, and why replies failed.

The number of examples weighs a reply in averages. It is the cluster's own claim, as in every Flower
project: only impossible numbers are refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence
from copy import copy

from flwr.app import ArrayRecord, Error, Message, MetricRecord, RecordDict
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS

from collapipe_flwr.core.errors import ProtocolError
from collapipe_flwr.core.texts import make_printable, to_one_line
from collapipe_flwr.federation.arrays import inner_view, load_into, narrow_raw
from collapipe_flwr.federation.records import examples_of
from collapipe_flwr.federation.rounds import Sent

BAD_REPLY = 300  # Error.code of replies that arrived but cannot be used; Flower's own are below 100
LATE = 301  # Error.code of replies that were not waited for
LONGEST_SENTENCE = 400  # characters of a client's error message
_FLOWER_WRAPPING = re.compile(r"\A.*occurred\. Message: ?|^<class '[^']*'>:<'|'>\s*$", re.DOTALL)
NO_SECURE_AGGREGATION = (
    "its ClientApp asks for secure aggregation, which Flower has for its legacy ServerApp only: "
    "leave out secaggplus_mod; Flower's differential privacy works (SECURITY.md)"
)
MOST_EXAMPLES = 1e12  # of one cluster in one round, tokens included


def sender_of(reply: Message, sent: Sequence[Sent]) -> Sent | None:
    """Find the message that a reply answers, by its id, else by node.

    Flower answers for a lost node as node 1.
    """
    asked = reply.metadata.reply_to_message_id
    by_id = (s for s in sent if asked and s.message.metadata.message_id == asked)
    by_node = (s for s in sent if s.node_id == reply.metadata.src_node_id)
    return next(by_id, None) or next(by_node, None)


def error_text(error: Error) -> str:
    """Return a client's error message without Flower's wrapping, on one line of bounded length."""
    reason = make_printable(error.reason or f"error {error.code} without a reason")
    if RECORD_KEY_CONFIGS in reason:
        return NO_SECURE_AGGREGATION
    return to_one_line(_FLOWER_WRAPPING.sub("", reason), LONGEST_SENTENCE)


def with_printable_error(reply: Message) -> Message:
    """Copy an error reply so that it may be logged, whatever the client wrote into it."""
    changed = copy(reply)
    changed.error = Error(reply.error.code, make_printable(reply.error.reason or ""))
    return changed


def explain_divergence(key: str) -> str:
    """Say why a reply with this non-finite array is refused."""
    return (
        f"it returned {key} with values that are not finite: its training diverged; lower the "
        "learning rate"
    )


def as_failed(reply: Message, error: Exception) -> Message:
    """Replace a reply by the error, in Flower's words: every strategy counts a failure."""
    found = Error(BAD_REPLY, f"{type(error)}:<'{error}'>")
    return Message(error=found, metadata=reply.metadata)  # type: ignore[call-overload, no-any-return]


def with_content(reply: Message, content: RecordDict) -> Message:
    """Copy the reply with other content."""
    changed = copy(reply)
    changed.content = content
    return changed


def only_arrays(content: RecordDict, what: str, advice: str = "") -> tuple[str, ArrayRecord]:
    """Return the name and the arrays of the only ArrayRecord; raises ProtocolError."""
    found = list(content.array_records.items())
    if len(found) != 1:
        raise ProtocolError(f"{what} must hold exactly one ArrayRecord, got {len(found)}{advice}")
    return found[0]


def hide_arrays(content: RecordDict, hidden: Collection[str]) -> RecordDict:
    """Copy ``content`` with only those arrays that the inner strategy sees."""
    shown = RecordDict(dict(content))
    for name, record in content.array_records.items():
        shown[name] = inner_view(record, hidden).copy()
    return shown


def restore_arrays(
    content: RecordDict, template: ArrayRecord, hidden: Collection[str], *, exact: bool
) -> RecordDict:
    """Copy all records, with a view of the global model replaced by the model itself.

    Every array has its own dtype if ``exact``, else only those that numpy lacks.
    """
    shown = set(template).difference(hidden)
    own = RecordDict()
    for name, record in content.items():
        if isinstance(record, ArrayRecord) and set(record) == shown:
            record = load_into(template, record) if exact else narrow_raw(record, template)
        own[name] = record.copy()
    return own


def replace_content(message: Message, content: RecordDict) -> Message:
    """Make the same message with other content.

    Both share their metadata: the id that Flower assigns to the sent message appears in the inner
    strategy's as well.
    """
    return Message(content, metadata=message.metadata)  # type: ignore[call-overload, no-any-return]


def check_weight(content: RecordDict, weighted_by: str, cluster_id: str) -> float:
    """Return the weight of a reply; raises ProtocolError for one that would spoil the average."""
    examples = examples_of(content, weighted_by)
    if not (math.isfinite(examples) and examples > 0):
        raise ProtocolError(
            f"cluster {cluster_id} replied with {weighted_by} = {examples:g} or without it: it "
            "weighs the reply, so it must be > 0"
        )
    return check_possible(content, weighted_by, cluster_id)


def check_possible(content: RecordDict, weighted_by: str, cluster_id: str) -> float:
    """Return the weight of a reply; raises ProtocolError for more examples than are possible."""
    examples = examples_of(content, weighted_by)
    if not 0 <= examples <= MOST_EXAMPLES:
        raise ProtocolError(
            f"cluster {cluster_id} claims {weighted_by} = {examples:g}, which no round reaches: it "
            "would outweigh all others, so its reply is not used"
        )
    return examples


def with_weight(content: RecordDict, weighted_by: str, weight: float) -> RecordDict:
    """Copy ``content`` with another weight in averages."""
    changed = RecordDict(dict(content))
    for name, metrics in content.metric_records.items():
        if weighted_by in metrics:
            changed[name] = MetricRecord({**metrics, weighted_by: weight})
    return changed

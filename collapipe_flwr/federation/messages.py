"""Messages of a round: their content, the sender of each reply, and why replies failed."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from copy import copy
from dataclasses import dataclass

from flwr.app import ArrayRecord, Error, Message, RecordDict

from collapipe_flwr.core.errors import ProtocolError
from collapipe_flwr.federation.arrays import inner_view, load_into, narrow_raw

LONGEST_SENTENCE = 400  # characters of a client's words that are shown
BAD_REPLY = 300  # Error.code of replies that arrived but cannot be used; Flower's own are below 100
LATE = 301  # Error.code of replies that were not waited for
_FLOWER_WRAPPING = re.compile(r".*occurred\. Message: ?|^<class '[^']*'>:<'|'>\s*$", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """A training message as it was sent."""

    node_id: int
    cluster_id: str
    message: Message
    content_bytes: int


def sender_of(reply: Message, sent: Sequence[Sent]) -> Sent | None:
    """The message that a reply answers: by its id (a lost node answers as node 1), else by node."""
    asked = reply.metadata.reply_to_message_id
    by_id = (s for s in sent if asked and s.message.metadata.message_id == asked)
    by_node = (s for s in sent if s.node_id == reply.metadata.src_node_id)
    return next(by_id, None) or next(by_node, None)


def sentence(error: Error) -> str:
    """A client's error message without Flower's wrapping, on one line of bounded length."""
    words = _FLOWER_WRAPPING.sub("", error.reason or f"error {error.code} without a reason")
    line = " ".join(words.split())
    return line if len(line) <= LONGEST_SENTENCE else line[: LONGEST_SENTENCE - 3] + "..."


def diverged(key: str) -> str:
    """Why a reply with this non-finite array is refused."""
    return (
        f"it returned {key} with values that are not finite: its training diverged; lower the "
        "learning rate"
    )


def as_failed(sent: Sent, why: str) -> Message:
    """An error reply, which every strategy counts as a failure."""
    return Message(Error(BAD_REPLY, why), reply_to=sent.message)


def with_content(reply: Message, content: RecordDict) -> Message:
    """A copy of the reply with other content."""
    changed = copy(reply)
    changed.content = content
    return changed


def only_arrays(content: RecordDict, what: str, advice: str = "") -> tuple[str, ArrayRecord]:
    """The name and the arrays of the only ArrayRecord; raises ProtocolError."""
    found = list(content.array_records.items())
    if len(found) != 1:
        raise ProtocolError(f"{what} must hold exactly one ArrayRecord, got {len(found)}{advice}")
    return found[0]


def viewed(content: RecordDict, hidden: Collection[str]) -> RecordDict:
    """A new RecordDict with the arrays that the inner strategy sees."""
    shown = RecordDict(dict(content))
    for name, record in content.array_records.items():
        shown[name] = inner_view(record, hidden).copy()
    return shown


def restored(
    content: RecordDict, template: ArrayRecord, hidden: Collection[str], *, exact: bool
) -> RecordDict:
    """All records copied, with a view of the global model replaced by the model itself.

    Every array has its own dtype if ``exact``, else only those that numpy lacks.
    """
    shown = set(template).difference(hidden)
    own = RecordDict()
    for name, record in content.items():
        if isinstance(record, ArrayRecord) and set(record) == shown:
            record = load_into(template, record) if exact else narrow_raw(record, template)
        own[name] = record.copy()
    return own


def readdressed(message: Message, content: RecordDict) -> Message:
    """The same message with other content.

    Both share their metadata: when Flower assigns an id to the sent one, the inner strategy sees it
    in its own.
    """
    return Message(content, metadata=message.metadata)  # type: ignore[call-overload, no-any-return]

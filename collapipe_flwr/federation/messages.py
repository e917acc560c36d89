"""Sorting the replies of a round: whose they are, which failed, and why, in one sentence."""

from __future__ import annotations

import re
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass

from flwr.app import Error, Message, RecordDict

LONGEST_SENTENCE = 400  # characters of a client's words that are shown
BAD_REPLY = 300  # Error.code of replies that arrived but cannot be used; Flower's own are below 100
LATE = 301  # Error.code of replies that were not waited for
_FLOWER_WRAPPING = re.compile(r".*occurred\. Message: ?|^<class '[^']*'>:<'|'>\s*$", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """One training message that left."""

    node_id: int
    cluster_id: str
    message: Message
    content_bytes: int


def sender_of(reply: Message, sent: Sequence[Sent]) -> Sent | None:
    """Who was asked: by message id (a lost node answers as node 1), else by node id."""
    asked = reply.metadata.reply_to_message_id
    by_id = (s for s in sent if asked and s.message.metadata.message_id == asked)
    by_node = (s for s in sent if s.node_id == reply.metadata.src_node_id)
    return next(by_id, None) or next(by_node, None)


def sentence(error: Error) -> str:
    """What a client said when it failed, without Flower's wrapping, on one bounded line."""
    words = _FLOWER_WRAPPING.sub("", error.reason or f"error {error.code} without a reason")
    line = " ".join(words.split())
    return line if len(line) <= LONGEST_SENTENCE else line[: LONGEST_SENTENCE - 3] + "..."


def as_failed(sent: Sent, why: str) -> Message:
    """An error reply that any strategy counts as a failure."""
    return Message(Error(BAD_REPLY, why), reply_to=sent.message)


def with_content(reply: Message, content: RecordDict) -> Message:
    """The reply with other content; the original stays as it was."""
    changed = copy(reply)
    changed.content = content
    return changed

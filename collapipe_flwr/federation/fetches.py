"""Replies fetched in threads, so that one that is not whole holds up nothing else.

A SuperNode that dies while it uploads its reply leaves Flower's grid waiting for the rest for three
minutes, with all that it was asked for in the same request. Such a request is left to its thread:
neither the other replies nor the round's timeout wait for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterable

from flwr.app import Message
from flwr.serverapp import Grid

MOST_REQUESTS = 16  # of a look
PATIENCE_S = 5.0  # of a look, until requests are left to their threads


class _Fetch:
    """One request for the replies to a few messages, in a thread."""

    def __init__(self, grid: Grid, message_ids: Collection[str]) -> None:
        self._grid, self.message_ids = grid, frozenset(message_ids)
        self._found: list[Message] = []
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="replies", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._found = list(self._grid.pull_messages(self.message_ids))
        except Exception as error:  # raised in the thread that asks for the result
            self._error = error

    def is_over(self, within_s: float = 0.0) -> bool:
        self._thread.join(within_s)
        return not self._thread.is_alive()

    def result(self) -> list[Message]:
        if self._error is not None:
            raise self._error
        return self._found


class Fetches:
    """The requests to a grid that are still running in threads."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._under_way: list[_Fetch] = []

    def pull(self, message_ids: Iterable[str]) -> list[Message]:
        """The complete replies to these messages; raises what the grid raises."""
        wanted = set(message_ids)
        found = [
            reply
            for fetch in self._ended(wanted)
            for reply in fetch.result()
            if reply.metadata.reply_to_message_id in wanted
        ]
        wanted -= answered(found).union(*(fetch.message_ids for fetch in self._under_way))
        left, end_s = sorted(wanted), time.monotonic() + PATIENCE_S
        for few in (left[n::MOST_REQUESTS] for n in range(min(len(left), MOST_REQUESTS))):
            fetch = _Fetch(self._grid, few)
            if fetch.is_over(max(end_s - time.monotonic(), 0.0)):
                found += fetch.result()
            else:
                self._under_way.append(fetch)
        return found

    def forget(self) -> None:
        """Drop replies that arrived after the exchange that asked for them."""
        self._under_way = [fetch for fetch in self._under_way if not fetch.is_over()]

    def _ended(self, wanted: set[str]) -> list[_Fetch]:
        ended = [each for each in self._under_way if each.message_ids & wanted and each.is_over()]
        self._under_way = [each for each in self._under_way if each not in ended]
        return ended


def answered(replies: Iterable[Message]) -> set[str]:
    """The ids of the messages that were replied to."""
    return {reply.metadata.reply_to_message_id for reply in replies}

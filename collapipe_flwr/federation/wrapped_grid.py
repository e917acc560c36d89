"""Grids around another one, which forward what they have in common.

Replies are fetched in threads: a SuperNode that dies while it uploads its reply blocks Flower's
grid for three minutes, with all replies of the same request. Such a request is left to its thread,
and delays neither the other replies nor the round's timeout.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from collapipe_flwr.core.errors import ProtocolError
from collapipe_flwr.federation.bundles import Bundles, unbundle

if TYPE_CHECKING:
    from flwr.supercore.run import Run

log = logging.getLogger("flwr.collapipe")
MOST_REQUESTS = 16  # of one poll
PATIENCE_S = 5.0  # of one poll, until requests are left to their threads
SHARE = 0.1  # of the time until replies are expected, or since
SHORTEST_S, LONGEST_S = 0.25, 2.0  # a poll is a transaction in the SuperLink's database


class Fetches:
    """The requests to a grid that are still running, each in a thread."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._under_way: dict[Future[list[Message]], frozenset[str]] = {}  # ids of messages
        self._awaited: set[str] = set()  # ids of messages whose replies `forget` keeps

    def keep(self, message_ids: Iterable[str]) -> None:
        """Let replies to these messages wait until they are pulled, see `forget`."""
        self._awaited.update(message_ids)

    def pull(self, message_ids: Iterable[str]) -> list[Message]:
        """Return the complete replies to these messages; raises what the grid raises."""
        wanted = set(message_ids)
        ended = [each for each, ids in self._under_way.items() if ids & wanted and each.done()]
        found = [
            reply
            for fetch in ended
            for reply in self._result(fetch)
            if reply.metadata.reply_to_message_id in wanted
        ]
        wanted -= list_answered(found).union(*self._under_way.values())
        left, end_s = sorted(wanted), time.monotonic() + PATIENCE_S
        for few in (left[n::MOST_REQUESTS] for n in range(min(len(left), MOST_REQUESTS))):
            fetch = self._begin(frozenset(few))
            if wait([fetch], max(end_s - time.monotonic(), 0.0)).done:
                found += self._result(fetch)
        return found

    def forget(self) -> None:
        """Drop replies that arrived after the exchange that asked for them, if nobody awaits them.

        A SuperLink gives away every reply once. Errors are dropped: the reply is asked for again.
        """
        self._under_way = {
            fetch: ids
            for fetch, ids in self._under_way.items()
            if not fetch.done() or (ids & self._awaited and fetch.exception() is None)
        }
        self._awaited.intersection_update(frozenset[str]().union(*self._under_way.values()))

    def _begin(self, message_ids: frozenset[str]) -> Future[list[Message]]:
        fetch: Future[list[Message]] = Future()

        def run() -> None:  # in a daemon thread, which an executor's is not: it may hang for long
            try:
                fetch.set_result(list(self._grid.pull_messages(message_ids)))
            except Exception as error:  # raised by `_result`
                fetch.set_exception(error)

        self._under_way[fetch] = message_ids
        threading.Thread(target=run, name="replies", daemon=True).start()
        return fetch

    def _result(self, fetch: Future[list[Message]]) -> list[Message]:
        del self._under_way[fetch]
        return fetch.result()


def choose_ids(
    reply_to_message_ids: Iterable[str] | None, message_ids: Iterable[str] | None
) -> list[str] | None:
    """Return the ids, whichever name Flower gives that argument, or None if there are none.

    Raises TypeError, as Flower does, if both are given.
    """
    if reply_to_message_ids is not None and message_ids is not None:
        raise TypeError("pull_messages takes reply_to_message_ids or message_ids, not both")
    ids = message_ids if reply_to_message_ids is None else reply_to_message_ids
    return None if ids is None else list(ids)


def list_answered(replies: Iterable[Message]) -> set[str]:
    """Return the ids of the messages that were replied to."""
    return {reply.metadata.reply_to_message_id for reply in replies}


class WrappedGrid(Grid):
    """Forwards all calls except `send_and_receive`, which subclasses implement."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid

    def set_run(self, run: Run) -> None:
        self._grid.set_run(run)

    @property
    def run(self) -> Run:
        return self._grid.run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        return self._grid.create_message(content, message_type, dst_node_id, group_id, ttl)

    def get_node_ids(self) -> Iterable[int]:
        return self._grid.get_node_ids()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        return self._grid.push_messages(messages)

    def pull_messages(  # type: ignore[override]  # as from flwr 1.43 on
        self,
        reply_to_message_ids: Iterable[str] | None = None,
        *,
        message_ids: Iterable[str] | None = None,
    ) -> Iterable[Message]:
        ids = choose_ids(reply_to_message_ids, message_ids)
        # by position, as the argument's name changed; all replies only where Flower gives them
        return self._grid.pull_messages(*(() if ids is None else (ids,)))


class PollingGrid(WrappedGrid):
    """``grid``, which polls for replies when they are expected.

    Flower's own grid of a deployment sleeps 3 s between two polls. This one sleeps a tenth of the
    time until the replies are expected, by the duration of the last exchange of this kind, or of
    the time that they are late: a poll costs the server a few small requests. Small arrays travel
    in bundles to receivers that accept them.
    """

    def __init__(
        self,
        grid: Grid,
        now: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(grid)
        self._now, self._pause = now, pause
        self._took_s: dict[str, float] = {}  # the last exchange of each type of message
        self._fetches = Fetches(grid)

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        """Push, then pull until all replies are there or ``timeout`` seconds have passed."""
        sent = list(messages)
        self._fetches.forget()
        kind = sent[0].metadata.message_type if sent else ""
        start_s = self._now()
        missing = set(filter(None, self.push_messages(sent)))  # None: refused
        replies: list[Message] = []
        while missing and (timeout is None or self._now() - start_s < timeout):
            found = self._pull(missing)
            replies += found
            missing -= list_answered(found)
            if missing:
                self._pause(self._interval_s(kind, self._now() - start_s))
        if sent:
            self._took_s[kind] = self._now() - start_s
        return replies

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Push, with bundled arrays where the receiver accepts them."""
        from collapipe_flwr.federation.records import replace_content, takes_bundles

        bundles, sent = Bundles(), []
        for message in messages:
            if message.has_content() and takes_bundles(message.content):
                message = replace_content(message, bundles.of(message.content))
            sent.append(message)
        return self._grid.push_messages(sent)

    def pull_messages(  # type: ignore[override]  # as from flwr 1.43 on
        self,
        reply_to_message_ids: Iterable[str] | None = None,
        *,
        message_ids: Iterable[str] | None = None,
    ) -> list[Message]:
        """Pull the complete replies, unbundled; the others are kept for a later call."""
        ids = choose_ids(reply_to_message_ids, message_ids)
        if ids is None:
            return self._unbundle(list(super().pull_messages()))
        self._fetches.keep(ids)
        return self._pull(ids)

    def _pull(self, message_ids: Iterable[str]) -> list[Message]:
        return self._unbundle(self._fetches.pull(message_ids))

    def _unbundle(self, found: list[Message]) -> list[Message]:
        for reply in found:
            try:
                if reply.has_content():
                    unbundle(reply.content)
            except ProtocolError as error:  # the missing arrays are reported later
                log.warning("a reply of node %s: %s", reply.metadata.src_node_id, error)
        return found

    def _interval_s(self, kind: str, passed_s: float) -> float:
        """Return the seconds until the next poll, ``passed_s`` after this type was pushed."""
        away_s = abs(self._took_s.get(kind, 0.0) - passed_s)
        return min(max(SHARE * away_s, SHORTEST_S), LONGEST_S)


def polling(grid: Grid) -> Grid:
    """Wrap ``grid`` in a `PollingGrid` if it is one of Flower's."""
    is_flowers = type(grid).__module__.partition(".")[0] == "flwr"
    return PollingGrid(grid) if is_flowers else grid

"""A bounded queue between two threads; a wait ends at its deadline, or with the queue."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from threading import Condition
from typing import Generic, TypeVar

from collapipe_flwr.core.errors import LinkError, LinkTimeout

Item = TypeVar("Item")


class LinkClosed(LinkError):
    """The peer ended the link in good order: nothing more will come."""


class Mailbox(Generic[Item]):
    """Holds at most `capacity` items; `peer` names the other side in error sentences.

    With `most_bytes` the sizes of the items inside are bounded too; one item always fits. Who gives
    None for a deadline waits until the mailbox ends, and relies on somebody else to end it.

    It ends in one of two ways: `end` delivers what is queued and then raises `LinkClosed`;
    `fail` drops what is queued and raises the given error to all who wait, at once.
    """

    def __init__(self, capacity: int, peer: str, *, most_bytes: float = math.inf) -> None:
        self._items: deque[tuple[Item, int]] = deque()
        self._bytes = 0
        self._most_bytes = most_bytes
        self._capacity = capacity
        self._peer = peer
        self._end: LinkError | None = None
        self._changed = Condition()

    def put(self, item: Item, deadline_s: float | None, *, size_bytes: int = 0) -> None:
        """Queue one item. Raises LinkError when ended, LinkTimeout when full until the deadline."""
        with self._changed:
            self._wait(lambda: self._has_room(size_bytes), deadline_s, "took nothing")
            if self._end is not None:
                raise _again(self._end)
            self._append(item, size_bytes)

    def get(self, deadline_s: float | None) -> Item:
        """Take the oldest item. Raises LinkClosed, LinkError or, at the deadline, LinkTimeout."""
        with self._changed:
            self._wait(lambda: bool(self._items), deadline_s, "sent nothing")
            if not self._items:
                assert self._end is not None
                raise _again(self._end)
            item, size_bytes = self._items.popleft()
            self._bytes -= size_bytes
            self._changed.notify_all()
            return item

    def end(self) -> None:
        """No more items after those queued."""
        with self._changed:
            if self._end is None:
                self._end = LinkClosed(f"{self._peer} closed the link")
                self._changed.notify_all()

    def end_with(self, last: Item, error: LinkError) -> None:
        """Deliver `last` instead of what is queued, and raise `error` afterwards."""
        with self._changed:
            if self._end is None:
                self._clear()
                self._end = error
                self._append(last, 0)

    def fail(self, error: LinkError) -> None:
        """Drop what is queued and raise `error` from now on; the first failure stays."""
        with self._changed:
            if self._end is None or isinstance(self._end, LinkClosed):
                self._end = error
                self._clear()
                self._changed.notify_all()

    def _has_room(self, size_bytes: int) -> bool:
        fits = not self._items or self._bytes + size_bytes <= self._most_bytes
        return fits and len(self._items) < self._capacity

    def _append(self, item: Item, size_bytes: int) -> None:
        self._items.append((item, size_bytes))
        self._bytes += size_bytes
        self._changed.notify_all()

    def _clear(self) -> None:
        self._items.clear()
        self._bytes = 0

    def _wait(self, ready: Callable[[], bool], deadline_s: float | None, what: str) -> None:
        if not self._changed.wait_for(lambda: ready() or self._end is not None, deadline_s):
            raise LinkTimeout(f"{self._peer} {what} within {deadline_s:g} s")


def _again(error: LinkError) -> LinkError:
    """A fresh exception of the same kind: one instance must not be raised in two threads."""
    fresh = type(error)(*error.args)
    fresh.__cause__ = error.__cause__
    return fresh

"""A grid that looks for replies when they are expected.

Flower's own grid of a deployment sleeps 3 s between two looks. This one takes a tenth of the time
that is left until the replies should be there, by how long the last exchange of this kind took,
or of the time that they are late: a look costs the server one small request.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from flwr.app import Message
from flwr.serverapp import Grid

from collapipe_flwr.federation.wrapped_grid import WrappedGrid

SHARE = 0.1
SHORTEST_S, LONGEST_S = 0.25, 2.0  # a look is a transaction in the SuperLink's database


class PollingGrid(WrappedGrid):
    """``grid``, whose `send_and_receive` looks for replies at fitting intervals."""

    def __init__(
        self,
        grid: Grid,
        now: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(grid)
        self._now, self._pause = now, pause
        self._took_s: dict[str, float] = {}  # the last exchange of each type of message

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        """Push, then pull until all replies are there or ``timeout`` seconds have passed."""
        sent = list(messages)
        kind = sent[0].metadata.message_type if sent else ""
        start_s = self._now()
        missing = set(filter(None, self.push_messages(sent)))  # None: it was refused
        replies: list[Message] = []
        while missing and (timeout is None or self._now() - start_s < timeout):
            found = list(self.pull_messages(missing))
            replies += found
            missing -= {reply.metadata.reply_to_message_id for reply in found}
            if missing:
                self._pause(self._interval_s(kind, self._now() - start_s))
        if sent:
            self._took_s[kind] = self._now() - start_s
        return replies

    def _interval_s(self, kind: str, passed_s: float) -> float:
        """Seconds until the next look, ``passed_s`` after messages of a type were pushed."""
        away_s = abs(self._took_s.get(kind, 0.0) - passed_s)
        return min(max(SHARE * away_s, SHORTEST_S), LONGEST_S)


def polling(grid: Grid) -> Grid:
    """``grid``, or a `PollingGrid` around one of Flower's own."""
    is_flowers = type(grid).__module__.partition(".")[0] == "flwr"
    return PollingGrid(grid) if is_flowers else grid

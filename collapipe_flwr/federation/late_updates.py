"""Semi-synchronous rounds: a reply that misses its round joins a later one.

A round closes with the clusters that have replied at the planned time. The others keep training
and get no new order before they have replied. Their result joins the round that is open when the
reply arrives, as an update of the current model,

    x_now + (x_cluster - x_sent),   weighing its examples times 1 / sqrt(1 + s),

where s is the number of rounds that it is late (FedBuff; Nguyen et al., 2022). Every reply is
pulled once and joins once, or is refused as any other; a cluster continues from it only if it was
aggregated. One that joined a round that is dropped is dropped with it, as replies in time are. The
last round waits for all of them. If the server dies, clusters train the missing updates again,
since they were not accepted.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from flwr.app import Message
from flwr.serverapp import Grid

from collapipe_flwr.federation.open_round import OpenRound
from collapipe_flwr.federation.rounds import ClosedRound, Sent

log = logging.getLogger("flwr.collapipe")
_POLL_S = 0.2


@dataclass(slots=True, kw_only=True)
class LateUpdate:
    """A cluster that still trains what ``opened`` asked for, or its reply."""

    opened: OpenRound
    sent: Sent
    reply: Message | None = None
    since_s: float = field(default_factory=time.monotonic)


class LateUpdates:
    """The updates that are still missing, by cluster."""

    def __init__(self) -> None:
        self._under_way: dict[str, LateUpdate] = {}
        self._sleep = time.sleep

    @property
    def nodes(self) -> frozenset[int]:
        """The nodes that are not asked for anything else."""
        return frozenset(late.sent.node_id for late in self._under_way.values())

    def keep(self, opened: OpenRound, late: Collection[Sent]) -> None:
        """Keep waiting for clusters whose round closes without them."""
        for sent in late:
            self._under_way[sent.cluster_id] = LateUpdate(opened=opened, sent=sent)

    def forget(self, asked: Collection[str]) -> None:
        """Stop waiting for clusters that are asked anew: they are back as other nodes.

        They train again what was under way, since it was not accepted.
        """
        for name in self._under_way.keys() & set(asked):
            log.warning("cluster %s is back as another node: its late update is dropped", name)
            self._drop(self._under_way[name])

    def pull(self, grid: Grid, *, within_s: float, wanted: int = 0) -> None:
        """Fetch replies that have arrived, waiting until there are ``wanted`` of them.

        A cluster that has not replied for ``within_s`` counts as gone, and is asked again.
        """
        end_s = time.monotonic() + within_s
        while True:
            awaited = [late for late in self._under_way.values() if late.reply is None]
            ids = {late.sent.message.metadata.message_id: late for late in awaited}
            for reply in grid.pull_messages(list(ids)) if ids else ():
                ids[reply.metadata.reply_to_message_id].reply = reply
            left = [late for late in awaited if late.reply is None]
            if len(self._under_way) - len(left) >= wanted or time.monotonic() >= end_s or not left:
                break
            self._sleep(_POLL_S)
        for late in left:
            if time.monotonic() - late.since_s >= within_s:
                log.warning("cluster %s has not replied for %g s", late.sent.cluster_id, within_s)
                self._drop(late)

    def join(self, closed: ClosedRound) -> list[LateUpdate]:
        """Add the replies that have arrived to a round, in the order of cluster ids."""
        here = sorted(
            (late for late in self._under_way.values() if late.reply is not None),
            key=lambda late: late.sent.cluster_id,
        )
        joined = []
        for late in here:
            assert late.reply is not None
            if late.opened.receive_late(late.reply, late.sent, closed):
                joined.append(late)
            else:
                self._drop(late)
        return joined

    def settle(self, joined: Sequence[LateUpdate], closed: ClosedRound) -> None:
        """Forget updates that joined a round; the model contains them unless it was dropped."""
        for late in joined:
            if closed.after is not None:
                name = late.sent.cluster_id
                late.opened.accept_cluster(name, closed.models[name])
            self._drop(late)

    def of(self, opened: OpenRound) -> frozenset[str]:
        """Return the clusters that still train what this round asked for."""
        return frozenset(c for c, late in self._under_way.items() if late.opened is opened)

    def close(self) -> None:
        for late in list(self._under_way.values()):
            self._drop(late)

    def _drop(self, late: LateUpdate) -> None:
        del self._under_way[late.sent.cluster_id]

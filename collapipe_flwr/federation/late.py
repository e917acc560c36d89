"""Rounds that close before all clusters have replied: when, and what becomes of late replies.

**Deadline.** A round closes at a learnt deadline instead of the run's timeout. The expected
duration is learnt from earlier rounds, in wall seconds. Simulated radios and boards predict other
seconds than a laptop needs, so a cluster's prediction counts only in proportion to its earlier
ones,

    expected = overhead + max over clusters of (wall / predicted) * predicted now,

with the largest ratio of the last rounds and the largest overhead: what a round took beyond its
slowest cluster's own training (messages, start of apps, queueing). The round closes after ``slack``
times that. A round with a cluster that has no ratio yet has no deadline.

If late updates join a later round (``joins_late``), the deadline is that of the median cluster, and
being late does not extend it. Otherwise a late cluster shows only that it needs more than it was
given, so its next deadline is at least twice as long, until it fits or reaches the run's timeout. A
cluster that misses the timeout as well is not waited for while there are others, until it meets one
of their deadlines.

**Late updates.** A round closes with the clusters that have replied at the planned time. The others
keep training and get no new order before they have replied. Their result joins the round that is
open when the reply arrives, as an update of the current model,

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
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from flwr.app import Error, Message
from flwr.serverapp import Grid

from collapipe_flwr.core.errors import ProtocolError
from collapipe_flwr.core.json_codec import from_json, to_json
from collapipe_flwr.federation.checkpoint import ComponentState
from collapipe_flwr.federation.open_round import OpenRound
from collapipe_flwr.federation.records import LATE, Sent, read_assignment, take_telemetry
from collapipe_flwr.federation.round import ClosedRound

log = logging.getLogger("flwr.collapipe")
REMEMBERED = 5  # rounds
GROWTH = 2.0  # at least, of the deadline after one that was missed
Seconds = Mapping[str, float]  # by cluster
_POLL_S = 0.2


@dataclass(slots=True, kw_only=True)
class _DeadlineState:
    ratios: dict[str, tuple[float, ...]] = field(default_factory=dict)  # wall over predicted
    overhead_s: tuple[float, ...] = ()
    missed: dict[str, float] = field(default_factory=dict)  # ratio to allow; 0: not waited for


class RoundDeadline:
    """Closes training rounds after ``slack`` times the duration that it estimates.

    Later replies are never pulled: the next round has messages of its own.
    """

    def __init__(
        self,
        slack: float,
        *,
        joins_late: bool = False,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._slack, self._now = slack, now
        self.late: frozenset[str] = frozenset()  # clusters whose updates join a later round
        self.joins_late = joins_late
        self._kept = _DeadlineState()

    def exchange(self, grid: Grid, sent: list[Message], timeout: float | None) -> list[Message]:
        """Push, then pull until all replies are in or the deadline; late ones become errors."""
        predicted_s = _read_predictions(sent)
        planned_s = self.deadline_s(predicted_s)
        if planned_s is not None and timeout is not None and timeout <= planned_s:
            planned_s = None
        started_s = self._now()
        wait_s = timeout if planned_s is None else planned_s
        replies = list(grid.send_and_receive(sent, timeout=wait_s))
        exchange_s = self._now() - started_s
        there = {reply.metadata.reply_to_message_id for reply in replies}
        late = [message for message in sent if message.metadata.message_id not in there]
        self.learn(predicted_s, _read_walls(sent, replies), exchange_s)
        joins = self.joins_late and planned_s is not None
        self.late = frozenset(_read_predictions(late)) if joins else frozenset()
        if not joins:
            self.miss(_read_predictions(late), planned_s)
        if late:
            log.warning("closed after %.1f s, %d of %d are late", exchange_s, len(late), len(sent))
        return (
            replies
            if planned_s is None
            else [*replies, *(_make_late_error(m, planned_s) for m in late)]
        )

    def deadline_s(self, predicted_s: Seconds) -> float | None:
        """Return the seconds after which a round of these predictions closes; None if unknown."""
        kept = self._kept
        awaited_s = {name: s for name, s in predicted_s.items() if kept.missed.get(name) != 0.0}
        if not kept.overhead_s or not awaited_s or not awaited_s.keys() <= kept.ratios.keys():
            return None
        works_s = sorted(
            max(*kept.ratios[name], kept.missed.get(name, 0.0)) * predicted
            for name, predicted in awaited_s.items()
        )
        work_s = works_s[(len(works_s) - 1) // 2 if self.joins_late else -1]
        return self._slack * (max(kept.overhead_s) + work_s)

    def learn(self, predicted_s: Seconds, wall_s: Seconds, exchange_s: float) -> None:
        """Record an exchange; the overhead is known only if every cluster replied."""
        kept = self._kept
        for name in wall_s.keys() & predicted_s.keys():
            if predicted_s[name] > 0:
                ratios = (*kept.ratios.get(name, ()), wall_s[name] / predicted_s[name])
                kept.ratios[name] = ratios[-REMEMBERED:]
            kept.missed.pop(name, None)
        if predicted_s and wall_s.keys() >= predicted_s.keys():
            overhead_s = max(exchange_s - max(wall_s.values()), 0.0)
            kept.overhead_s = (*kept.overhead_s, overhead_s)[-REMEMBERED:]

    def miss(self, predicted_s: Seconds, planned_s: float | None) -> None:
        """Record clusters that were late after ``planned_s``, None for the run's own timeout."""
        for name, seconds in predicted_s.items():
            if planned_s is None:
                self._kept.missed[name] = 0.0
            elif self._kept.missed.get(name) != 0.0 and seconds > 0:
                self._kept.missed[name] = max(GROWTH / self._slack, 1.0) * planned_s / seconds

    def dump(self) -> ComponentState:
        return ComponentState(text=to_json(self._kept))

    def load(self, memory: ComponentState) -> None:
        """Restore from a checkpoint; raises ProtocolError if it is not a clock's."""
        self._kept = from_json(_DeadlineState, memory.text or "{}", "the clock's checkpoint")


def _make_late_error(message: Message, planned_s: float) -> Message:
    """Make the error reply that stands for a late one."""
    why = f"late: the round was planned to close after {planned_s:.1f} s (round-slack)"
    return Message(Error(LATE, why), reply_to=message)


def _read_predictions(messages: Sequence[Message]) -> dict[str, float]:
    """Read predicted seconds by cluster, from the plans in messages that ask for training."""
    asked = [m.content for m in messages if m.metadata.message_type == "train" and m.has_content()]
    found: dict[str, float] = {}
    for content in asked:
        try:
            plan = read_assignment(content).plan
        except ProtocolError:  # a plain strategy's: nothing was planned
            continue
        if plan is not None:
            found[plan.cluster_id] = plan.latency_s
    return found


def _read_walls(sent: Sequence[Message], replies: Sequence[Message]) -> dict[str, float]:
    """Read measured seconds by cluster; reports that cannot be true are left out."""
    asked = {message.metadata.message_id: set(_read_predictions([message])) for message in sent}
    found: dict[str, float] = {}
    for reply in replies:
        try:
            measured = take_telemetry(reply.content)[1] if reply.has_content() else None
        except ProtocolError:
            continue
        own = asked.get(reply.metadata.reply_to_message_id, set())
        if measured is not None and measured.cluster_id in own and measured.wall_s > 0:
            found[measured.cluster_id] = measured.wall_s
    return found


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

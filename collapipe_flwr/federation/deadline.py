"""Rounds that close when they should be over, instead of at the run's timeout.

What a round should take is learnt from those before it, in seconds on the wall: simulated radios
and boards predict other seconds than a laptop needs, so a cluster's prediction counts only in
proportion to its earlier ones,

    expected = overhead + max over clusters of (wall / predicted) * predicted now,

with the largest ratio of the last rounds and the largest overhead: what a round took beyond its
slowest cluster's own training (messages, start of apps, waiting in line). The round closes after
``slack`` times that. A cluster that has not finished a round yet has no ratio: a round in which it
takes part has no deadline.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from flwr.app import Error, Message
from flwr.serverapp import Grid

from collapipe_flwr.core.domain import ClusterPlan
from collapipe_flwr.core.errors import ProtocolError
from collapipe_flwr.core.json_codec import from_json, to_json
from collapipe_flwr.federation.checkpoint import Memory, Resumable
from collapipe_flwr.federation.members import Members
from collapipe_flwr.federation.records import read_assignment, take_telemetry

log = logging.getLogger("flwr.collapipe")
REMEMBERED = 5  # rounds
LATE = 301  # Error.code of replies that were not waited for; Flower's own are below 100
Seconds = Mapping[str, float]  # by cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    """A clock's memory in a checkpoint."""

    ratios: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    overhead_s: tuple[float, ...] = ()


class RoundClock:
    """Expects how long rounds take; ``slack`` is what of that they may."""

    def __init__(self, slack: float) -> None:
        self._slack = slack
        self._ratios: dict[str, deque[float]] = {}  # wall over predicted seconds, by cluster
        self._overhead_s: deque[float] = deque(maxlen=REMEMBERED)

    def deadline_s(self, predicted_s: Seconds) -> float | None:
        """When a round with these predictions should close; None while nobody can tell."""
        if not self._overhead_s or not predicted_s or not set(predicted_s) <= set(self._ratios):
            return None
        work_s = max(max(self._ratios[name]) * s for name, s in predicted_s.items())
        return self._slack * (max(self._overhead_s) + work_s)

    def learn(self, predicted_s: Seconds, wall_s: Seconds, exchange_s: float) -> None:
        """A round's exchange of messages; one that somebody missed says nothing about overhead."""
        for name in wall_s.keys() & predicted_s.keys():
            if predicted_s[name] > 0:
                ratios = self._ratios.setdefault(name, deque(maxlen=REMEMBERED))
                ratios.append(wall_s[name] / predicted_s[name])
        if predicted_s and wall_s.keys() >= predicted_s.keys():
            self._overhead_s.append(max(exchange_s - max(wall_s.values()), 0.0))

    def dump(self) -> Memory:
        """The rounds that it remembers."""
        ratios = {name: tuple(found) for name, found in self._ratios.items()}
        return Memory(text=to_json(_Kept(ratios=ratios, overhead_s=tuple(self._overhead_s))))

    def load(self, memory: Memory) -> None:
        """Go on from a checkpoint; raises ProtocolError if it is not a clock's."""
        kept = from_json(_Kept, memory.text, "the clock's checkpoint") if memory.text else _Kept()
        self._ratios = {name: deque(r, maxlen=REMEMBERED) for name, r in kept.ratios.items()}
        self._overhead_s = deque(kept.overhead_s, maxlen=REMEMBERED)


class PunctualMembers(Members):
    """Members whose training rounds close at the clock's deadline, if that comes first.

    Replies that come later are never asked for: the next round has messages of its own.
    """

    def __init__(
        self,
        grid: Grid,
        clusters: Mapping[int, str],
        clock: RoundClock,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(grid, clusters)
        self._clock, self._now = clock, now

    @property
    def resumable(self) -> dict[str, Resumable]:
        """The clock, and what every member remembers."""
        return {**super().resumable, "clock": self._clock}

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        """Push, then pull until all are there, or it is time; errors for those that are late."""
        sent = list(messages)
        predicted_s = {plan.cluster_id: plan.latency_s for plan in _plans(sent)}
        planned_s = self._clock.deadline_s(predicted_s)
        if planned_s is not None and timeout is not None and timeout <= planned_s:
            planned_s = None
        started_s = self._now()
        replies = super().send_and_receive(
            sent, timeout=timeout if planned_s is None else planned_s
        )
        exchange_s = self._now() - started_s
        self._clock.learn(predicted_s, _walls(replies), exchange_s)
        if len(replies) < len(sent):
            missing = len(sent) - len(replies)
            log.warning("closed after %.1f s, %d of %d are late", exchange_s, missing, len(sent))
        return replies if planned_s is None else [*replies, *_late(sent, replies, planned_s)]


def _late(
    sent: Sequence[Message], replies: Sequence[Message], planned_s: float
) -> Iterator[Message]:
    """An error in the place of each reply that was not there in time: it names the reason."""
    there = {reply.metadata.reply_to_message_id for reply in replies}
    for message in sent:
        if message.metadata.message_id not in there:
            why = f"late: the round was planned to close after {planned_s:.1f} s (round-slack)"
            yield Message(Error(LATE, why), reply_to=message)


def _plans(messages: Sequence[Message]) -> list[ClusterPlan]:
    """The plans in messages that ask for training."""
    asked = [m.content for m in messages if m.metadata.message_type == "train" and m.has_content()]
    found: list[ClusterPlan] = []
    for content in asked:
        try:
            plan = read_assignment(content).plan
        except ProtocolError:  # a plain strategy's: nothing was planned
            continue
        found += [plan] if plan is not None else []
    return found


def _walls(replies: Sequence[Message]) -> dict[str, float]:
    """What the clusters that replied say that they took; the strategy judges malformed replies."""
    found: dict[str, float] = {}
    for reply in replies:
        try:
            told = take_telemetry(reply.content)[1] if reply.has_content() else None
        except ProtocolError:
            continue
        if told is not None:
            found[told.cluster_id] = told.wall_s
    return found

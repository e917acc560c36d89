"""Replay of a schedule in time, for the makespan of 1F1B: with slow links it has no closed form."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from collapipe_flwr.core.errors import ScheduleError
from collapipe_flwr.core.schedule import Action, Op, Schedule, unchecked_schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Seconds per micro-batch: `stage_s[op][worker]` and `hop_s[op][hop]`.

    Without `replicas` (of every stage) a stage is a worker. A hop between stages is one link
    however many replicas they have. `weights_s[worker]` is the part of a backward pass after its
    gradient was sent (empty: none). Half-duplex links serve both directions with one resource.
    """

    stage_s: tuple[tuple[float, ...], tuple[float, ...]]
    hop_s: tuple[tuple[float, ...], tuple[float, ...]]
    half_duplex: bool = False
    weights_s: tuple[float, ...] = ()
    replicas: tuple[int, ...] = ()

    @property
    def stages(self) -> int:
        """Number of stages; there is one hop fewer."""
        return len(self.hop_s[0]) + 1


class Span(NamedTuple):
    """One use of one resource: "stage 2" or "stage 2.1", "hop 1 forward" or "hop 1"."""

    resource: str
    micro_batch: int
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Trace:
    """The spans of a replay, and its end."""

    makespan_s: float
    spans: tuple[Span, ...]


def replay(times: StepTimes, depths: Sequence[int], micro_batches: int) -> Trace:
    """Replay one 1F1B step with these warm-up depths; from `micro_batches` on a depth is GPipe's.

    A stage runs its actions in order, a link carries one payload at a time, first come first
    served. Raises ScheduleError on deadlock.
    """
    if len(depths) != times.stages:
        raise ScheduleError(f"{times.stages} stages need as many depths, got {len(depths)}")
    schedule = unchecked_schedule("1f1b", depths, micro_batches, times.replicas)
    trace = _Replay(times, schedule).run()
    if trace is None:
        schedule.dry_run()  # says why
        raise AssertionError("a replay blocked where the dry run does not")
    return trace


_Done = Callable[[int, Action], None]


@dataclass(slots=True)
class _Link:
    """One direction of a link, or both, with its queue."""

    name: str
    busy: bool = False
    queue: list[Action] = field(default_factory=list)


class _Replay:
    """The state of a replay: the next event is always the earliest end of a span."""

    def __init__(self, times: StepTimes, schedule: Schedule) -> None:
        self.times, self.orders, self.workers = times, schedule.actions, schedule.workers
        self.last = times.stages - 1
        self.names = [f"stage {place}" for place in self.workers.places]
        self.at = [0] * len(self.orders)
        self.busy = [False] * len(self.orders)
        self.arrived: set[tuple[int, Action]] = set()
        self.links = [self._link_pair(hop) for hop in range(self.last)]
        self.events: list[tuple[float, int, _Done, int, Action]] = []  # end, serial number, ...
        self.spans: list[Span] = []
        self.now = 0.0

    def _link_pair(self, hop: int) -> tuple[_Link, _Link]:
        if self.times.half_duplex:
            shared = _Link(f"hop {hop}")
            return shared, shared
        return _Link(f"hop {hop} forward"), _Link(f"hop {hop} backward")

    def run(self) -> Trace | None:
        """The trace, or None where the workers block each other."""
        for worker, (place, order) in enumerate(zip(self.workers.places, self.orders, strict=True)):
            if place.stage == 0:
                self.arrived |= {(worker, action) for action in order if action.op is Op.FORWARD}
            self._start(worker)
        while self.events:
            self.now, _, done, place_of, action = heapq.heappop(self.events)
            done(place_of, action)
        if any(at < len(order) for at, order in zip(self.at, self.orders, strict=True)):
            return None
        return Trace(self.now, tuple(self.spans))

    def _use(self, name: str, length_s: float, done: _Done, place: int, action: Action) -> None:
        """Occupy a resource from now on; `done` is called with place and action at the end."""
        end = self.now + length_s
        heapq.heappush(self.events, (end, len(self.spans), done, place, action))
        self.spans.append(Span(name, action.micro_batch, self.now, end))

    def _start(self, worker: int) -> None:
        if self.busy[worker] or self.at[worker] == len(self.orders[worker]):
            return
        action = self.orders[worker][self.at[worker]]
        if (worker, action) not in self.arrived:
            return
        self.busy[worker] = True
        length = self.times.stage_s[action.op][worker]
        self._use(self.names[worker], length, self._pass_done, worker, action)

    def _pass_done(self, worker: int, action: Action) -> None:
        stage = self.workers.places[worker].stage
        if action.op is Op.FORWARD and stage == self.last:
            self.arrived.add((worker, Action(Op.BACKWARD, action.micro_batch)))
        elif action.op is Op.FORWARD:
            self._request(stage, action)
        elif stage > 0:
            self._request(stage - 1, action)
        if action.op is Op.BACKWARD and self.times.weights_s:
            length = self.times.weights_s[worker]
            self._use(self.names[worker], length, self._worker_done, worker, action)
        else:
            self._worker_done(worker, action)

    def _worker_done(self, worker: int, _: Action) -> None:
        self.busy[worker] = False
        self.at[worker] += 1
        self._start(worker)

    def _request(self, hop: int, action: Action) -> None:
        self.links[hop][action.op].queue.append(action)
        self._start_hop(hop, action.op)

    def _start_hop(self, hop: int, op: Op) -> None:
        link = self.links[hop][op]
        if link.busy or not link.queue:
            return
        link.busy = True
        action = link.queue.pop(0)
        self._use(link.name, self.times.hop_s[action.op][hop], self._hop_done, hop, action)

    def _hop_done(self, hop: int, action: Action) -> None:
        self.links[hop][action.op].busy = False
        stage = hop + 1 if action.op is Op.FORWARD else hop
        worker = self.workers.at(stage, action.micro_batch)
        assert worker is not None
        self.arrived.add((worker, action))
        self._start(worker)
        self._start_hop(hop, action.op)

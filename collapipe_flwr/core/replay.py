"""Replay of a schedule in time, for the makespan of 1F1B: with slow links it has no closed form."""

from __future__ import annotations

import heapq
from collections import deque
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


@dataclass(slots=True, eq=False)
class _Resource:
    """A worker, or one direction of a link or both, which serves one action at a time."""

    name: str
    place: int  # of a worker among all, or of a hop
    seconds: tuple[float, ...]  # of an action, by its op
    queue: deque[Action] = field(default_factory=deque)  # a worker's own order, from the start
    stage: int | None = None  # of a worker
    arrived: set[Action] = field(default_factory=set)  # those whose input a worker has
    busy: bool = False


class _Replay:
    """The state of a replay: the next event is always the earliest end of a span."""

    def __init__(self, times: StepTimes, schedule: Schedule) -> None:
        self.times, self.workers, self.last = times, schedule.workers, times.stages - 1
        self.stages = [
            _Resource(f"stage {worker}", place, tuple(seconds), deque(actions), worker.stage)
            for place, (worker, actions, *seconds) in enumerate(
                zip(self.workers.places, schedule.actions, *times.stage_s, strict=True)
            )
        ]
        ways = ("",) if times.half_duplex else (" forward", " backward")
        self.links = [
            [_Resource(f"hop {hop}{way}", hop, seconds) for way in ways]
            for hop, seconds in enumerate(zip(*times.hop_s, strict=True))
        ]
        self.events: list[tuple[float, int, _Done, _Resource, Action]] = []  # end, serial number
        self.spans: list[Span] = []
        self.now = 0.0

    def run(self) -> Trace | None:
        """The trace, or None where the workers block each other."""
        for worker in self.stages:
            if worker.stage == 0:
                worker.arrived.update(a for a in worker.queue if a.op is Op.FORWARD)
            self._serve(worker)
        while self.events:
            self.now, _, done, resource, action = heapq.heappop(self.events)
            done(resource, action)
        if any(worker.queue for worker in self.stages):
            return None
        return Trace(self.now, tuple(self.spans))

    def _serve(self, resource: _Resource) -> None:
        """Begin the next action in the queue, if that is possible now."""
        queue, is_link = resource.queue, resource.stage is None
        if resource.busy or not queue or not (is_link or queue[0] in resource.arrived):
            return
        resource.busy = True
        action = queue.popleft()
        done = self._carried if is_link else self._passed
        self._use(resource, resource.seconds[action.op], done, action)

    def _use(self, resource: _Resource, length_s: float, done: _Done, action: Action) -> None:
        """Occupy a resource from now on; ``done`` is called at the end."""
        end = self.now + length_s
        heapq.heappush(self.events, (end, len(self.spans), done, resource, action))
        self.spans.append(Span(resource.name, action.micro_batch, self.now, end))

    def _passed(self, worker: _Resource, action: Action) -> None:
        assert worker.stage is not None
        if action.op is Op.FORWARD and worker.stage == self.last:
            worker.arrived.add(Action(Op.BACKWARD, action.micro_batch))
        elif action.op is Op.FORWARD or worker.stage > 0:
            link = self.links[worker.stage - action.op][-action.op]  # the only one serves both
            link.queue.append(action)
            self._serve(link)
        if action.op is Op.BACKWARD and self.times.weights_s:
            self._use(worker, self.times.weights_s[worker.place], self._free, action)
        else:
            self._free(worker, action)

    def _free(self, resource: _Resource, _: Action) -> None:
        resource.busy = False
        self._serve(resource)

    def _carried(self, link: _Resource, action: Action) -> None:
        link.busy = False
        stage = link.place + 1 if action.op is Op.FORWARD else link.place
        place = self.workers.at(stage, action.micro_batch)
        assert place is not None
        self.stages[place].arrived.add(action)
        self._serve(self.stages[place])
        self._serve(link)


_Done = Callable[[_Resource, Action], None]

"""Schedules of all stages of a chain, and their replay in time.

A replay gives the makespan of 1F1B, which has no closed form with slow links (docs/theory.md, 2.2).
A dry run is a replay in which every pass takes one time slot and links take none. Raises
ScheduleError that says which stage waits for what when nothing can go on.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby
from operator import attrgetter
from typing import NamedTuple

from collapipe_flwr.core.errors import ScheduleError
from collapipe_flwr.core.schedule import (
    Action,
    Actions,
    Op,
    ReplicaIndex,
    list_stage_actions,
    list_turns,
)


@dataclass(frozen=True, slots=True)
class Worker:
    """One replica of one stage; prints as "stage 2", or "stage 2.1" where the stage has several."""

    stage: int
    turn: ReplicaIndex

    def __str__(self) -> str:
        replica = "" if self.turn.replicas == 1 else f".{self.turn.replica}"
        return f"stage {self.stage}{replica}"


@dataclass(frozen=True, slots=True)
class Schedule:
    """The actions of every worker in one optimizer step, stage by stage.

    ``replicas`` are those of every stage; without them every stage has one worker.
    """

    name: str
    actions: tuple[Actions, ...]
    replicas: tuple[int, ...] = ()

    @property
    def workers(self) -> tuple[Worker, ...]:
        """The workers that execute the actions, in the same order."""
        return _list_workers(self.replicas or (1,) * len(self.actions))

    def grid(self) -> str:
        """Draw a line per worker with a column per time slot (every action takes one slot)."""
        trace = self._replay_slots()
        width = max(len(str(a)) for stage in self.actions for a in stage) + 1
        lines = []
        for worker, actions in zip(map(str, self.workers), self.actions, strict=True):
            cells = ["·".ljust(width)] * round(trace.makespan_s)
            begun = (round(span.start_s) for span in trace.spans if span.resource == worker)
            for slot, action in zip(begun, actions, strict=True):
                cells[slot] = str(action).ljust(width)
            lines.append(f"{worker} | " + "".join(cells).rstrip())
        return "\n".join(lines)

    def dry_run(self, queue_frames: int | None = None) -> int:
        """Play the schedule without computing; returns the number of time slots it takes.

        `queue_frames` is the capacity of each direction of each link (None: no bound).
        """
        return round(self._replay_slots(queue_frames).makespan_s)

    def count_in_flight(self) -> tuple[int, ...]:
        """Count per worker the most micro-batches that wait for their backward at any time."""
        return tuple(
            max(accumulate((1 if op is Op.FORWARD else -1 for op, _ in stage), initial=0))
            for stage in self.actions
        )

    def _replay_slots(self, queue_frames: int | None = None) -> Trace:
        slots = (1.0,) * len(self.actions)
        hops = (0.0,) * (len(self.replicas or self.actions) - 1)
        times = StepTimes(stage_s=(slots, slots), hop_s=(hops, hops))
        return _Replay(self, times, queue_frames).run()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Seconds per micro-batch: `stage_s[op][worker]` and `hop_s[op][hop]`.

    Without `replicas` (of every stage) a stage is a worker. A hop between stages is one link
    however many replicas they have. `weights_s[worker]` is the part of a backward pass after its
    gradient was sent (empty: none).
    """

    stage_s: tuple[tuple[float, ...], tuple[float, ...]]
    hop_s: tuple[tuple[float, ...], tuple[float, ...]]
    weights_s: tuple[float, ...] = ()
    replicas: tuple[int, ...] = ()

    @property
    def stages(self) -> int:
        """Number of stages; there is one hop fewer."""
        return len(self.hop_s[0]) + 1


class ResourceUse(NamedTuple):
    """One use of one resource: "stage 2" or "stage 2.1", "hop 1 forward"."""

    resource: str
    micro_batch: int
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Trace:
    """The spans of a replay, and its end."""

    makespan_s: float
    spans: tuple[ResourceUse, ...]


def gpipe(stages: int, micro_batches: int) -> Schedule:
    """Build all forwards, then all backwards, on every stage."""
    return build_schedule("gpipe", [micro_batches] * stages, micro_batches)


def one_f_one_b(depths: Sequence[int], micro_batches: int) -> Schedule:
    """Build one forward, one backward, with a warm-up depth per stage (classic: stages - index)."""
    return build_schedule("1f1b", depths, micro_batches)


def build_schedule(name: str, depths: Sequence[int], micro_batches: int) -> Schedule:
    """Build schedule `name` over `len(depths)` stages. Raises ScheduleError if it would block."""
    schedule = build_unchecked(name, depths, micro_batches)
    schedule.dry_run()
    return schedule


def build_unchecked(
    name: str, depths: Sequence[int], micro_batches: int, replicas: Sequence[int] = ()
) -> Schedule:
    """Build a schedule without checking whether it blocks; a depth is that of each replica."""
    counts = tuple(replicas) or (1,) * len(depths)
    actions = tuple(
        list_stage_actions(name, depths[worker.stage], micro_batches, worker.turn)
        for worker in _list_workers(counts)
    )
    return Schedule(name, actions, counts)


def _list_workers(replicas: Sequence[int]) -> tuple[Worker, ...]:
    return tuple(Worker(s, turn) for s, count in enumerate(replicas) for turn in list_turns(count))


def replay(times: StepTimes, depths: Sequence[int], micro_batches: int) -> Trace:
    """Replay one 1F1B step with these warm-up depths; from `micro_batches` on a depth is GPipe's.

    A stage runs its actions in order, a link carries one payload at a time, first come first
    served.
    """
    if len(depths) != times.stages:
        raise ScheduleError(f"{times.stages} stages need as many depths, got {len(depths)}")
    return _Replay(build_unchecked("1f1b", depths, micro_batches, times.replicas), times).run()


@dataclass(slots=True, eq=False)
class _Resource:
    """A worker, or one direction of a link, which serves one action at a time."""

    name: str
    place: int  # of a worker among all, or of a hop
    seconds: tuple[float, ...]  # of an action, by its op
    queue: deque[Action] = field(default_factory=deque)  # a worker's own order, from the start
    stage: int = -1  # of a worker
    arrived: set[Action] = field(default_factory=set)  # those whose input a worker has
    busy: bool = False
    # To each neighbour, until the end of its pass.
    sent: defaultdict[int, list[Action]] = field(default_factory=lambda: defaultdict(list))


class _Replay:
    """The state of a replay: the next event is always the earliest end of a span."""

    def __init__(
        self, schedule: Schedule, times: StepTimes, queue_frames: int | None = None
    ) -> None:
        self.name, self.times, self.queue_frames = schedule.name, times, queue_frames
        self.workers = [
            _Resource(str(worker), place, tuple(seconds), deque(actions), worker.stage)
            for place, (worker, actions, *seconds) in enumerate(
                zip(schedule.workers, schedule.actions, *times.stage_s, strict=True)
            )
        ]
        self.stages = {
            stage: list(group) for stage, group in groupby(self.workers, attrgetter("stage"))
        }
        self.links = [
            [_Resource(f"hop {hop} {way}", hop, seconds) for way in ("forward", "backward")]
            for hop, seconds in enumerate(zip(*times.hop_s, strict=True))
        ]
        self.events: list[tuple[float, int, _Done, _Resource, Action]] = []  # end, serial number
        self.spans: list[ResourceUse] = []
        self.now = 0.0

    def run(self) -> Trace:
        for worker in self.workers:
            if worker.stage == 0:
                worker.arrived.update(a for a in worker.queue if a.op is Op.FORWARD)
            self._serve(worker)
        while self.events:
            self.now, _, done, resource, action = heapq.heappop(self.events)
            done(resource, action)
        if blockers := [self._explain_block(worker) for worker in self.workers if worker.queue]:
            raise ScheduleError(f"schedule {self.name} blocks: {'; '.join(blockers)}")
        return Trace(self.now, tuple(self.spans))

    def _serve(self, resource: _Resource) -> None:
        """Begin the next action in the queue, if that is possible now."""
        if resource.busy or not resource.queue:
            return
        action, is_worker = resource.queue[0], resource.stage >= 0
        if is_worker and (action not in resource.arrived or self._explain_block(resource)):
            return
        resource.busy = True
        done = self._finish_pass if is_worker else self._deliver
        self._use(resource, resource.seconds[action.op], done, resource.queue.popleft())

    def _explain_block(self, worker: _Resource) -> str:
        """Say why a worker cannot begin its next action; empty where it has input and room."""
        action = worker.queue[0]
        source, target = self._find_neighbours(worker, action)
        if source is not None and source.sent[worker.place][:1] != [action]:
            return f"{worker.name} waits with {action} for {source.name}"
        if target is not None and len(worker.sent[target.place]) == self.queue_frames:
            return f"{worker.name} cannot send {action} to {target.name}, whose queue is full"
        return "" if action in worker.arrived else f"{worker.name} has {action} before its forward"

    def _use(self, resource: _Resource, length_s: float, done: _Done, action: Action) -> None:
        """Occupy a resource from now on; ``done`` is called at the end."""
        end = self.now + length_s
        heapq.heappush(self.events, (end, len(self.spans), done, resource, action))
        self.spans.append(ResourceUse(resource.name, action.micro_batch, self.now, end))

    def _find_neighbours(self, worker: _Resource, action: Action) -> list[_Resource | None]:
        """Return the workers that the action's input comes from and its output goes to."""
        step = 1 - 2 * action.op
        return [self._find_worker(worker.stage + way, action.micro_batch) for way in (-step, step)]

    def _find_worker(self, stage: int, micro_batch: int) -> _Resource | None:
        """Return the worker of a stage that a micro-batch passes; None beyond the chain's ends."""
        replicas = self.stages.get(stage)
        return replicas[micro_batch % len(replicas)] if replicas else None

    def _finish_pass(self, worker: _Resource, action: Action) -> None:
        source, target = self._find_neighbours(worker, action)
        if source is not None:
            source.sent[worker.place].pop(0)
            self._serve(source)  # which may have waited for this queue
        if target is not None:
            worker.sent[target.place].append(action)
            link = self.links[worker.stage - action.op][action.op]
            link.queue.append(action)
            self._serve(link)
        elif action.op is Op.FORWARD:
            worker.arrived.add(Action(Op.BACKWARD, action.micro_batch))
        if action.op is Op.BACKWARD and self.times.weights_s:
            self._use(worker, self.times.weights_s[worker.place], self._free, action)
        else:
            self._free(worker, action)

    def _free(self, resource: _Resource, _: Action) -> None:
        resource.busy = False
        self._serve(resource)

    def _deliver(self, link: _Resource, action: Action) -> None:
        link.busy = False
        worker = self._find_worker(link.place + 1 - action.op, action.micro_batch)
        assert worker is not None
        worker.arrived.add(action)
        self._serve(worker)
        self._serve(link)


_Done = Callable[[_Resource, Action], None]

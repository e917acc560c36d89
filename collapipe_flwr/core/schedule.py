"""Schedules of one optimizer step: which stage works on which micro-batch, and in which order.

A `Schedule` lists the forward and backward passes of every stage (0 is the control unit, the last
one the edge). Stages execute these actions, `Schedule.dry_run` checks them without computing, and
`replay` plays them in time, which prices 1F1B: no closed form with slow links is known for it.
Standard library only.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from collapipe_flwr.core.errors import ScheduleError

SCHEDULES = ("gpipe", "1f1b")


class Op(IntEnum):
    """What a stage does with a micro-batch; also the index of a direction."""

    FORWARD = 0
    BACKWARD = 1


class Action(NamedTuple):
    """One pass of one micro-batch through one stage; prints as `F0`, `B3`."""

    op: Op
    micro_batch: int

    def __str__(self) -> str:
        return f"{'FB'[self.op]}{self.micro_batch}"


Actions = tuple[Action, ...]


@dataclass(frozen=True, slots=True)
class Schedule:
    """The actions of every stage in one optimizer step."""

    name: str
    actions: tuple[Actions, ...]

    def grid(self) -> str:
        """One line per stage, one column per time slot (every action takes one slot)."""
        slots = self._slots(queue_frames=None)
        width = max(len(str(a)) for stage in self.actions for a in stage) + 1
        lines = []
        for stage in range(len(self.actions)):
            cells = [str(slot.get(stage, "·")).ljust(width) for slot in slots]
            lines.append(f"stage {stage} | " + "".join(cells).rstrip())
        return "\n".join(lines)

    def dry_run(self, queue_frames: int | None = None) -> int:
        """Play the schedule without computing; returns the number of time slots it takes.

        `queue_frames` is the capacity of each direction of each link (None: no bound).
        Raises ScheduleError that says which stage waits for what when nothing can go on.
        """
        return len(self._slots(queue_frames))

    def in_flight(self) -> tuple[int, ...]:
        """Per stage, the most micro-batches that wait for their backward at any time."""
        return tuple(
            max(accumulate((1 if op is Op.FORWARD else -1 for op, _ in stage), initial=0))
            for stage in self.actions
        )

    def _slots(self, queue_frames: int | None) -> list[dict[int, Action]]:
        """The actions done in every time slot by stage; an action sees only earlier slots."""
        progress = _Progress(self.actions, queue_frames)
        slots: list[dict[int, Action]] = []
        while blockers := progress.blockers():
            ready = [stage for stage, reason in blockers.items() if not reason]
            if not ready:
                raise ScheduleError(f"schedule {self.name} blocks: {'; '.join(blockers.values())}")
            slots.append({stage: progress.advance(stage) for stage in ready})
        return slots


@lru_cache(maxsize=1024)
def stage_actions(name: str, depth: int, micro_batches: int) -> Actions:
    """The actions of one stage.

    `gpipe`: all forwards, then all backwards (`depth` is ignored). `1f1b`: `depth` forwards to
    warm up, then one backward and one forward in turn, so at most `depth` are in flight; from
    `depth` = `micro_batches` on this is GPipe.
    """
    if micro_batches < 1:
        raise ScheduleError(f"micro-batches must be >= 1, got {micro_batches}")
    if name == "gpipe":
        depth = micro_batches
    elif name != "1f1b":
        raise ScheduleError(f"schedule must be one of {', '.join(SCHEDULES)}, got {name!r}")
    if depth < 1:
        raise ScheduleError(f"warm-up depth must be >= 1, got {depth}")
    warm = min(depth, micro_batches)
    actions = [Action(Op.FORWARD, m) for m in range(warm)]
    for m in range(micro_batches):
        actions.append(Action(Op.BACKWARD, m))
        if m + warm < micro_batches:
            actions.append(Action(Op.FORWARD, m + warm))
    return tuple(actions)


def forward_actions(micro_batches: int) -> Actions:
    """The actions of one stage in evaluation."""
    return tuple(Action(Op.FORWARD, m) for m in range(micro_batches))


def gpipe(stages: int, micro_batches: int) -> Schedule:
    """All forwards, then all backwards, on every stage."""
    return build_schedule("gpipe", [micro_batches] * stages, micro_batches)


def one_f_one_b(depths: Sequence[int], micro_batches: int) -> Schedule:
    """One forward, one backward, with a warm-up depth per stage (classic: stages - index)."""
    return build_schedule("1f1b", depths, micro_batches)


def build_schedule(name: str, depths: Sequence[int], micro_batches: int) -> Schedule:
    """The schedule `name` over `len(depths)` stages. Raises ScheduleError if it would block."""
    schedule = Schedule(name, tuple(stage_actions(name, d, micro_batches) for d in depths))
    schedule.dry_run()
    return schedule


class _Progress:
    """How far each stage has come, and the micro-batches queued in each link.

    Frames are taken from a link in the order they were put.
    """

    def __init__(self, actions: tuple[Actions, ...], queue_frames: int | None) -> None:
        self._actions, self._queue_frames = actions, queue_frames
        self._stages = range(len(actions))
        self._next = [0] * len(actions)
        self._stashed: list[set[int]] = [set() for _ in actions]
        self._links: dict[tuple[int, int], list[int]] = {}  # (from, to) -> micro-batches inside

    def blockers(self) -> dict[int, str]:
        """Why each stage that has actions left cannot do the next one now; empty where it can."""
        return {
            stage: self._blocker(stage, actions[at])
            for stage, (actions, at) in enumerate(zip(self._actions, self._next, strict=True))
            if at < len(actions)
        }

    def advance(self, stage: int) -> Action:
        action = self._actions[stage][self._next[stage]]
        source, target = self._route(stage, action)
        if source in self._stages:
            self._links[source, stage].pop(0)
        if target in self._stages:
            self._links.setdefault((stage, target), []).append(action.micro_batch)
        if action.op is Op.FORWARD:
            self._stashed[stage].add(action.micro_batch)
        self._next[stage] += 1
        return action

    def _blocker(self, stage: int, action: Action) -> str:
        source, target = self._route(stage, action)
        if source in self._stages:
            inside = self._links.get((source, stage), [])
            if inside[:1] != [action.micro_batch]:
                return f"stage {stage} waits with {action} for stage {source}"
        queued = len(self._links.get((stage, target), []))
        if target in self._stages and queued == self._queue_frames:
            return f"stage {stage} cannot send {action} to stage {target}, whose queue is full"
        if action.op is Op.BACKWARD and action.micro_batch not in self._stashed[stage]:
            return f"stage {stage} has {action} before its forward"
        return ""

    def _route(self, stage: int, action: Action) -> tuple[int, int]:
        step = 1 if action.op is Op.FORWARD else -1
        return stage - step, stage + step


# -- replay in time -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Seconds per micro-batch: `stage_s[op][stage]` and `hop_s[op][hop]`.

    `weights_s[stage]` is the part of a backward pass that comes after its gradient was handed on;
    where nothing is given all of it comes before. Half-duplex links serve both directions with
    one resource.
    """

    stage_s: tuple[tuple[float, ...], tuple[float, ...]]
    hop_s: tuple[tuple[float, ...], tuple[float, ...]]
    half_duplex: bool = False
    weights_s: tuple[float, ...] = ()

    @property
    def stages(self) -> int:
        """Number of stages; there is one hop fewer."""
        return len(self.stage_s[0])


@dataclass(frozen=True, slots=True)
class Span:
    """One use of one resource: "stage 2", "hop 1 forward", "hop 1 backward" or "hop 1"."""

    resource: str
    micro_batch: int
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Trace:
    """What happened when."""

    makespan_s: float
    spans: tuple[Span, ...]


def replay(times: StepTimes, depths: Sequence[int], micro_batches: int) -> Trace:
    """Play one 1F1B step with these warm-up depths; from `micro_batches` on a depth is GPipe's.

    A stage runs its actions in order, a link carries one payload at a time, first come first
    served. Raises ScheduleError on deadlock.
    """
    if len(depths) != times.stages:
        raise ScheduleError(f"{times.stages} stages need as many depths, got {len(depths)}")
    orders = tuple(stage_actions("1f1b", depth, micro_batches) for depth in depths)
    trace = _Replay(times, orders).run()
    if trace is None:
        Schedule("1f1b", orders).dry_run()  # says why
        raise AssertionError("a replay blocked where the dry run does not")
    return trace


_Done = Callable[[int, Action], None]


@dataclass(slots=True)
class _Link:
    """One direction of a link, or both, with what waits for it."""

    name: str
    busy: bool = False
    queue: list[Action] = field(default_factory=list)


class _Replay:
    """The state of a replay: the next event is always the earliest end of a span."""

    def __init__(self, times: StepTimes, orders: Sequence[Actions]) -> None:
        self.times, self.orders = times, orders
        self.last = times.stages - 1
        self.at = [0] * times.stages
        self.stage_busy = [False] * times.stages
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
        """What happened when, or None where the stages block each other."""
        self.arrived |= {(0, action) for action in self.orders[0] if action.op is Op.FORWARD}
        for stage in range(self.times.stages):
            self._start_stage(stage)
        while self.events:
            self.now, _, done, place, action = heapq.heappop(self.events)
            done(place, action)
        if any(at < len(order) for at, order in zip(self.at, self.orders, strict=True)):
            return None
        return Trace(self.now, tuple(self.spans))

    def _use(self, name: str, length_s: float, done: _Done, place: int, action: Action) -> None:
        """Occupy a resource from now on; `done` is called with place and action at the end."""
        end = self.now + length_s
        heapq.heappush(self.events, (end, len(self.spans), done, place, action))
        self.spans.append(Span(name, action.micro_batch, self.now, end))

    def _start_stage(self, stage: int) -> None:
        if self.stage_busy[stage] or self.at[stage] == len(self.orders[stage]):
            return
        action = self.orders[stage][self.at[stage]]
        if (stage, action) not in self.arrived:
            return
        self.stage_busy[stage] = True
        length = self.times.stage_s[action.op][stage]
        self._use(f"stage {stage}", length, self._pass_done, stage, action)

    def _pass_done(self, stage: int, action: Action) -> None:
        if action.op is Op.FORWARD and stage == self.last:
            self.arrived.add((stage, Action(Op.BACKWARD, action.micro_batch)))
        elif action.op is Op.FORWARD:
            self._request(stage, action)
        elif stage > 0:
            self._request(stage - 1, action)
        if action.op is Op.BACKWARD and self.times.weights_s:
            length = self.times.weights_s[stage]
            self._use(f"stage {stage}", length, self._stage_done, stage, action)
        else:
            self._stage_done(stage, action)

    def _stage_done(self, stage: int, _: Action) -> None:
        self.stage_busy[stage] = False
        self.at[stage] += 1
        self._start_stage(stage)

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
        self.arrived.add((stage, action))
        self._start_stage(stage)
        self._start_hop(hop, action.op)

"""Schedules as data: which stage works on which micro-batch when. Standard library only.

A schedule is a table: for each stage (0 the control unit, the last the edge) the order of its
forward and backward passes. It prints as a grid, is dry-run for deadlock, and the same actions
are executed by the stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from collapipe_flwr.core.errors import ScheduleError

SCHEDULES = ("gpipe", "1f1b")


class Op(Enum):
    """What a stage does with a micro-batch."""

    FORWARD = "F"
    BACKWARD = "B"


@dataclass(frozen=True, slots=True)
class Action:
    """One pass of one micro-batch through one stage; prints as `F0`, `B3`."""

    op: Op
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.op.value}{self.micro_batch}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The actions of all stages for one optimiser step."""

    name: str
    micro_batches: int
    actions: tuple[tuple[Action, ...], ...]

    def grid(self) -> str:
        """One line per stage, one column per time slot (every action takes one slot)."""
        slots = _run(self, queue_frames=None)
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
        return len(_run(self, queue_frames))

    def in_flight(self) -> tuple[int, ...]:
        """Per stage, the most micro-batches that wait for their backward at any time."""
        return tuple(_most_in_flight(stage) for stage in self.actions)


def stage_actions(name: str, depth: int, micro_batches: int) -> tuple[Action, ...]:
    """The actions of one stage.

    `gpipe`: all forwards, then all backwards (`depth` is ignored). `1f1b`: `depth` forwards to
    warm up, then one backward and one forward in turn, so at most `depth` are in flight.
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


def forward_actions(micro_batches: int) -> tuple[Action, ...]:
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
    actions = tuple(stage_actions(name, depth, micro_batches) for depth in depths)
    schedule = Schedule(name=name, micro_batches=micro_batches, actions=actions)
    schedule.dry_run()
    return schedule


def _most_in_flight(actions: Sequence[Action]) -> int:
    most = now = 0
    for action in actions:
        now += 1 if action.op is Op.FORWARD else -1
        most = max(most, now)
    return most


def _run(schedule: Schedule, queue_frames: int | None) -> list[dict[int, Action]]:
    """Time slots, each the actions done in it by stage; an action sees only earlier slots.

    Frames are taken from a link in the order they were put, as `Link` does.
    """
    play = _Play(schedule, queue_frames)
    slots: list[dict[int, Action]] = []
    while not play.finished():
        ready = [s for s in range(play.stages) if play.blocker(s) is None and play.current(s)]
        if not ready:
            raise ScheduleError(f"schedule {schedule.name} blocks: {play.reasons()}")
        slots.append({s: play.advance(s) for s in ready})
    return slots


class _Play:
    """Where each stage stands, and what lies in each link."""

    def __init__(self, schedule: Schedule, queue_frames: int | None) -> None:
        self.stages = len(schedule.actions)
        self._actions = schedule.actions
        self._queue_frames = queue_frames
        self._next = [0] * self.stages
        self._links: dict[tuple[int, int], list[int]] = {}  # (from, to) -> micro-batches inside

    def finished(self) -> bool:
        return all(n == len(a) for n, a in zip(self._next, self._actions, strict=True))

    def current(self, stage: int) -> Action | None:
        position = self._next[stage]
        return self._actions[stage][position] if position < len(self._actions[stage]) else None

    def blocker(self, stage: int) -> str | None:
        """Why the stage cannot do its next action now, or None."""
        action = self.current(stage)
        if action is None:
            return None
        source, target = self._route(stage, action)
        inside = self._links.get((source, stage), [])
        if self._between(source) and inside[:1] != [action.micro_batch]:
            return f"stage {stage} waits with {action} for stage {source}"
        full = len(self._links.get((stage, target), [])) == self._queue_frames
        if self._between(target) and full:
            return f"stage {stage} cannot send {action} to stage {target}, whose queue is full"
        if action.op is Op.BACKWARD and action not in self._possible(stage):
            return f"stage {stage} has {action} before its forward"
        return None

    def advance(self, stage: int) -> Action:
        action = self.current(stage)
        assert action is not None
        source, target = self._route(stage, action)
        if self._between(source):
            self._links[source, stage].pop(0)
        if self._between(target):
            self._links.setdefault((stage, target), []).append(action.micro_batch)
        self._next[stage] += 1
        return action

    def reasons(self) -> str:
        return "; ".join(filter(None, (self.blocker(s) for s in range(self.stages))))

    def _possible(self, stage: int) -> set[Action]:
        done = self._actions[stage][: self._next[stage]]
        return {Action(Op.BACKWARD, a.micro_batch) for a in done if a.op is Op.FORWARD}

    def _route(self, stage: int, action: Action) -> tuple[int, int]:
        step = 1 if action.op is Op.FORWARD else -1
        return stage - step, stage + step

    def _between(self, stage: int) -> bool:
        return 0 <= stage < self.stages

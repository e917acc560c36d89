"""Schedules of one optimizer step: which stage works on which micro-batch, and in which order.

A `Schedule` lists the forward and backward passes of every stage (0 is the control unit, the last
one the edge). Stages execute these actions, `Schedule.dry_run` checks them without computing, and
`replay` plays them in time.

A stage with R replicas has R *workers*, all others have one. Micro-batch m passes replica m mod R,
so a replica takes every R-th micro-batch and meets those of a neighbouring stage with Q replicas in
a cycle of Q / gcd(R, Q): where both have as many, each meets only its counterpart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from itertools import accumulate
from math import gcd
from typing import NamedTuple

from collapipe_flwr.core.errors import ConfigError, ScheduleError

SCHEDULES = ("gpipe", "1f1b")
PIECE_BYTES = 4 * 2**20  # of the gradients that replicas exchange


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """The place of one replica among the ``replicas`` of its stage."""

    replica: int = 0
    replicas: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.replica < self.replicas:
            raise ConfigError(f"a stage of {self.replicas} replicas has none with {self.replica}")

    def own(self, micro_batches: int) -> range:
        """The micro-batches of a step that pass this replica."""
        return range(self.replica, micro_batches, self.replicas)

    def meets(self, others: int) -> tuple[int, ...]:
        """The replicas of a neighbouring stage, in the order in which micro-batches meet them."""
        period = others // gcd(self.replicas, others)
        return tuple((self.replica + self.replicas * i) % others for i in range(period))

    def lane(self, micro_batch: int, lanes: int) -> int:
        """The link, of ``lanes`` in the order of `meets`, that one of its micro-batches takes."""
        return micro_batch // self.replicas % lanes


ALONE = Turn()


def turns(replicas: int) -> tuple[Turn, ...]:
    """The places of all replicas of a stage."""
    return tuple(Turn(replica=index, replicas=replicas) for index in range(replicas))


def pieces_ahead(replica: int) -> int:
    """Pieces of its gradients that a replica sends before it waits for the first total.

    As many as are on their way to the first replica and back; the first replica never waits.
    """
    return max(2 * replica - 1, 0)


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
class Worker:
    """One replica of one stage; prints as "2", or "2.1" where the stage has several."""

    stage: int
    turn: Turn

    def __str__(self) -> str:
        return f"{self.stage}" if self.turn.replicas == 1 else f"{self.stage}.{self.turn.replica}"


class Workers:
    """All workers of a chain, numbered stage by stage, from the replicas of every stage."""

    def __init__(self, replicas: Sequence[int]) -> None:
        self.places = tuple(
            Worker(s, turn) for s, count in enumerate(replicas) for turn in turns(count)
        )
        self._replicas = tuple(replicas)
        self._first = tuple(accumulate(replicas, initial=0))

    def at(self, stage: int, micro_batch: int) -> int | None:
        """The worker of a stage that a micro-batch passes; None beyond the ends of the chain."""
        if not 0 <= stage < len(self._replicas):
            return None
        return self._first[stage] + micro_batch % self._replicas[stage]


@dataclass(frozen=True, slots=True)
class Schedule:
    """The actions of every worker in one optimizer step, stage by stage.

    ``replicas`` are those of every stage; without them every stage has one worker.
    """

    name: str
    actions: tuple[Actions, ...]
    replicas: tuple[int, ...] = ()

    @property
    def workers(self) -> Workers:
        """The workers that execute the actions, in the same order."""
        return Workers(self.replicas or (1,) * len(self.actions))

    def grid(self) -> str:
        """One line per worker, one column per time slot (every action takes one slot)."""
        slots = self._slots(queue_frames=None)
        width = max(len(str(a)) for stage in self.actions for a in stage) + 1
        lines = []
        for worker, place in enumerate(self.workers.places):
            cells = [str(slot.get(worker, "·")).ljust(width) for slot in slots]
            lines.append(f"stage {place} | " + "".join(cells).rstrip())
        return "\n".join(lines)

    def dry_run(self, queue_frames: int | None = None) -> int:
        """Play the schedule without computing; returns the number of time slots it takes.

        `queue_frames` is the capacity of each direction of each link (None: no bound).
        Raises ScheduleError that says which stage waits for what when nothing can go on.
        """
        return len(self._slots(queue_frames))

    def in_flight(self) -> tuple[int, ...]:
        """Per worker, the most micro-batches that wait for their backward at any time."""
        return tuple(
            max(accumulate((1 if op is Op.FORWARD else -1 for op, _ in stage), initial=0))
            for stage in self.actions
        )

    def _slots(self, queue_frames: int | None) -> list[dict[int, Action]]:
        """The actions done in every time slot by worker; an action sees only earlier slots."""
        progress = _Progress(self, queue_frames)
        slots: list[dict[int, Action]] = []
        while blockers := progress.blockers():
            ready = [worker for worker, reason in blockers.items() if not reason]
            if not ready:
                raise ScheduleError(f"schedule {self.name} blocks: {'; '.join(blockers.values())}")
            slots.append({worker: progress.advance(worker) for worker in ready})
        return slots


@lru_cache(maxsize=1024)
def stage_actions(name: str, depth: int, micro_batches: int, turn: Turn = ALONE) -> Actions:
    """The actions of one stage, or of one of its replicas, with its own micro-batches.

    `gpipe`: all forwards, then all backwards (`depth` is ignored). `1f1b`: `depth` forwards to
    warm up, then one backward and one forward in turn, so at most `depth` are in flight; from
    `depth` = `micro_batches` on this is GPipe.
    """
    if micro_batches < 1:
        raise ScheduleError(f"micro-batches must be >= 1, got {micro_batches}")
    own = turn.own(micro_batches)
    if name == "gpipe":
        depth = micro_batches
    elif name != "1f1b":
        raise ScheduleError(f"schedule must be one of {', '.join(SCHEDULES)}, got {name!r}")
    if depth < 1:
        raise ScheduleError(f"warm-up depth must be >= 1, got {depth}")
    warm = min(depth, len(own))
    actions = [Action(Op.FORWARD, m) for m in own[:warm]]
    for done, m in enumerate(own):
        actions.append(Action(Op.BACKWARD, m))
        if done + warm < len(own):
            actions.append(Action(Op.FORWARD, own[done + warm]))
    return tuple(actions)


def forward_actions(micro_batches: int, turn: Turn) -> Actions:
    """The actions of one worker in evaluation."""
    return tuple(Action(Op.FORWARD, m) for m in turn.own(micro_batches))


def gpipe(stages: int, micro_batches: int) -> Schedule:
    """All forwards, then all backwards, on every stage."""
    return build_schedule("gpipe", [micro_batches] * stages, micro_batches)


def one_f_one_b(depths: Sequence[int], micro_batches: int) -> Schedule:
    """One forward, one backward, with a warm-up depth per stage (classic: stages - index)."""
    return build_schedule("1f1b", depths, micro_batches)


def build_schedule(name: str, depths: Sequence[int], micro_batches: int) -> Schedule:
    """The schedule `name` over `len(depths)` stages. Raises ScheduleError if it would block."""
    schedule = unchecked_schedule(name, depths, micro_batches)
    schedule.dry_run()
    return schedule


def unchecked_schedule(
    name: str, depths: Sequence[int], micro_batches: int, replicas: Sequence[int] = ()
) -> Schedule:
    """As `build_schedule`, but it may block; a depth is that of each replica."""
    counts = tuple(replicas) or (1,) * len(depths)
    actions = tuple(
        stage_actions(name, depths[worker.stage], micro_batches, worker.turn)
        for worker in Workers(counts).places
    )
    return Schedule(name, actions, counts)


def textbook_depths(replicas: Sequence[int], slack: int = 0) -> tuple[int, ...]:
    """Warm-up depths of 1F1B per replica: a micro-batch for every worker from here to the edge.

    With ``slack`` every stage has so many more in flight than the one behind it.
    """
    behind = list(accumulate(reversed(replicas)))
    flights = reversed([most + slack * place for place, most in enumerate(behind)])
    return tuple(-(-most // own) for most, own in zip(flights, replicas, strict=True))


class _Progress:
    """The progress of each worker, and the micro-batches in each link, first in first out."""

    def __init__(self, schedule: Schedule, queue_frames: int | None) -> None:
        self._actions, self._queue_frames = schedule.actions, queue_frames
        self._workers = schedule.workers
        self._next = [0] * len(self._actions)
        self._stashed: list[set[int]] = [set() for _ in self._actions]
        self._queues: dict[tuple[int, int | None], list[int]] = {}  # by sender and receiver

    def blockers(self) -> dict[int, str]:
        """Why each worker that has actions left cannot do the next one now; empty where it can."""
        return {
            worker: self._blocker(worker, actions[at])
            for worker, (actions, at) in enumerate(zip(self._actions, self._next, strict=True))
            if at < len(actions)
        }

    def advance(self, worker: int) -> Action:
        action = self._actions[worker][self._next[worker]]
        source, target = self._route(worker, action)
        if source is not None:
            self._queues[source, worker].pop(0)
        if target is not None:
            self._queues.setdefault((worker, target), []).append(action.micro_batch)
        if action.op is Op.FORWARD:
            self._stashed[worker].add(action.micro_batch)
        self._next[worker] += 1
        return action

    def _blocker(self, worker: int, action: Action) -> str:
        source, target = self._route(worker, action)
        places, here = self._workers.places, f"stage {self._workers.places[worker]}"
        if source is not None:
            inside = self._queues.get((source, worker), [])
            if inside[:1] != [action.micro_batch]:
                return f"{here} waits with {action} for stage {places[source]}"
        queued = len(self._queues.get((worker, target), []))
        if target is not None and queued == self._queue_frames:
            return f"{here} cannot send {action} to stage {places[target]}, whose queue is full"
        if action.op is Op.BACKWARD and action.micro_batch not in self._stashed[worker]:
            return f"{here} has {action} before its forward"
        return ""

    def _route(self, worker: int, action: Action) -> tuple[int | None, int | None]:
        """The workers that the action's input comes from and its output goes to."""
        step = 1 if action.op is Op.FORWARD else -1
        at, stage = self._workers.at, self._workers.places[worker].stage
        return at(stage - step, action.micro_batch), at(stage + step, action.micro_batch)
